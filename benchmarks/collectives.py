"""What ranks tell each other: calls, bytes and seconds of every collective of ``torch.distributed``.

`install` wraps the functions once, before DeepSpeed takes references to them; they pass through until `counting`.
Counted collectives are taken one at a time: first all ranks meet, then the collective runs to its end. So the seconds
are those of communication alone, with nothing that overlaps it, and waiting for slower ranks is told apart.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# The argument whose bytes count: what one rank ends up having sent or received, in full size.
_WHOLE = {
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "reduce": "tensor",
    "all_gather_into_tensor": "output_tensor",
    "all_gather_single": "output_tensor",  # the name since PyTorch 2.13
    "all_gather": "tensor_list",
    "reduce_scatter_tensor": "input",
    "reduce_scatter_single": "input",
    "reduce_scatter": "input_list",
    "all_to_all_single": "output",
}


class Collectives:
    """Counts of the collectives made while `counting`, by name."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[str, float]] = {}
        self.seconds = 0.0  # in collectives, waiting included, so far
        self.on_tensors: Callable[[str, list[Tensor]], None] | None = None  # told of each collective's name and tensors
        self._counting = False
        self._inside = False

    def install(self) -> None:
        """Wrap the functions; call it before DeepSpeed is imported."""
        for name, whole in _WHOLE.items():
            original = getattr(dist, name, None)
            if original is None:
                continue
            position = list(inspect.signature(original).parameters).index(whole)
            wrapped = self._wrap(name, original, whole, position)
            setattr(dist, name, wrapped)
            setattr(dist.distributed_c10d, name, wrapped)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside."""
        self._counting, self.counts, self.seconds = True, {}, 0.0
        try:
            yield
        finally:
            self._counting = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Count nothing inside."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def _wrap(self, name: str, original: Any, whole: str, position: int) -> Any:
        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if self._inside or not (self._counting or self.on_tensors):
                return original(*args, **kwargs)
            value = kwargs.get(whole, args[position] if len(args) > position else ())
            if self.on_tensors:
                self.on_tensors(name, _tensors(value))
            if not self._counting:
                return original(*args, **kwargs)
            group = kwargs.get("group")
            with self.aside():
                start = _now()
                dist.barrier(group=group)
                met = _now()
                work = original(*args, **kwargs)
                if work is not None:
                    work.wait()
                end = _now()
            count = self.counts.setdefault(name, {"calls": 0, "bytes": 0, "seconds": 0.0, "wait_s": 0.0})
            count["calls"] += 1
            count["bytes"] += sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))
            count["seconds"] += end - met
            count["wait_s"] += met - start
            self.seconds += end - start
            return work

        return collective


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
