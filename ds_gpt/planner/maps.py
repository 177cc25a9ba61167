"""Linear maps, frozen or not, with adapters or without: what autograd keeps of them, and the way back through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ds_gpt.planner.copies import ACTIVATIONS, BACKWARD
from ds_gpt.planner.ledger import Ledger
from ds_gpt.planner.shapes import Shapes

Complete = Callable[..., None]


class Maps:
    """The linear maps of one block.

    A map keeps what it reads for the gradient of its weight. A frozen one has none, except that at ZeRO 3 DeepSpeed's
    own linear keeps it always. An adapter, y + scale B (A x), keeps what A reads and what B reads; without dropout A
    reads what the map does.

    Args:
        places: parameters of the block's modules, by name.
        complete: is called with parameters whose gradients are made, and with what frees what these were made of.
    """

    def __init__(self, shapes: Shapes, ledger: Ledger, places: Mapping[str, range], complete: Complete) -> None:
        self.ledger, self.places, self.complete = ledger, places, complete
        task, self.element = shapes.task, shapes.element
        self.stays = not task.adapts or (shapes.stage == 3 and not shapes.trainer.states)
        self.dropout = task.lora.dropout > 0
        self.inner = shapes.element * shapes.tokens * (task.lora.rank or 0)  # what B reads

    def adapted(self, name: str) -> bool:
        """Whether a map has an adapter."""
        return f"{name}.A" in self.places

    def reads(self, size: int, *names: str) -> int:
        """Bytes kept of a tensor of `size` that these maps read, their adapters' without dropout included."""
        return size if self.stays or any(self.adapted(name) and not self.dropout for name in names) else 0

    def beside(self, name: str, size: int) -> int:
        """Bytes kept beside what a map reads, of `size`, for its adapter: what B reads, what dropout leaves, its mask."""
        if not self.adapted(name):
            return 0
        return self.inner + (size + size // self.element if self.dropout else 0)

    def forward(self, name: str, size: int, beside: int) -> None:
        """An adapter's fullest moment: results of the map and of B, and the latter scaled, or the sum, each of `size`.

        `beside`: what is there then, over what the ledger holds.
        """
        if self.adapted(name) and (most := 3 * size + beside) > 0:
            self.ledger.take(ACTIVATIONS, most)
            self.ledger.give(ACTIVATIONS, most)

    def backward(self, name: str, outputs: int, inputs: int, spent: int, read: int) -> None:
        """From the gradient of a map's result to that of what it reads: bytes `outputs` and `inputs`.

        The former is on the ledger; the latter is taken. `spent` bytes of the former, and `read` of what was kept for the
        backward pass, are free when all gradients are made, and before DeepSpeed hears of those of the parameters.
        """
        ledger = self.ledger
        if self.adapted(name):
            ledger.take(BACKWARD, outputs + self.inner)  # scaled, and of what B reads
            self.complete(self.places[f"{name}.B"])
            ledger.give(BACKWARD, outputs)
            ledger.take(BACKWARD, inputs)
            self.complete(self.places[f"{name}.A"])
            ledger.give(BACKWARD, self.inner)
            if self.dropout:
                ledger.take(BACKWARD, inputs)
                ledger.give(BACKWARD, inputs)
            ledger.give(ACTIVATIONS, self.beside(name, inputs))

        def free() -> None:
            ledger.give(BACKWARD, spent)
            ledger.give(ACTIVATIONS, read)

        ledger.take(BACKWARD, inputs)
        self.complete(self.places[name], free)
        ledger.give(BACKWARD, inputs if self.adapted(name) else 0)  # the sum of both
