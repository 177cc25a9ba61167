"""Memory of one rank over one optimizer step, from the configuration alone.

The step is walked through tensor by tensor, in the order in which PyTorch makes and frees them, on a ledger that knows
sizes only. So the peak is where it really is, and each byte of it has a kind. What autograd keeps of a block, in
elements, B x T tokens, width D, G key/value heads of K channels, feed-forward width F:

    inputs of both norms 2 BTD, of qkv and up 2 BTD, q k v BT (D + 2 GK), attention's output BTD, around the GELU 2 BTF
    or in SwiGLU 4 BTF, the dropout masks at a byte an element, and attention's log-sum-exp in fp32.

`tests/planner` holds the result to 2% of the trace of the real engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_gpt.config import Composed
from ds_gpt.planner.ledger import Ledger, Moment
from ds_gpt.planner.shapes import Parameter, Shapes, block_modules, parameters_of
from ds_gpt.planner.zero import GRADIENTS, Sharding
from ds_gpt.planner.zero3 import sharding

ACTIVATIONS, LOGITS, BACKWARD = "activations", "logits and loss", "backward temporaries"


@dataclass(frozen=True)
class Memory:
    """What one rank needs.

    Attributes:
        peak: the fullest moment: its phase, bytes, and bytes by kind.
        moments: the fullest moment of each phase, in order.
        resident: bytes between two steps, by kind.
        host_bytes: what is offloaded to host memory, by this rank.
    """

    peak: Moment
    moments: tuple[Moment, ...]
    resident: dict[str, int]
    host_bytes: int


def memory(composed: Composed) -> Memory:
    """Memory of a composed run.

    Raises:
        ConfigError: what the planner has no figures for.
    """
    return memory_of(Shapes.of(composed))


def memory_of(shapes: Shapes) -> Memory:
    """Memory of one rank in a step like all but the first: the optimizer's state exists."""
    ledger = Ledger()
    parameters = parameters_of(shapes.model)
    zero = sharding(shapes, parameters, ledger)
    resident = {kind: size for kind, size in ledger.held.items() if size}
    ledger.take(ACTIVATIONS, 16 * shapes.tokens * shapes.accumulation)  # token ids, int64
    ledger.take(ACTIVATIONS, _constants(shapes))
    micro_steps = min(shapes.accumulation, 2)  # the first, and the last, which finds accumulated gradients
    for number in range(micro_steps):
        _Walk(shapes, parameters, ledger, zero, accumulated=number > 0).micro_step(last=number == micro_steps - 1)
    zero.step()
    ledger.end("step")
    return Memory(ledger.fullest(), tuple(ledger.moments), resident, zero.host_bytes)


def _constants(shapes: Shapes) -> int:
    """What all layers share: the mask of a sliding window, and the rotation of rotary positions."""
    model, element = shapes.model, shapes.element
    mask = element * model.context**2 if _masked(shapes) else 0
    return mask + (2 * element * model.context * model.head_width if model.positions == "rotary" else 0)


def _masked(shapes: Shapes) -> bool:
    window = shapes.model.sliding_window
    return window is not None and window < shapes.model.context


class _Walk:
    """One forward and backward pass."""

    def __init__(self, shapes: Shapes, parameters: list[Parameter], ledger: Ledger, zero: Sharding, accumulated: bool) -> None:
        self.shapes, self.parameters, self.ledger, self.zero = shapes, parameters, ledger, zero
        model, element = shapes.model, shapes.element
        self.x = element * shapes.tokens * model.width
        self.y = element * shapes.tokens * model.key_heads * model.head_width
        self.h = element * shapes.tokens * model.hidden_width
        self.gated = model.ffn == "swiglu"
        self.around = (4 if self.gated else 2) * self.h  # what the feed-forward keeps around its activation
        self.mask = shapes.tokens * model.width if model.dropout > 0 else 0
        self.statistics = 2 * element * shapes.tokens
        self.log_sum = 4 * shapes.tokens * model.heads
        self.logits = shapes.tokens * model.vocabulary  # elements
        self.chunk = min(shapes.chunk or shapes.tokens, shapes.tokens)
        self.chunked = self.chunk < shapes.tokens
        # At ZeRO 0 and 1 gradients wait; where they were accumulated before, each new one is added in place and freed.
        self.in_place = accumulated and shapes.stage <= 1
        self.places: dict[str, range] = {}
        self.block = 0  # parameters of one
        for name, sizes in block_modules(model):
            self.places[name] = range(self.block, self.block + len(sizes))
            self.block += len(sizes)
        self.first = 2 if model.positions == "learned" else 1  # parameters before the first block
        self.tail = range(self.first + model.layers * self.block, len(parameters))

    def micro_step(self, last: bool) -> None:
        """Forward, loss, backward."""
        ledger, layers = self.ledger, self.shapes.model.layers
        self._embed()
        for layer in range(layers):
            self.zero.gather(self.first + layer * self.block, self.block)
            self._forward(kept=self.shapes.policy)
        self.zero.gather(self.tail.start, len(self.tail))
        ledger.take(ACTIVATIONS, self.x + self.statistics)  # the final norm
        self._chunked_loss() if self.chunked else self._whole_loss()
        ledger.end("forward and loss")
        self._backward_of_head()
        for layer in reversed(range(layers)):
            index = self.first + layer * self.block
            self.zero.gather_again(index, self.block)
            self._backward(index)
            self.zero.release(index, self.block)
        self._backward_of_embedding()
        self.zero.reduce(last)
        ledger.end("backward")

    def _whole_loss(self) -> None:
        logits, copy = self.logits * self.shapes.element, 4 * self.logits if self.shapes.element < 4 else 0
        self.ledger.take(LOGITS, logits)
        self.ledger.take(LOGITS, copy + 4 * self.logits)
        self.ledger.give(LOGITS, copy + logits)

    def _chunked_loss(self) -> None:
        """Forward and backward of one chunk after another; the gradients of the hidden states and of the matrix stay."""
        ledger, element, model = self.ledger, self.shapes.element, self.shapes.model
        ledger.take(ACTIVATIONS, self.x)
        matrix = model.vocabulary * model.width
        ledger.take(GRADIENTS, 4 * matrix)
        chunk = self.chunk * model.vocabulary
        ledger.take(LOGITS, 12 * chunk)  # log-probabilities, their gradient, and the logits'
        ledger.give(LOGITS, 12 * chunk)
        ledger.take(LOGITS, element * (chunk + matrix))
        ledger.give(LOGITS, element * (chunk + matrix))

    def _embed(self) -> None:
        self.zero.gather(0, self.first)
        learned = self.x + self.x // self.shapes.micro_batch if self.first == 2 else 0
        self.ledger.take(ACTIVATIONS, self.x + learned)
        self.ledger.give(ACTIVATIONS, learned)
        if self.mask:
            self.ledger.take(ACTIVATIONS, self.x + self.mask)
            self.ledger.give(ACTIVATIONS, self.x)

    def _heads(self) -> int:
        """What autograd keeps of queries, keys and values."""
        x, y, model = self.x, self.y, self.shapes.model
        projected, grouped = x + 2 * y, model.key_heads < model.heads
        rotary = model.positions == "rotary"
        if _masked(self.shapes) and grouped:  # keys and values are repeated, so the projection's are not kept
            kept = 3 * x
        elif rotary or model.qk_norm:
            kept = x + y + (y if rotary and not model.qk_norm else 0)  # values are a view of the projection otherwise
        else:
            kept = x if grouped else 0  # queries are a copy where they are not evenly spaced
        statistics = 2 * self.shapes.element * self.shapes.tokens * (model.heads + model.key_heads)
        needed = model.qk_norm or not (rotary or (_masked(self.shapes) and grouped))
        return kept + (projected if needed else 0) + (statistics if model.qk_norm else 0)

    def _attention_kept(self) -> int:
        """What autograd keeps of norm, qkv, attention, dropout and sum."""
        return 3 * self.x + self._heads() + self.statistics + self.log_sum + self.mask

    def _attention_part(self) -> None:
        self.ledger.take(ACTIVATIONS, self._attention_kept() + self.x)  # the projection's result goes when it has been added
        self.ledger.give(ACTIVATIONS, self.x)

    def _forward(self, kept: str | None) -> None:
        """One block. Its input is on the ledger already; its output will be."""
        ledger, x, h = self.ledger, self.x, self.h
        self._attention_part()
        if kept is None:
            ledger.take(ACTIVATIONS, x + self.statistics + self.around + self.mask + 2 * x)
            ledger.give(ACTIVATIONS, x)
            return
        saved = self._saved_by_selective() if kept == "selective" else 0
        of_attention = saved - x - (2 if self.gated else 1) * h if saved else 0  # all but what the feed-forward saves
        ledger.give(ACTIVATIONS, self._attention_kept() - of_attention - x)  # the sum before the second norm stays a while
        made = (3 if self.gated else 2) * h + (h if saved and self.gated else 0)
        ledger.take(ACTIVATIONS, x + made + (x if saved else 0))
        ledger.give(ACTIVATIONS, made - ((2 if self.gated else 1) * h if saved else 0))
        ledger.take(ACTIVATIONS, x)
        ledger.give(ACTIVATIONS, 2 * x)  # second norm's result, the sum before it

    def _saved_by_selective(self) -> int:
        """What the selective policy keeps of a block besides its input: results of linear maps, and of attention without dropout."""
        attention = self.x + self.log_sum if self.shapes.model.dropout == 0 else 0
        return 3 * self.x + 2 * self.y + (2 if self.gated else 1) * self.h + attention

    def _backward_of_head(self) -> None:
        ledger, model, element = self.ledger, self.shapes.model, self.shapes.element
        self.zero.begin()
        if self.chunked:
            self._weight_gradient(model.vocabulary * model.width)
            ledger.give(GRADIENTS, 4 * model.vocabulary * model.width)
            ledger.give(ACTIVATIONS, self.x)
            ledger.take(BACKWARD, self.x)
        else:
            ledger.take(LOGITS, 8 * self.logits)  # gradients of the log-probabilities, and through the softmax
            ledger.give(LOGITS, 8 * self.logits)
            gradient = self.logits * element
            ledger.give(LOGITS, 4 * self.logits)
            ledger.take(LOGITS, gradient)
            self._weight_gradient(model.vocabulary * model.width)
            ledger.take(BACKWARD, self.x)
            ledger.give(LOGITS, gradient)
        if not model.tied_head:  # a tied one waits for the embedding's
            self._made(self.parameters[-1])
        ledger.take(BACKWARD, self.x)
        self._complete(self.tail[: len(self.tail) - (not model.tied_head)])
        ledger.give(BACKWARD, self.x)
        ledger.give(ACTIVATIONS, 2 * self.x + self.statistics)  # the final norm, and the last block's output

    def _weight_gradient(self, elements: int) -> None:
        self.ledger.take(GRADIENTS, elements * self.shapes.element)

    def _complete(self, indices: range) -> None:
        """Gradients of these parameters are made, and ready."""
        for parameter in self.parameters[indices.start : indices.stop]:
            self._weight_gradient(parameter.elements)
            self._made(parameter)

    def _made(self, parameter: Parameter) -> None:
        if self.in_place:
            self.ledger.give(GRADIENTS, parameter.elements * self.shapes.element)
        else:
            self.zero.ready(parameter)

    def _recompute(self) -> None:
        """Make again what the policy did not keep of a block."""
        if self.shapes.policy is None:
            return
        saved = self._saved_by_selective() if self.shapes.policy == "selective" else 0
        whole = self._attention_kept() + self.x + self.statistics + self.around + self.mask
        transient = self.x if self.mask and not saved else 0
        # The results of the two projections that were kept are not needed once they have been added.
        self.ledger.take(ACTIVATIONS, whole - saved + (2 * self.x if saved else 0) + transient)
        self.ledger.give(ACTIVATIONS, transient + ((2 if self.mask else 1) * self.x if saved else 0))

    def _backward(self, index: int) -> None:
        """One block. The gradient of its output is held as BACKWARD; in the end that of its input is."""
        ledger, x, h = self.ledger, self.x, self.h
        places = {name: range(index + place.start, index + place.stop) for name, place in self.places.items()}
        self._recompute()
        dropped = x if self.mask else 0
        ledger.take(BACKWARD, dropped)
        ledger.give(ACTIVATIONS, self.mask)
        ledger.take(BACKWARD, h)
        self._complete(places["down"])
        ledger.give(BACKWARD, dropped)
        ledger.give(ACTIVATIONS, h)
        self._backward_of_activation(places)
        ledger.give(ACTIVATIONS, x)
        self._backward_of_norm(places["feed_forward_norm"])
        ledger.give(ACTIVATIONS, x + self.statistics)
        ledger.take(BACKWARD, dropped)
        ledger.give(ACTIVATIONS, self.mask)
        ledger.take(BACKWARD, x)
        self._complete(places["out"])
        ledger.give(BACKWARD, dropped)
        self._backward_of_attention(places)
        ledger.give(ACTIVATIONS, x)
        self._backward_of_norm(places["attention_norm"])
        leftover = x if self.shapes.policy == "selective" and not self.mask else 0  # the last projection's kept result
        ledger.give(ACTIVATIONS, x + self.statistics + leftover)

    def _backward_of_activation(self, places: dict[str, range]) -> None:
        """From the gradient of what `down` got to that of the norm's result."""
        ledger, x, h = self.ledger, self.x, self.h
        if self.gated:
            ledger.take(BACKWARD, 2 * h)  # the product's two factors
            ledger.give(BACKWARD, h)
            ledger.give(ACTIVATIONS, 2 * h)
            ledger.take(BACKWARD, x)
            self._complete(places["up"])
            ledger.give(BACKWARD, h)
        ledger.take(BACKWARD, h)  # SiLU or GELU
        ledger.give(BACKWARD, h)
        ledger.give(ACTIVATIONS, h)
        ledger.take(BACKWARD, x)
        self._complete(places["gate" if self.gated else "up"])
        ledger.give(BACKWARD, h + (x if self.gated else 0))

    def _backward_of_norm(self, place: range) -> None:
        """The gradient of its input, added to the one that went past."""
        self.ledger.take(BACKWARD, self.x)
        self._complete(place)
        self.ledger.give(BACKWARD, self.x)
        self.ledger.take(BACKWARD, self.x)
        self.ledger.give(BACKWARD, 2 * self.x)

    def _backward_of_attention(self, places: dict[str, range]) -> None:
        """From the gradient of attention's result to that of the norm's."""
        ledger, x, y = self.ledger, self.x, self.y
        ledger.take(BACKWARD, x + 2 * y)  # of q, k and v
        ledger.give(BACKWARD, x)
        for name in ("q_norm", "k_norm") if "q_norm" in places else ():
            self._complete(places[name])
        ledger.take(BACKWARD, x + 2 * y)  # stacked
        ledger.give(ACTIVATIONS, self._heads() + x + self.log_sum)
        ledger.give(BACKWARD, x + 2 * y)
        ledger.take(BACKWARD, x)
        self._complete(places["qkv"])
        ledger.give(BACKWARD, x + 2 * y)

    def _backward_of_embedding(self) -> None:
        ledger, element = self.ledger, self.shapes.element
        tokens = self.parameters[0]
        ledger.give(BACKWARD, self.x)
        ledger.give(ACTIVATIONS, self.mask)
        self._complete(range(1, self.first))
        if self.shapes.model.tied_head:
            ledger.take(GRADIENTS, 2 * tokens.elements * element)  # the embedding's, and its sum with the head's
            ledger.give(GRADIENTS, 2 * tokens.elements * element)
            self._made(tokens)
        else:
            self._complete(range(1))
        self.zero.release(0, self.first)
