"""Memory of one rank over one optimizer step, from the configuration alone.

The step is walked through tensor by tensor, in the order in which PyTorch makes and frees them, on a ledger that knows
sizes only. So the peak is where it really is, and each byte of it has a kind. What autograd keeps of a block, in
elements, B x T tokens, width D, feed-forward width F:

    inputs of both norms 2 BTD, of qkv and up 2 BTD, q k v 3 BTD, attention's output BTD, around the GELU 2 BTF
    and its dropout masks at a byte an element, and attention's log-sum-exp in fp32.

`tests/planner` holds the result to 2% of the trace of the real engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_gpt.config import Composed
from ds_gpt.planner.ledger import Ledger, Moment
from ds_gpt.planner.shapes import BLOCK_PARAMETERS, Parameter, Shapes, parameters_of
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
    micro_steps = min(shapes.accumulation, 2)  # the first, and the last, which finds accumulated gradients
    for number in range(micro_steps):
        _Walk(shapes, parameters, ledger, zero, accumulated=number > 0).micro_step(last=number == micro_steps - 1)
    zero.step()
    ledger.end("step")
    return Memory(ledger.fullest(), tuple(ledger.moments), resident, zero.host_bytes)


class _Walk:
    """One forward and backward pass."""

    def __init__(self, shapes: Shapes, parameters: list[Parameter], ledger: Ledger, zero: Sharding, accumulated: bool) -> None:
        self.shapes, self.parameters, self.ledger, self.zero = shapes, parameters, ledger, zero
        model, element = shapes.model, shapes.element
        self.x = element * shapes.tokens * model.width
        self.h = element * shapes.tokens * model.hidden_width
        self.mask = shapes.tokens * model.width if model.dropout > 0 else 0
        self.statistics = 2 * element * shapes.tokens
        self.log_sum = 4 * shapes.tokens * model.heads
        self.logits = shapes.tokens * model.vocabulary  # elements
        # At ZeRO 0 and 1 gradients wait; where they were accumulated before, each new one is added in place and freed.
        self.in_place = accumulated and shapes.stage <= 1

    def micro_step(self, last: bool) -> None:
        """Forward, loss, backward."""
        ledger, layers = self.ledger, self.shapes.model.layers
        self._embed()
        for layer in range(layers):
            self.zero.gather(2 + layer * BLOCK_PARAMETERS, BLOCK_PARAMETERS)
            self._forward(kept=self.shapes.policy)
        self.zero.gather(len(self.parameters) - 2, 2)
        ledger.take(ACTIVATIONS, self.x + self.statistics)  # the final norm
        ledger.take(LOGITS, self.logits * self.shapes.element)
        copy = 4 * self.logits if self.shapes.element < 4 else 0
        ledger.take(LOGITS, copy + 4 * self.logits)
        ledger.give(LOGITS, copy)
        ledger.end("forward and loss")
        self._backward_of_head()
        for layer in reversed(range(layers)):
            index = 2 + layer * BLOCK_PARAMETERS
            self.zero.gather_again(index, BLOCK_PARAMETERS)
            self._backward(index)
            self.zero.release(index, BLOCK_PARAMETERS)
        self._backward_of_embedding()
        self.zero.reduce(last)
        ledger.end("backward")

    def _embed(self) -> None:
        self.zero.gather(0, 2)
        positions = self.x // self.shapes.micro_batch
        self.ledger.take(ACTIVATIONS, 2 * self.x + positions)
        self.ledger.give(ACTIVATIONS, self.x + positions)
        if self.mask:
            self.ledger.take(ACTIVATIONS, self.x + self.mask)
            self.ledger.give(ACTIVATIONS, self.x)

    def _attention_part(self, made: int) -> int:
        """Norm, qkv, attention, dropout and sum; returns what autograd keeps of it. `made`: of that, what exists already."""
        kept = 6 * self.x + self.statistics + self.log_sum + self.mask
        self.ledger.take(ACTIVATIONS, kept - made + self.x)  # the projection's result goes when it has been added
        self.ledger.give(ACTIVATIONS, self.x)
        return kept

    def _forward(self, kept: str | None) -> None:
        """One block. Its input is on the ledger already; its output will be."""
        ledger, x, h = self.ledger, self.x, self.h
        if kept is None:
            self._attention_part(0)
            ledger.take(ACTIVATIONS, x + self.statistics + 2 * h + self.mask + 2 * x)
            ledger.give(ACTIVATIONS, x)
            return
        saved = self._saved_by_selective() if kept == "selective" else 0
        of_attention = (5 * x + self.log_sum if saved else 0) - (0 if self.shapes.model.dropout == 0 or not saved else x + self.log_sum)
        attention = self._attention_part(0)
        if kept == "full" or saved:
            ledger.give(ACTIVATIONS, attention - of_attention - x)  # the sum before the second norm stays a while
        ledger.take(ACTIVATIONS, x + 2 * h + (x if saved else 0))
        ledger.give(ACTIVATIONS, h if saved else 2 * h)  # the GELU's result; without saving, also its input
        ledger.take(ACTIVATIONS, x)
        ledger.give(ACTIVATIONS, 2 * x)  # second norm's result, the sum before it

    def _saved_by_selective(self) -> int:
        """What the selective policy keeps of a block besides its input: results of linear maps, and of attention without dropout."""
        attention = self.x + self.log_sum if self.shapes.model.dropout == 0 else 0
        return 5 * self.x + self.h + attention

    def _backward_of_head(self) -> None:
        ledger, model = self.ledger, self.shapes.model
        ledger.give(LOGITS, self.logits * self.shapes.element)  # the engine lets go of them before the backward pass
        self.zero.begin()
        ledger.take(LOGITS, 8 * self.logits)  # gradients of the log-probabilities, and through the softmax
        ledger.give(LOGITS, 8 * self.logits)
        gradient = self.logits * self.shapes.element
        ledger.give(LOGITS, 4 * self.logits)
        ledger.take(LOGITS, gradient)
        self._weight_gradient(model.vocabulary * model.width)  # tied: waits for the embedding's
        ledger.take(BACKWARD, self.x)
        ledger.give(LOGITS, gradient)
        ledger.take(BACKWARD, self.x)
        self._complete(len(self.parameters) - 2, 2)
        ledger.give(BACKWARD, self.x)
        ledger.give(ACTIVATIONS, 2 * self.x + self.statistics)  # the final norm, and the last block's output

    def _weight_gradient(self, elements: int) -> None:
        self.ledger.take(GRADIENTS, elements * self.shapes.element)

    def _complete(self, index: int, count: int) -> None:
        """Gradients of `count` parameters are made, and ready."""
        for parameter in self.parameters[index : index + count]:
            self._weight_gradient(parameter.elements)
            if self.in_place:
                self.ledger.give(GRADIENTS, parameter.elements * self.shapes.element)
            else:
                self.zero.ready(parameter)

    def _recompute(self) -> None:
        """Make again what the policy did not keep of a block."""
        if self.shapes.policy is None:
            return
        saved = self._saved_by_selective() if self.shapes.policy == "selective" else 0
        whole = 6 * self.x + self.statistics + self.log_sum + self.mask + self.x + self.statistics + 2 * self.h + self.mask
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
        ledger.take(BACKWARD, x)  # norm
        self._complete(index + 6, 2)
        ledger.give(BACKWARD, x)
        ledger.take(BACKWARD, x)  # its sum with the gradient that went past
        ledger.give(BACKWARD, 2 * x)
        ledger.give(ACTIVATIONS, x + self.statistics)
        ledger.take(BACKWARD, dropped)
        ledger.give(ACTIVATIONS, self.mask)
        ledger.take(BACKWARD, x)  # out
        self._complete(index + 4, 2)
        ledger.give(BACKWARD, dropped)
        ledger.take(BACKWARD, 3 * x)  # attention
        ledger.give(BACKWARD, x)
        ledger.take(BACKWARD, 3 * x)  # stacked
        ledger.give(ACTIVATIONS, 4 * x + self.log_sum)
        ledger.give(BACKWARD, 3 * x)
        ledger.take(BACKWARD, x)  # qkv
        self._complete(index + 2, 2)
        ledger.give(BACKWARD, 3 * x)
        ledger.give(ACTIVATIONS, x)
        ledger.take(BACKWARD, x)  # norm
        self._complete(index, 2)
        ledger.give(BACKWARD, x)
        ledger.take(BACKWARD, x)
        ledger.give(BACKWARD, 2 * x)
        leftover = x if self.shapes.policy == "selective" and not self.mask else 0  # the last projection's kept result
        ledger.give(ACTIVATIONS, x + self.statistics + leftover)

    def _backward_of_embedding(self) -> None:
        ledger, element = self.ledger, self.shapes.element
        tokens, positions = self.parameters[:2]
        ledger.give(BACKWARD, self.x)
        ledger.give(ACTIVATIONS, self.mask)
        self._complete(1, 1)
        ledger.take(GRADIENTS, 2 * tokens.elements * element)  # the embedding's, and its sum with the head's
        ledger.give(GRADIENTS, 2 * tokens.elements * element)
        if self.in_place:
            ledger.give(GRADIENTS, tokens.elements * element)
        else:
            self.zero.ready(tokens)
        self.zero.release(0, 2)
