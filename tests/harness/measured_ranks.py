"""What a real gloo rank allocates, less what only gloo does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

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
        if func.namespace == "c10d" and not func._schema.name.endswith(("send", "recv_")):  # those end when the other rank will
            let_go(result)
        if func is torch.ops.aten.split.Tensor and self._serial > before:
            # A view of what nobody made: the copy that gloo's reduce-scatter works in, and NCCL's does not.
            serial, _ = self.events.pop()
            self._live = {address: (number, 0 if number == serial else size) for address, (number, size) in self._live.items()}
        return result

    Allocations.__torch_dispatch__ = patient
    return measure(run, ranks)


def let_go(result: Any, deadline_s: float = 60) -> None:
    """Return when a collective is done and gloo's threads, which hold its tensors for a moment longer, are at rest."""
    from torch._C._distributed_c10d import Work

    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.ScriptObject):
            Work.unbox(leaf).wait()
    late = time.monotonic() + deadline_s
    resting = False
    while not resting:
        assert time.monotonic() < late, "gloo's threads did not come to rest"
        time.sleep(0.002)  # also gives them Python's lock, without which they cannot let go of a tensor
        states = [stat.read_text().rpartition(")") for stat in Path("/proc/self/task").glob("*/stat")]
        resting = all(after.split()[0] == "S" for name, _, after in states if "gloo_runloop" in name)
