"""One forward and backward pass through one pipeline stage, tensor by tensor, on a ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from ds_gpt.planner.copies import ACTIVATIONS, BACKWARD, LOGITS, Copies
from ds_gpt.planner.ledger import Ledger
from ds_gpt.planner.maps import Maps
from ds_gpt.planner.shapes import Parameter, Shapes, block_places
from ds_gpt.planner.zero import GRADIENTS, WEIGHTS, Sharding


class Walk:
    """The pass. Sizes in bytes: `r` of the residual stream, `x` of what the matrices read of it, `q` of this rank's queries, `y` of its
    keys, `h` of its hidden units."""

    def __init__(self, shapes: Shapes, parameters: Sequence[Parameter], ledger: Ledger, zero: Sharding, accumulated: bool, stage: int) -> None:
        self.shapes, self.parameters, self.ledger, self.zero = shapes, parameters, ledger, zero
        self.first, self.last = stage == 0, stage == shapes.pipeline - 1
        model, element, trainer, tensor = shapes.model, shapes.element, shapes.trainer, shapes.tensor
        spread = tensor if trainer.norms_parallel else 1
        self.r = (4 if trainer.autocast else element) * shapes.tokens * model.width // spread
        self.received = 0 if self.first or trainer.states else self.r  # from the stage before, of which DeepSpeed makes a copy to compute with
        self.x = element * shapes.tokens * model.width // spread
        self.q = element * shapes.tokens * model.width // tensor
        self.y = element * shapes.tokens * model.key_heads * model.head_width // tensor
        self.h = element * shapes.tokens * model.hidden_width // tensor
        self.gated = model.ffn == "swiglu"
        # What the feed-forward keeps around its activation; a fused SwiGLU makes the gate's SiLU again.
        self.around = ((3 if trainer.fused else 4) if self.gated else 2) * self.h
        self.mask = shapes.tokens * model.width // spread if model.dropout > 0 else 0
        self.statistics = 2 * element * shapes.tokens // spread
        flash = trainer.attention == "flash"
        self.log_sum = 4 * shapes.tokens * model.heads // tensor if flash else 0
        # Attention's result comes twice where ranks share sequences: of all tokens for this rank's heads, and the other way round.
        self.exchanged = self.q if shapes.sequence > 1 else 0
        self.scores = 0 if flash else shapes.tokens * shapes.context * model.heads // tensor  # elements
        self.vocabulary = shapes.vocabulary
        self.logits = shapes.tokens * self.vocabulary  # elements
        self.chunk = min(shapes.chunk or shapes.tokens, shapes.tokens)
        self.chunked = self.chunk < shapes.tokens and shapes.task.loss != "reward"
        self.copies = Copies(ledger, element, trainer, model.dropout > 0)
        # At ZeRO 0 and 1 gradients wait; where they were accumulated before, each new one is added in place and freed.
        self.in_place = accumulated and shapes.stage <= 1
        self.start = (2 if model.positions == "learned" else 1) if self.first else 0  # parameters before the first block
        self.maps: list[Maps] = []
        end = self.start
        for places in block_places(model, tensor, shapes.task, shapes.blocks(stage)):
            moved = {name: range(end + place.start, end + place.stop) for name, place in places.items()}
            self.maps.append(Maps(shapes, ledger, moved, self._complete))
            end = moved["down.B" if "down.B" in moved else "down"].stop
        self.tail = range(end, len(parameters))
        self.frozen = shapes.task.adapts
        self.tied = model.tied_head and self.first and shapes.task.loss != "reward"  # otherwise this stage's head has a matrix of its own
        self.head_trained = not self.frozen or shapes.task.loss == "reward"
        self.head_reads = self.x if self.head_trained or self.maps[0].stays or shapes.task.loss == "answers" else 0

    def micro_step(self, in_flight: int, last: bool) -> None:
        """Forward, loss, backward; `in_flight` micro-batches have gone forward when the first goes back."""
        ledger = self.ledger
        ledger.take(ACTIVATIONS, self.received)  # DeepSpeed's buffer for it
        before = ledger.held[ACTIVATIONS]
        cast = self.shapes.element * sum(parameter.elements for parameter in self.parameters) if self.shapes.trainer.autocast else 0
        ledger.take(WEIGHTS, cast)
        self._embed()
        masks = self._make_masks()
        for maps in self.maps:
            self.zero.gather(*self._span(maps))
            self._forward(maps, kept=self.shapes.policy)
        others = (in_flight - 1) * (ledger.held[ACTIVATIONS] - before)
        ledger.take(ACTIVATIONS, others)
        if self.last:
            self.zero.gather(self.tail.start, len(self.tail))
            ledger.take(ACTIVATIONS, self.x + self.statistics)  # the final norm
            self._forward_of_head()
        ledger.end("forward and loss")
        self._backward_of_head()
        for maps in reversed(self.maps):
            self.zero.gather_again(*self._span(maps))
            self._backward(maps)
            self.zero.release(*self._span(maps))
        self._backward_of_embedding()
        ledger.give(ACTIVATIONS, others + masks + self.received)
        ledger.give(WEIGHTS, cast)
        self.zero.reduce(last)
        ledger.end("backward")

    def _span(self, maps: Maps) -> tuple[int, int]:
        """First parameter of a block, and how many it has."""
        first = maps.places["attention_norm"].start
        return first, max(place.stop for place in maps.places.values()) - first

    def _forward_of_head(self) -> None:
        if not self.chunked:
            self.copies.forward_of_loss(self.logits)
        elif self.shapes.task.loss == "tokens":
            self._chunked_gradients()
        else:
            self.copies.forward_of_loss(self.chunk * self.vocabulary)
            self.ledger.give(LOGITS, self.ledger.held[LOGITS])
        self.ledger.give(ACTIVATIONS, self.x - self.head_reads)

    def _chunked_gradients(self) -> None:
        """Forward and backward of one chunk after another; the gradients of the hidden states and of the matrix stay."""
        ledger, element = self.ledger, self.shapes.element
        ledger.take(ACTIVATIONS, self.x)
        matrix, chunk = self.vocabulary * self.shapes.model.width * self.head_trained, self.chunk * self.vocabulary
        ledger.take(GRADIENTS, 4 * matrix)
        ledger.take(LOGITS, 12 * chunk)  # log-probabilities, their gradient, and the logits'
        ledger.give(LOGITS, 12 * chunk)
        ledger.take(LOGITS, element * (chunk + matrix))
        ledger.give(LOGITS, element * (chunk + matrix))

    def _embed(self) -> None:
        if not self.first:
            self.ledger.take(ACTIVATIONS, self.r + self.received)
            return
        self.zero.gather(0, self.start)
        learned = self.r + self.r // (1 if self.shapes.task.own_positions else self.shapes.rows) if self.start == 2 else 0
        self.ledger.take(ACTIVATIONS, self.r + learned)
        self.ledger.give(ACTIVATIONS, learned)
        if self.mask:
            self.ledger.take(ACTIVATIONS, self.r + self.mask)
            self.ledger.give(ACTIVATIONS, self.r + (self.mask if self.frozen else 0))

    def _make_masks(self) -> int:
        """Bytes of what says, for each sequence, what its tokens see; made of as many bools."""
        if not self.shapes.task.masked:
            return 0
        seen = self.shapes.rows * self.shapes.context**2
        self.ledger.take(ACTIVATIONS, (self.shapes.element + 1) * seen)
        self.ledger.give(ACTIVATIONS, seen)
        return self.shapes.element * seen

    def _heads(self) -> int:
        """What autograd keeps of queries, keys and values."""
        q, y, model = self.q, self.y, self.shapes.model
        projected, grouped = q + 2 * y, model.key_heads < model.heads
        rotary, exchanged = model.positions == "rotary", self.shapes.sequence > 1
        if self.shapes.masked and grouped:  # keys and values are repeated, so the projection's are not kept
            kept = 3 * q
        elif exchanged:  # what came from the other ranks
            kept = q + 2 * y
        elif rotary or model.qk_norm:
            kept = q + y + (y if rotary and not model.qk_norm else 0)  # values are a view of the projection otherwise
        else:
            kept = q if grouped else 0  # queries are a copy where they are not evenly spaced
        statistics = 2 * self.shapes.element * self.shapes.tokens * (model.heads + model.key_heads) // self.shapes.tensor
        needed = model.qk_norm or not (rotary or exchanged or (self.shapes.masked and grouped))
        return kept + (projected if needed else 0) + (statistics if model.qk_norm else 0)

    def _attention_kept(self, maps: Maps) -> int:
        """What autograd keeps of norm, qkv, attention, dropout and sum."""
        read = maps.reads(self.x, "qkv") + maps.beside("qkv", self.x) + maps.beside("out", self.q) + self._heads() + self.q + self.exchanged
        return read + self.r + self.statistics + self.log_sum + self.mask + self.copies.kept_scores(self.scores)

    def _feed_forward_kept(self, maps: Maps) -> int:
        """The same of the norm and the maps of the feed-forward."""
        into = ("gate", "up") if self.gated else ("up",)
        read = maps.reads(self.x, *into) + sum(maps.beside(name, self.x) for name in into) + maps.beside("down", self.h)
        return read + self.statistics + self.around - self.h + maps.reads(self.h, "down") + self.mask

    def _attention_part(self, maps: Maps) -> None:
        self.copies.forward_of_scores(self.scores)
        maps.forward("qkv", self.q + 2 * self.y, self.x)
        self.ledger.take(ACTIVATIONS, self._attention_kept(maps) + self.x)  # the projection's result goes when it has been added
        maps.forward("out", self.x, -self.x - self.r)
        self.ledger.give(ACTIVATIONS, self.x)

    def _forward(self, maps: Maps, kept: str | None) -> None:
        """One block. Its input is on the ledger already; its output will be."""
        ledger, x, h = self.ledger, self.x, self.h
        self._attention_part(maps)
        if kept is None:
            maps.forward("up", h, x + (2 * h if self.gated else 0))
            whole = self._feed_forward_kept(maps)
            gone = h - maps.reads(h, "down")  # what `down` reads
            ledger.take(ACTIVATIONS, whole + gone + x + self.r)
            maps.forward("down", x, -x - self.r)
            ledger.give(ACTIVATIONS, gone + x)
            return
        saved = self._saved_by_selective(maps) if kept == "selective" else 0
        of_feed_forward = x + (2 if self.gated else 1) * h + self._adapters_results(maps, False)
        of_attention = saved - of_feed_forward if saved else 0
        ledger.give(ACTIVATIONS, self._attention_kept(maps) - of_attention - self.r)  # the sum before the second norm stays a while
        maps.forward("up", h, x + (h if self.gated else 0))
        made = (3 if self.gated else 2) * h + (h if saved and self.gated else 0)
        ledger.take(ACTIVATIONS, x + made + (x if saved else 0) + (self._adapters_results(maps, False) if saved else 0))
        ledger.give(ACTIVATIONS, made - ((2 if self.gated else 1) * h if saved else 0))
        ledger.take(ACTIVATIONS, self.r)
        ledger.give(ACTIVATIONS, x + self.r)  # second norm's result, the sum before it

    def _adapters_results(self, maps: Maps, attention: bool) -> int:
        """Results of A and B of the adapters of attention, or of the feed-forward."""
        of = {"qkv": self.q + 2 * self.y, "out": self.x} if attention else {"gate": self.h, "up": self.h, "down": self.x}
        return sum(maps.inner + size for name, size in of.items() if maps.adapted(name))

    def _saved_by_selective(self, maps: Maps) -> int:
        """What the selective policy keeps of a block besides its input: results of linear maps, and of attention without dropout."""
        attention = self.q + self.log_sum if self.shapes.model.dropout == 0 else 0
        of_adapters = self._adapters_results(maps, True) + self._adapters_results(maps, False)
        return self.q + 2 * self.y + 2 * self.x + (2 if self.gated else 1) * self.h + attention + of_adapters

    def _backward_of_head(self) -> None:
        ledger, matrix = self.ledger, self.vocabulary * self.shapes.model.width
        if not self.last:
            self.zero.begin()
            ledger.take(BACKWARD, self.r)  # from the stage behind
            ledger.give(ACTIVATIONS, self.r)
            return
        matrix *= self.head_trained
        if self.chunked:
            self.zero.begin()
            if self.shapes.task.loss != "tokens":
                self._chunked_gradients()
            self._weight_gradient(matrix)
            ledger.give(GRADIENTS, 4 * matrix)
            ledger.give(ACTIVATIONS, self.x)
            ledger.take(BACKWARD, self.x)
        else:
            self.copies.backward_of_loss(self.logits, self.zero.begin)
            self._weight_gradient(matrix)
            ledger.take(BACKWARD, self.x)
            ledger.give(LOGITS, ledger.held[LOGITS])
        if not self.tied and self.head_trained:  # a tied one waits for the embedding's
            self._made(self.parameters[-1])
        ledger.take(BACKWARD, self.r)
        self._complete(self.tail[: len(self.tail) - (not self.tied)])
        ledger.give(BACKWARD, self.x)
        ledger.give(ACTIVATIONS, self.head_reads + self.r + self.statistics)  # the final norm, and the last block's output

    def _weight_gradient(self, elements: int) -> None:
        self.ledger.take(GRADIENTS, elements * self.zero.fresh)

    def _complete(self, indices: range, free: Callable[[], None] = lambda: None) -> None:
        """Gradients of these parameters are made at once, and ready one after another, a bias before its matrix."""
        trained = list(filter(attrgetter("trained"), self.parameters[indices.start : indices.stop]))
        for parameter in trained:
            self._weight_gradient(parameter.elements)
        free()
        for parameter in reversed(trained):
            self._made(parameter)

    def _made(self, parameter: Parameter) -> None:
        if self.in_place:
            self.ledger.give(GRADIENTS, parameter.elements * self.zero.fresh)
        else:
            self.zero.ready(parameter)

    def _recompute(self, maps: Maps) -> None:
        """Make again what the policy did not keep of a block."""
        if self.shapes.policy is None:
            return
        saved = self._saved_by_selective(maps) if self.shapes.policy == "selective" else 0
        self.copies.forward_of_scores(self.scores)
        whole = self._attention_kept(maps) + self._feed_forward_kept(maps)
        transient = self.x if self.mask and not saved else 0
        # The results of the two projections that were kept are not needed once they have been added.
        self.ledger.take(ACTIVATIONS, whole - saved + (2 * self.x if saved else 0) + transient)
        self.ledger.give(ACTIVATIONS, transient + ((2 if self.mask else 1) * self.x if saved else 0))

    def _backward(self, maps: Maps) -> None:
        """One block. The gradient of its output is held as BACKWARD; in the end that of its input is."""
        ledger, x, h = self.ledger, self.x, self.h
        self._recompute(maps)
        dropped = x if self.mask else 0
        ledger.take(BACKWARD, dropped)
        ledger.give(ACTIVATIONS, self.mask)
        maps.backward("down", x, h, dropped, maps.reads(h, "down"))
        self._backward_of_activation(maps)
        self._backward_of_norm(maps.places["feed_forward_norm"])
        ledger.give(ACTIVATIONS, self.r + self.statistics)
        ledger.take(BACKWARD, dropped)
        ledger.give(ACTIVATIONS, self.mask)
        maps.backward("out", x, self.q, dropped, self.exchanged)
        self._backward_of_attention(maps)
        self._backward_of_norm(maps.places["attention_norm"])
        leftover = x if self.shapes.policy == "selective" and not self.mask else 0  # the last projection's kept result
        ledger.give(ACTIVATIONS, self.r + self.statistics + leftover)

    def _backward_of_activation(self, maps: Maps) -> None:
        """From the gradient of what `down` got to that of the norm's result."""
        ledger, x, h = self.ledger, self.x, self.h
        if self.gated:
            ledger.take(BACKWARD, 2 * h)  # the product's two factors
            ledger.give(BACKWARD, h)
            ledger.give(ACTIVATIONS, self.around - 2 * h)
            maps.backward("up", h, x, h, 0)
        ledger.take(BACKWARD, h)  # SiLU or GELU
        ledger.give(BACKWARD, h)
        ledger.give(ACTIVATIONS, h)
        maps.backward("gate" if self.gated else "up", h, x, h, maps.reads(x, *(("gate", "up") if self.gated else ("up",))))
        ledger.give(BACKWARD, x if self.gated else 0)

    def _backward_of_norm(self, place: range) -> None:
        """The gradient of its input, added to the one that went past."""
        self.ledger.take(BACKWARD, self.r)
        self._complete(place)
        self.ledger.give(BACKWARD, self.x)
        self.ledger.take(BACKWARD, self.r)
        self.ledger.give(BACKWARD, 2 * self.r)

    def _backward_of_attention(self, maps: Maps) -> None:
        """From the gradient of attention's result to that of the norm's."""
        ledger, q, y = self.ledger, self.q, self.y
        self.copies.backward_of_scores(self.scores)
        ledger.take(BACKWARD, q + 2 * y)  # of q, k and v
        ledger.give(BACKWARD, q)
        for name in ("q_norm", "k_norm") if "q_norm" in maps.places else ():
            self._complete(maps.places[name])
        ledger.take(BACKWARD, q + 2 * y)  # stacked
        ledger.give(ACTIVATIONS, self._heads() + q + self.log_sum)
        ledger.give(BACKWARD, q + 2 * y)
        maps.backward("qkv", q + 2 * y, self.x, q + 2 * y, maps.reads(self.x, "qkv"))

    def _backward_of_embedding(self) -> None:
        ledger = self.ledger
        ledger.give(BACKWARD, self.r)
        if not self.first:
            ledger.give(ACTIVATIONS, self.received)
            return
        ledger.give(ACTIVATIONS, 0 if self.frozen else self.mask)
        tokens = self.parameters[0]
        self._complete(range(1, self.start))
        if self.tied and self.last and not self.frozen:
            size = tokens.elements * self.zero.fresh
            ledger.take(GRADIENTS, 2 * size)  # the embedding's, and its sum with the head's
            ledger.give(GRADIENTS, 2 * size)
            self._made(tokens)
        else:
            self._complete(range(1))
        self.zero.release(0, self.start)
