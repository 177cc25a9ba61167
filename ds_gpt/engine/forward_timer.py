"""Time that this rank spends in forward passes: its own work, before any collective makes it wait for others."""

from __future__ import annotations

import time
from types import TracebackType

import torch


class ForwardTimer:
    """Adds up the time inside ``with timer``: on a GPU by events on its stream, so that nothing is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        if self._on_gpu:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            self._events.append(pair)
        else:
            self._start = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._on_gpu:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._start

    def read(self) -> float:
        """Seconds since the last reading. On a GPU the steps in question must be done, as they are once their loss is read."""
        seconds = self._seconds + sum(start.elapsed_time(end) for start, end in self._events) / 1000
        self._seconds, self._events = 0.0, []
        return seconds
