"""A rank that is stepped and watched: the clock of everything that is measured in a case."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from benchmarks.trainers import Trainee
from ds_gpt.config import Composed
from ds_gpt.data.loader import BatchLoader
from ds_gpt.engine.ranks import Ranks
from ds_gpt.learning.schedule import schedule

# So many steps, inside this context.
Part = tuple[int, AbstractContextManager[Any]]


class Bench:
    """A rank ready to step. Parts follow each other in one run, so every one trains on where the last one ended.

    Args:
        composed: the configuration, its vocabulary included.
        ranks: this process among the others; connected.
        trainee: what is measured.
        loader: this rank's batches.
    """

    def __init__(self, composed: Composed, ranks: Ranks, trainee: Trainee, loader: BatchLoader) -> None:
        self.composed, self.ranks, self.trainee, self.loader = composed, ranks, trainee, loader
        self.learning_rate = schedule(composed.run, composed.data_ranks)
        self.ready_at = 0.0
        self.steps_s: list[float] = []
        self.data_wait_s: list[float] = []
        self.cpu_s: list[float] = []  # of this process: what other work on the machine takes away does not count
        self.losses: list[float] = []
        self.grad_norms: list[float] = []

    def run(self, parts: Sequence[Part]) -> None:
        """Take the steps of every part, in order; every rank must call it."""
        self.ranks.barrier()
        self.ready_at = time.time()
        for steps, around in parts:
            with around:
                for _ in range(steps):
                    self.step()

    def step(self) -> tuple[float, float]:
        """One step, as the training loop takes it. Seconds of the whole step and of waiting for data."""
        start, cpu_start = time.perf_counter(), time.process_time()
        number = len(self.steps_s)
        batches = self.loader.load(number)
        loaded = time.perf_counter()
        loss, grad_norm = self.trainee.step(number, batches, self.learning_rate(number))
        self.losses.append(loss)
        self.grad_norms.append(grad_norm)
        self.stopped(start, cpu_start, loaded - start)
        return self.steps_s[-1], self.data_wait_s[-1]

    def stopped(self, start: float, cpu_start: float, waited: float) -> None:
        """Stop the clock of a step that began at `start`: when the device is done with it."""
        self.synchronize()
        self.steps_s.append(time.perf_counter() - start)
        self.cpu_s.append(time.process_time() - cpu_start)
        self.data_wait_s.append(waited)
        self.trainee.on_phase("")

    def synchronize(self) -> None:
        """Wait until the device is done."""
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)

    def close(self) -> None:
        """End what runs beside it."""
        self.loader.close()
