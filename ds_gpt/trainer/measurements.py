"""What a step cost: time, throughput, MFU, memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ds_gpt.config import Composed
from ds_gpt.config.hardware import peak_flops
from ds_gpt.model.counts import mfu, training_flops_per_token


@dataclass(frozen=True)
class Speed:
    """Averages over the steps since the last measurement.

    Attributes:
        step_s: seconds a step, without evaluation and saving.
        tokens_per_s: tokens a second, all ranks together: all that the model sees, padding included.
        mfu: model FLOPs utilization, or None where the device's peak is not known.
    """

    step_s: float
    tokens_per_s: float
    mfu: float | None


class Stopwatch:
    """Times training steps; what is paused (evaluation, saving) is left out."""

    def __init__(self, composed: Composed) -> None:
        self._tokens_per_step = composed.tokens_per_step
        run = composed.run
        context = composed.tokens_per_step // (run.batch.global_batch_size * run.sequences)
        self._flops_per_token = training_flops_per_token(run.model, run.lora, run.stage == "reward", context)
        peak = peak_flops(composed.hardware.name, composed.precision) if composed.hardware.kind == "cuda" else None
        self._peak_flops = peak * composed.hardware.world_size if peak else None
        self._start = time.perf_counter()
        self._paused_s = 0.0
        self._steps = 0

    def step_done(self) -> None:
        """Count a step. Its result has been read on the host, so the device is done with it too."""
        self._steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - start

    def read(self) -> Speed:
        """The speed since the last reading; starts anew."""
        now = time.perf_counter()
        seconds = now - self._start - self._paused_s
        tokens_per_s = self._steps * self._tokens_per_step / seconds
        used = mfu(tokens_per_s, self._flops_per_token, self._peak_flops) if self._peak_flops else None
        speed = Speed(seconds / self._steps, tokens_per_s, used)
        self._start, self._paused_s, self._steps = now, 0.0, 0
        return speed


def peak_bytes(device: torch.device) -> int:
    """Peak memory of this rank so far: allocated on the GPU; on a CPU the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts it in KiB
