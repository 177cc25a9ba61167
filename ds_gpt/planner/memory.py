"""Memory of one rank over one optimizer step, from the configuration alone.

The step is walked through tensor by tensor, in the order in which PyTorch makes and frees them, on a ledger that knows
sizes only. So the peak is where it really is, and each byte of it has a kind. What autograd keeps of a block, in
elements, B x T tokens, width D, feed-forward width F:

    inputs of both norms 2 BTD, of qkv and up 2 BTD, q k v 3 BTD, attention's output BTD, around the GELU 2 BTF
    and its dropout masks at a byte an element, and attention's log-sum-exp in fp32.

`tests/planner` holds the result to 2% of the trace of the real engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_gpt.config import Composed
from ds_gpt.planner.ledger import Ledger, Moment
from ds_gpt.planner.copies import ACTIVATIONS, BACKWARD, LOGITS, Copies
from ds_gpt.planner.shapes import BLOCK_PARAMETERS, Parameter, Shapes
from ds_gpt.planner.zero import GRADIENTS, WEIGHTS, Sharding
from ds_gpt.planner.zero3 import sharding


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


def memory_of(shapes: Shapes, last_stage: bool = False) -> Memory:
    """Memory of the fullest rank in a step like all but the first: the optimizer's state exists. `last_stage`: of that alone."""
    if shapes.pipeline == 1:
        return _stage(shapes, True, True, 1)
    last = _stage(shapes, False, True, 1)
    if last_stage:
        return last
    # One forward, one backward (Narayanan et al. 2021, section 2.2): the first stage holds as many micro-batches as there are stages.
    first = _stage(shapes, True, False, min(shapes.pipeline, shapes.accumulation))
    return max(first, last, key=lambda memory: memory.peak.bytes)


def _stage(shapes: Shapes, first: bool, last: bool, in_flight: int) -> Memory:
    ledger = Ledger()
    parameters = shapes.parameters(first, last)
    zero = sharding(shapes, parameters, ledger)
    resident = {kind: size for kind, size in ledger.held.items() if size}
    ledger.take(ACTIVATIONS, 16 * shapes.tokens * shapes.accumulation)  # token ids, int64
    micro_steps = min(shapes.accumulation, 2)  # the first, and the last, which finds accumulated gradients
    for number in range(micro_steps):
        walk = _Walk(shapes, parameters, ledger, zero, accumulated=number > 0, first=first, last=last)
        walk.micro_step(in_flight, last=number == micro_steps - 1)
    zero.step()
    ledger.end("step")
    return Memory(ledger.fullest(), tuple(ledger.moments), resident, zero.host_bytes)


class _Walk:
    """One forward and backward pass through one pipeline stage."""

    def __init__(self, shapes: Shapes, parameters: Sequence[Parameter], ledger: Ledger, zero: Sharding, accumulated: bool, first: bool, last: bool) -> None:
        self.shapes, self.parameters, self.ledger, self.zero = shapes, parameters, ledger, zero
        self.first, self.last = first, last
        model, element, trainer, tensor = shapes.model, shapes.element, shapes.trainer, shapes.tensor
        spread = tensor if trainer.norms_parallel else 1
        self.residual = 4 if trainer.autocast else element  # bytes of a number in the residual stream
        self.r = self.residual * shapes.tokens * model.width // spread
        self.x = element * shapes.tokens * model.width // spread  # the same in what the matrices read
        self.a = element * shapes.tokens * model.width // tensor  # of this rank's heads
        self.h = element * shapes.tokens * model.hidden_width // tensor
        self.mask = shapes.tokens * model.width // spread if model.dropout > 0 else 0
        self.statistics = 2 * element * shapes.tokens // spread
        flash = trainer.attention == "flash"
        self.log_sum = 4 * shapes.tokens * model.heads // tensor if flash else 0
        self.scores = 0 if flash else shapes.tokens * model.context * model.heads // tensor  # elements
        self.logits = shapes.tokens * model.vocabulary // (tensor if trainer.vocabulary_parallel else 1)  # elements
        self.copies = Copies(ledger, element, shapes.trainer, model.dropout > 0)
        # At ZeRO 0 and 1 gradients wait; where they were accumulated before, each new one is added in place and freed.
        self.in_place = accumulated and shapes.stage <= 1

    def micro_step(self, in_flight: int, last: bool) -> None:
        """Forward, loss, backward; `in_flight` micro-batches have gone forward when the first goes back."""
        ledger, before = self.ledger, self.ledger.held[ACTIVATIONS]
        start, blocks = 2 * self.first, -(-self.shapes.model.layers // self.shapes.pipeline)
        cast = self.shapes.element * sum(parameter.elements for parameter in self.parameters) if self.shapes.trainer.autocast else 0
        ledger.take(WEIGHTS, cast)
        self._embed()
        for block in range(blocks):
            self.zero.gather(start + block * BLOCK_PARAMETERS, BLOCK_PARAMETERS)
            self._forward(kept=self.shapes.policy)
        others = (in_flight - 1) * (ledger.held[ACTIVATIONS] - before)
        ledger.take(ACTIVATIONS, others)
        if self.last:
            self.zero.gather(start + blocks * BLOCK_PARAMETERS, 2)
            ledger.take(ACTIVATIONS, self.x + self.statistics)  # the final norm
            self.copies.forward_of_loss(self.logits)
        ledger.end("forward and loss")
        self._backward_of_head(start + blocks * BLOCK_PARAMETERS)
        for block in reversed(range(blocks)):
            index = start + block * BLOCK_PARAMETERS
            self.zero.gather_again(index, BLOCK_PARAMETERS)
            self._backward(index)
            self.zero.release(index, BLOCK_PARAMETERS)
        self._backward_of_embedding()
        ledger.give(ACTIVATIONS, others)
        ledger.give(WEIGHTS, cast)
        self.zero.reduce(last)
        ledger.end("backward")

    def _embed(self) -> None:
        if not self.first:
            self.ledger.take(ACTIVATIONS, self.r)  # from the stage before
            return
        self.zero.gather(0, 2)
        positions = self.r // self.shapes.micro_batch
        self.ledger.take(ACTIVATIONS, 2 * self.r + positions)
        self.ledger.give(ACTIVATIONS, self.r + positions)
        if self.mask:
            self.ledger.take(ACTIVATIONS, self.r + self.mask)
            self.ledger.give(ACTIVATIONS, self.r)

    @property
    def _attention_kept(self) -> int:
        """What autograd keeps of norm, qkv, attention, dropout and sum."""
        return self.x + 4 * self.a + self.r + self.statistics + self.log_sum + self.mask + self.copies.kept_scores(self.scores)

    def _attention_part(self) -> int:
        """Norm, qkv, attention, dropout and sum; returns what autograd keeps of it."""
        kept = self._attention_kept
        self.copies.forward_of_scores(self.scores)
        self.ledger.take(ACTIVATIONS, kept + self.x)  # the projection's result goes when it has been added
        self.ledger.give(ACTIVATIONS, self.x)
        return kept

    def _forward(self, kept: str | None) -> None:
        """One block. Its input is on the ledger already; its output will be."""
        ledger, x, h = self.ledger, self.x, self.h
        if kept is None:
            self._attention_part()
            ledger.take(ACTIVATIONS, x + self.statistics + 2 * h + self.mask + x + self.r)
            ledger.give(ACTIVATIONS, x)
            return
        saved = self._saved_by_selective() if kept == "selective" else 0
        of_attention = 4 * self.a + x + self.log_sum - (self.a + self.log_sum if self.mask else 0) if saved else 0
        attention = self._attention_part()
        ledger.give(ACTIVATIONS, attention - of_attention - self.r)  # the sum before the second norm stays a while
        ledger.take(ACTIVATIONS, x + 2 * h + (x if saved else 0))
        ledger.give(ACTIVATIONS, h if saved else 2 * h)  # the GELU's result; without saving, also its input
        ledger.take(ACTIVATIONS, self.r)
        ledger.give(ACTIVATIONS, x + self.r)  # second norm's result, the sum before it

    def _saved_by_selective(self) -> int:
        """What the selective policy keeps of a block besides its input: results of linear maps, and of attention without dropout."""
        return 3 * self.a + 2 * self.x + self.h + (0 if self.mask else self.a + self.log_sum)

    def _backward_of_head(self, index: int) -> None:
        ledger, model = self.ledger, self.shapes.model
        if not self.last:
            self.zero.begin()
            ledger.take(BACKWARD, self.r)  # from the stage behind
            ledger.give(ACTIVATIONS, self.r)
            return
        self.copies.backward_of_loss(self.logits, self.zero.begin)
        # Tied: waits for the embedding's. A stage that has the head alone sends its gradient to the first.
        self._weight_gradient(self.parameters[0].elements if self.first else self.parameters[-1].elements)
        ledger.take(BACKWARD, self.x)
        ledger.give(LOGITS, ledger.held[LOGITS])
        ledger.take(BACKWARD, self.r)
        self._complete(index, 2)
        if not self.first:
            self._settle(self.parameters[-1])
        ledger.give(BACKWARD, self.x)
        ledger.give(ACTIVATIONS, self.x + self.r + self.statistics)  # the final norm, and the last block's output

    def _weight_gradient(self, elements: int) -> None:
        self.ledger.take(GRADIENTS, elements * self.zero.fresh)

    def _complete(self, index: int, count: int) -> None:
        """Gradients of `count` parameters are made, and ready."""
        for parameter in self.parameters[index : index + count]:
            self._weight_gradient(parameter.elements)
            self._settle(parameter)

    def _settle(self, parameter: Parameter) -> None:
        """A gradient that is on the ledger is complete."""
        if self.in_place:
            self.ledger.give(GRADIENTS, parameter.elements * self.zero.fresh)
        else:
            self.zero.ready(parameter)

    def _recompute(self) -> None:
        """Make again what the policy did not keep of a block."""
        if self.shapes.policy is None:
            return
        saved = self._saved_by_selective() if self.shapes.policy == "selective" else 0
        self.copies.forward_of_scores(self.scores)
        whole = self._attention_kept + self.x + self.statistics + 2 * self.h + self.mask
        transient = self.x if self.mask and not saved else 0
        # The results of the two projections that were kept are not needed once they have been added.
        self.ledger.take(ACTIVATIONS, whole - saved + (2 * self.x if saved else 0) + transient)
        self.ledger.give(ACTIVATIONS, transient + ((2 if self.mask else 1) * self.x if saved else 0))

    def _backward(self, index: int) -> None:
        """One block. The gradient of its output is held as BACKWARD; in the end that of its input is."""
        ledger, x, h = self.ledger, self.x, self.h
        self._recompute()
        dropped = x if self.mask else 0
        ledger.take(BACKWARD, dropped)
        ledger.give(ACTIVATIONS, self.mask)
        ledger.take(BACKWARD, h)  # down
        self._complete(index + 10, 2)
        ledger.give(BACKWARD, dropped)
        ledger.give(ACTIVATIONS, h)
        ledger.take(BACKWARD, h)  # GELU
        ledger.give(BACKWARD, h)
        ledger.give(ACTIVATIONS, h)
        ledger.take(BACKWARD, x)  # up
        self._complete(index + 8, 2)
        ledger.give(BACKWARD, h)
        ledger.give(ACTIVATIONS, x)
        ledger.take(BACKWARD, self.r)  # norm
        self._complete(index + 6, 2)
        ledger.give(BACKWARD, x)
        ledger.take(BACKWARD, self.r)  # its sum with the gradient that went past
        ledger.give(BACKWARD, 2 * self.r)
        ledger.give(ACTIVATIONS, self.r + self.statistics)
        ledger.take(BACKWARD, dropped)
        ledger.give(ACTIVATIONS, self.mask)
        ledger.take(BACKWARD, self.a)  # out
        self._complete(index + 4, 2)
        ledger.give(BACKWARD, dropped)
        self.copies.backward_of_scores(self.scores)
        ledger.take(BACKWARD, 3 * self.a)  # attention
        ledger.give(BACKWARD, self.a)
        ledger.take(BACKWARD, 3 * self.a)  # stacked
        ledger.give(ACTIVATIONS, 4 * self.a + self.log_sum)
        ledger.give(BACKWARD, 3 * self.a)
        ledger.take(BACKWARD, x)  # qkv
        self._complete(index + 2, 2)
        ledger.give(BACKWARD, 3 * self.a)
        ledger.give(ACTIVATIONS, x)
        ledger.take(BACKWARD, self.r)  # norm
        self._complete(index, 2)
        ledger.give(BACKWARD, x)
        ledger.take(BACKWARD, self.r)
        ledger.give(BACKWARD, 2 * self.r)
        leftover = x if self.shapes.policy == "selective" and not self.mask else 0  # the last projection's kept result
        ledger.give(ACTIVATIONS, self.r + self.statistics + leftover)

    def _backward_of_embedding(self) -> None:
        ledger = self.ledger
        ledger.give(BACKWARD, self.r)
        if not self.first:
            return
        ledger.give(ACTIVATIONS, self.mask)
        tokens = self.parameters[0]
        self._complete(1, 1)
        size = tokens.elements * self.zero.fresh
        shared = 2 if self.last else 1
        ledger.take(GRADIENTS, shared * size)  # the embedding's, and its sum with the head's
        ledger.give(GRADIENTS, 2 * (shared - 1) * size)
        self._settle(tokens)
        self.zero.release(0, 2)
