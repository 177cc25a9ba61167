"""What a real gloo rank allocates, less what only gloo does."""

from __future__ import annotations

import time
from typing import Any

import torch

from ds_gpt.config import Composed
from ds_gpt.engine.trace import Trace


def measured(ranks: Any, run: Composed) -> Trace:
    """Build the engine and take two optimizer steps on this rank; a function for ``run_ranks``."""
    from ds_gpt.engine.allocations import Allocations
    from ds_gpt.engine.trace import measure

    dispatch = Allocations.__torch_dispatch__

    def patient(self: Allocations, func: Any, *args: Any) -> Any:
        before = self._serial
        result = dispatch(self, func, *args)
        if func.namespace == "c10d":
            time.sleep(0.02)  # gloo's threads let go of a collective's tensors a moment after it is done
        if func is torch.ops.aten.split.Tensor and self._serial > before:
            # A view of what nobody made: the copy that gloo's reduce-scatter works in, and NCCL's does not.
            serial, _ = self.events.pop()
            self._live = {address: (number, 0 if number == serial else size) for address, (number, size) in self._live.items()}
        return result

    Allocations.__torch_dispatch__ = patient
    return measure(run, ranks)
