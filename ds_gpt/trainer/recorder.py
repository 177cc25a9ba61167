"""Write down what happens in a run: metrics by step, and events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds_gpt.checkpoint.run_state import RunState
from ds_gpt.config import Composed
from ds_gpt.engine.engine import StepResult
from ds_gpt.engine.ranks import Ranks
from ds_gpt.trainer.console import Console
from ds_gpt.trainer.measurements import Stopwatch, peak_bytes
from ds_gpt.trainer.run_folder import RunFolder
from ds_gpt.trainer.sinks import Metrics, MetricsFile, Sink, TensorBoard

_STRAGGLES = 1.1  # times the others' median; less is noise


class Recorder:
    """Turns steps into metrics and hands them to the sinks; on other ranks than the first it has none."""

    def __init__(self, composed: Composed, ranks: Ranks, folder: RunFolder, console: Console | None) -> None:
        self._composed, self._ranks, self._folder, self._console = composed, ranks, folder, console
        self._sinks: list[Sink] = []
        self._notes: Metrics = {}
        self._disk_full_said = False
        self.stopwatch = Stopwatch(composed)

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Open the sinks inside, at `step` steps done. They are closed also on an error: a live bar takes its text."""
        if self._ranks.is_first:
            self._sinks.append(MetricsFile(self._folder.metrics))
            if self._composed.run.logging.tensorboard:
                self._sinks.append(TensorBoard(self._folder.tensorboard, first_step=step))
            if self._console:
                self._console.start(step)
                self._sinks.append(self._console)
        self.stopwatch = Stopwatch(self._composed)
        try:
            yield
        finally:
            for sink in self._sinks:
                with self._surviving_a_full_disk():
                    sink.close()
            self._sinks.clear()

    def metrics(self, state: RunState, lr: float, result: StepResult, val_loss: float | None, slowest: tuple[int, float] | None) -> None:
        """Record a step. Losses in nats a token; `slowest` is `Engine.slowest_rank`."""
        speed = self.stopwatch.read()
        metrics: Metrics = {
            "step": state.step,
            "tokens": state.tokens,
            "loss": result.loss,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "step_s": speed.step_s,
            "tokens_per_s": speed.tokens_per_s,
            "mfu": speed.mfu,
            "peak_bytes": max(self._ranks.gather(peak_bytes(self._ranks.device))),  # stages of a pipeline differ
        }
        if result.loss_scale is not None:
            metrics["loss_scale"] = result.loss_scale
        if not result.applied:
            metrics["skipped"] = 1
        if val_loss is not None:
            metrics["val_loss"] = val_loss
        if slowest is not None:
            rank, slowdown = slowest
            metrics |= {"straggler": rank if slowdown > _STRAGGLES else None, "straggler_slowdown": slowdown}
        metrics |= result.metrics | self._notes
        self._notes = {}
        for sink in self._sinks:
            with self._surviving_a_full_disk():
                sink.write(metrics)

    @contextmanager
    def _surviving_a_full_disk(self) -> Iterator[None]:
        """What cannot be written down is lost, and said once; training goes on. Whether it may go on without checkpoints is the Keeper's to say."""
        try:
            yield
        except OSError as error:
            if not self._disk_full_said:
                self._disk_full_said = True
                self.say(f"metrics and events cannot be written: {error}; training goes on without them")

    def advance(self, step: int) -> None:
        """Move the progress bar to a step that is not recorded."""
        if self._console:
            self._console.advance(step)

    def note(self, metrics: Metrics) -> None:
        """Add to the next recorded step."""
        self._notes |= metrics

    def event(
        self, step: int, name: str, text: str, facts: dict[str, Any] | None = None, metrics: Metrics | None = None, show: bool = True
    ) -> None:
        """Record what happened besides steps: a line in ``events.jsonl``, one on the console.

        Args:
            step: optimizer steps completed.
            name: what happened, one word.
            text: the same in a sentence.
            facts: more of it, for other tools.
            metrics: added to the next recorded step, so that they are in the metrics and in TensorBoard too.
            show: whether to print it.
        """
        self._notes |= metrics or {}
        if show:
            self.say(f"step {step}: {text}")
        if self._ranks.is_first:
            line = {"step": step, "event": name, "text": text, "time": time.time(), **(facts or {})}
            with self._surviving_a_full_disk(), self._folder.events.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def say(self, text: str) -> None:
        """Print on the console."""
        if self._console:
            self._console.say(text)
