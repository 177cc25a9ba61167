"""The training loop."""

from __future__ import annotations

from dataclasses import dataclass

from ds_gpt.checkpoint.folder import RunState, save
from ds_gpt.config import Composed
from ds_gpt.data import Dataset, WindowSampler
from ds_gpt.data.loader import BatchLoader
from ds_gpt.engine.engine import Engine, StepResult
from ds_gpt.engine.ranks import Ranks
from ds_gpt.learning.schedule import schedule
from ds_gpt.trainer.console import Console
from ds_gpt.trainer.evaluation import Validation, sample_text
from ds_gpt.trainer.interruption import Interruption
from ds_gpt.trainer.measurements import Stopwatch, peak_bytes
from ds_gpt.trainer.run_folder import RunFolder
from ds_gpt.trainer.sinks import Metrics, MetricsFile, Sink, TensorBoard


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        state: where it stands.
        val_loss: the last validation loss, nats a token.
        interrupted: whether it was asked to stop.
    """

    state: RunState
    val_loss: float | None
    interrupted: bool


class Trainer:
    """Everything one rank needs to train. Every rank has one; only rank 0's writes and prints."""

    def __init__(self, composed: Composed, dataset: Dataset, engine: Engine, folder: RunFolder, console: Console | None) -> None:
        run, ranks = composed.run, engine.ranks
        self.composed, self.dataset, self.engine, self.folder, self.console = composed, dataset, engine, folder, console
        sampler = WindowSampler(len(dataset.train), run.model.context, run.batch.global_batch_size, run.seed)
        self.loader = BatchLoader(dataset.train, sampler, ranks.rank, ranks.world_size, composed.micro_batch_size, ranks.device)
        self.validation = Validation(dataset, engine)
        self.learning_rate = schedule(run, ranks.world_size)
        self.sinks: list[Sink] = _sinks(composed, ranks, folder, console)

    def train(self, state: RunState = RunState()) -> Outcome:
        """Train from `state` to the last step, or until interrupted; evaluate, save and sample at the end."""
        run, val_loss = self.composed.run, None
        stopwatch = Stopwatch(self.composed)
        with Interruption() as interruption:
            if self.console:
                self.console.start(state.step)
            while state.step < run.training.steps:
                lr = self.learning_rate(state.step)
                result = self.engine.step(state.step, self.loader.load(state.step), lr, interruption.requested)
                state = RunState(state.step + 1, state.tokens + self.composed.tokens_per_step)
                stopwatch.step_done()
                last = result.interrupted or state.step == run.training.steps
                evaluate = state.step % run.evaluation.every == 0 or last
                if evaluate:
                    with stopwatch.paused():
                        val_loss = self.validation.loss()
                if evaluate or state.step % run.log_every == 0:
                    self._log(state, lr, result, stopwatch, val_loss if evaluate else None)
                elif self.console:
                    self.console.advance(state.step)
                if last or (run.checkpoints.every and state.step % run.checkpoints.every == 0):
                    with stopwatch.paused():
                        save(self.engine, self.folder.checkpoints, state)
                if result.interrupted:
                    break
            self._finish(interrupted := state.step < run.training.steps)
        return Outcome(state, val_loss, interrupted)

    def _log(self, state: RunState, lr: float, result: StepResult, stopwatch: Stopwatch, val_loss: float | None) -> None:
        speed = stopwatch.read()
        metrics: Metrics = {
            "step": state.step,
            "tokens": state.tokens,
            "loss": result.loss,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "step_s": speed.step_s,
            "tokens_per_s": speed.tokens_per_s,
            "mfu": speed.mfu,
            "peak_bytes": peak_bytes(self.engine.ranks.device),
        }
        if result.loss_scale is not None:
            metrics["loss_scale"] = result.loss_scale
        if not result.applied:
            metrics["skipped"] = 1
        if val_loss is not None:
            metrics["val_loss"] = val_loss
        for sink in self.sinks:
            sink.write(metrics)

    def _finish(self, interrupted: bool) -> None:
        text = "" if interrupted else sample_text(self.engine, self.dataset, self.composed.run.sample)
        self.loader.close()
        for sink in self.sinks:
            sink.close()
        if self.console:
            self.console.say(f"\nsaved in {self.folder.checkpoints}" + (", as asked to stop" if interrupted else ""))
            if text:
                self.folder.sample.write_text(text, encoding="utf-8")
                self.console.say(f"\nsample:\n{text}")


def _sinks(composed: Composed, ranks: Ranks, folder: RunFolder, console: Console | None) -> list[Sink]:
    if not ranks.is_first:
        return []
    sinks: list[Sink] = [MetricsFile(folder.metrics)]
    if composed.run.logging.tensorboard:
        sinks.append(TensorBoard(folder.tensorboard))
    return [*sinks, console] if console else sinks
