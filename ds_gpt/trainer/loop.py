"""The training loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ds_gpt.checkpoint.adapter import write_adapter
from ds_gpt.checkpoint.folder import complete
from ds_gpt.checkpoint.run_state import RunState
from ds_gpt.config import Composed
from ds_gpt.data import Dataset
from ds_gpt.data.loader import BatchLoader
from ds_gpt.engine.engine import Engine, StepResult
from ds_gpt.learning.schedule import schedule
from ds_gpt.trainer.console import Console
from ds_gpt.trainer.evaluation import Validation, pretraining_loss, sample_text
from ds_gpt.trainer.interruption import Interruption
from ds_gpt.trainer.keeper import Keeper
from ds_gpt.trainer.recorder import Recorder
from ds_gpt.trainer.reference import remember_reference
from ds_gpt.trainer.run_folder import RunFolder
from ds_gpt.trainer.watchdog import Watchdog


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

    def __init__(
        self,
        composed: Composed,
        dataset: Dataset,
        engine: Engine,
        folder: RunFolder,
        console: Console | None,
        pretraining: Dataset | None = None,
    ) -> None:
        run, ranks = composed.run, engine.ranks
        self.composed, self.dataset, self.engine, self.folder = composed, dataset, engine, folder
        if run.stage == "dpo":  # before any step, or checkpoint, changes what the engine started from
            remember_reference(engine, dataset)
        sampler = dataset.train.sampler(run.model.context, run.batch.global_batch_size, run.seed)
        share = engine.grid.data_rank, engine.grid.data_ranks, composed.micro_batch_size
        self.loader = BatchLoader(dataset.train, sampler, *share, ranks.device, not run.data.attend_across_documents)
        self.validation = Validation(dataset, engine)
        self.learning_rate = schedule(run, composed.data_ranks)
        self.recorder = Recorder(composed, ranks, folder, console)
        self.watchdog = Watchdog(folder.path, ranks.rank, run.health.hang_timeout_s, engine.model)
        self.keeper = Keeper(engine, dataset, folder, self.validation, self.recorder, self.watchdog)
        self._pretraining = pretraining  # data of the run that this one started from, to see what is forgotten
        self._val_loss: float | None = None

    def resume(self, checkpoint: Path) -> RunState:
        """Take over a checkpoint; every rank must call it. Raises RunStopped where the loaded model is not the saved one."""
        return self.keeper.resume(checkpoint)

    def train(self, state: RunState = RunState()) -> Outcome:
        """Train from `state` to the last step, or until interrupted; evaluate, save and sample at the end."""
        run, recorder = self.composed.run, self.recorder
        interrupted = False
        self.engine.ranks.wait_at_least(self.watchdog.longest_s)
        if self._pretraining is not None and state.step == 0:
            recorder.note({"pretraining_loss_before": pretraining_loss(self._pretraining, self.engine)})
        with Interruption() as interruption, recorder.recording(state.step), self.watchdog, self._closing():
            while state.step < run.training.steps and not interrupted:
                lr = self.learning_rate(state.step) * state.factor()
                result = self.engine.step(state.step, self.loader.load(state.data_step), lr, interruption.requested)
                recorder.stopwatch.step_done()
                state = self._after_step(state.after_step(self.composed.tokens_per_step), lr, result)
                interrupted = result.interrupted
                self.watchdog.beat()
            text = "" if interrupted or not run.generates else sample_text(self.engine, self.dataset, run.sample)
        if run.lora.rank is not None and self.engine.ranks.is_first:
            write_adapter(complete(self.folder.checkpoints)[0], run, self.folder.adapter)
        recorder.say(f"\nsaved in {self.folder.checkpoints}" + (f", as asked to stop: go on with --resume {self.folder.path}" if interrupted else ""))
        if text and self.engine.ranks.is_first:
            self.folder.sample.write_text(text, encoding="utf-8")
            recorder.say(f"\nsample:\n{text}")
        return Outcome(state, self._val_loss, interrupted)

    def _after_step(self, state: RunState, lr: float, result: StepResult) -> RunState:
        """Evaluate, judge, record and save what is due after a step. Returns the state to go on from: an earlier one after a rollback."""
        run, recorder, health = self.composed.run, self.recorder, self.keeper.health
        last = state.step == run.training.steps
        val_loss = None
        # Who asked to stop may give seconds of grace: they are for saving.
        if not result.interrupted and (last or state.step % run.evaluation.every == 0):
            with recorder.stopwatch.paused():
                val_loss = self._val_loss = self.validation.loss()
                recorder.note(self._measured_beside(state, last))
        verdict = health.observe(state.step, result.loss, result.grad_norm, result.applied, result.loss_scale, val_loss)
        if val_loss is not None or result.interrupted or verdict.severity != "ok" or state.step % run.log_every == 0:
            recorder.metrics(state, lr, result, val_loss, self.engine.slowest_rank())
        else:
            recorder.advance(state.step)
        if result.interrupted:
            recorder.say(f"step {state.step}: asked to stop, saving")
        with recorder.stopwatch.paused():
            earlier = self.keeper.treat(state, verdict)
            if earlier is None:
                self.keeper.save_if_due(state, val_loss, last or result.interrupted)
            elif result.interrupted:
                self.keeper.save_if_due(earlier, None, last=True)
        return earlier or state

    def _measured_beside(self, state: RunState, last: bool) -> dict[str, float]:
        """What an evaluation shows besides its loss; a sample is printed where the configuration wants one."""
        run = self.composed.run
        if run.sample.every_evaluation and run.generates and not last:
            self.recorder.event(state.step, "sample", f"sample:\n{sample_text(self.engine, self.dataset, run.sample)}")
        if self._pretraining is None:
            return self.validation.metrics
        return {**self.validation.metrics, "val_pretraining_loss": pretraining_loss(self._pretraining, self.engine)}

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """End the threads of loader and saver, also on an error."""
        try:
            yield
        finally:
            self.loader.close()
            self.keeper.close()
