"""Keeps a run from being lost: saves it, resumes it, and takes it back to where it was well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_gpt.checkpoint.folder import complete, retire_after, step_of
from ds_gpt.checkpoint.resume import Loaded, load, newest_intact
from ds_gpt.checkpoint.run_state import RunState
from ds_gpt.checkpoint.saver import Saved, SaveError, Saver
from ds_gpt.config import Problem, RunStopped
from ds_gpt.data import Dataset
from ds_gpt.engine.engine import Engine
from ds_gpt.trainer.evaluation import Validation
from ds_gpt.trainer.health import HealthMonitor, Verdict
from ds_gpt.trainer.recorder import Recorder
from ds_gpt.trainer.run_folder import RunFolder
from ds_gpt.trainer.start import facts
from ds_gpt.trainer.watchdog import Watchdog

# Relative difference of the probe loss that loading may bring: sums in another order, and weights rounded to another
# precision. Weights of another model, or in the wrong places, differ by far more.
_SAME_PRECISION, _OTHER_PRECISION = 1e-3, 2e-2


class Keeper:
    """Saves, resumes and rolls back; every rank makes the same calls."""

    def __init__(
        self, engine: Engine, dataset: Dataset, folder: RunFolder, validation: Validation, recorder: Recorder, watchdog: Watchdog
    ) -> None:
        self._engine, self._folder, self._validation, self._recorder, self._watchdog = engine, folder, validation, recorder, watchdog
        self._run = engine.composed.run
        self._facts = facts(engine.composed, dataset)
        self._saver = Saver(engine, folder.checkpoints, self._run.checkpoints)
        self._due = False
        self.health = HealthMonitor(self._run.health, self._run.model.vocabulary)

    def save_if_due(self, state: RunState, val_loss: float | None, last: bool) -> None:
        """Save where the configuration says so, and at the end; otherwise see whether a save behind training is done.

        What may turn out to be sick is not saved on the way, since a rollback could not use it: the save waits until
        the suspicion is over.
        """
        every = self._run.checkpoints.every
        self._due |= bool(every and state.step % every == 0)
        if last or (self._due and not self.health.suspect):
            self._due = False
            # First what is still being written: its failure must not cost this save.
            self._completed(self._saver.finish, state, last=False)
            content = {"val_loss": val_loss, "probe_loss": self._validation.probe_loss(), "facts": self._facts, "health": self.health.memory()}
            self._completed(lambda: self._saver.save(state, content, background=False if last else None), state, last)
        elif self._saver.busy:
            self._completed(self._saver.poll, state, last)

    def _completed(self, save: Callable[[], Saved | None], state: RunState, last: bool) -> None:
        try:
            with self._watchdog.at_the_disk():
                saved = save()
        except SaveError as error:
            earlier = complete(self._folder.checkpoints)
            kept = f"the newest complete one is {earlier[0].name}" if earlier else "there is none yet"
            if last or self._run.checkpoints.on_failure == "stop":
                fix = "free some space and " + ("go on with --resume" if earlier else "start again")
                regardless = "" if last else ", or set checkpoints.on_failure: continue to train on regardless"
                raise RunStopped(Problem(str(error), f"without checkpoints the run could be lost; {kept}", fix + regardless)) from None
            self._recorder.event(state.step, "save_failed", f"{error}; {kept}, training goes on")
            return
        if saved is not None:
            text = f"saved {saved.path.name}, training stood still for {saved.stall_s:.2f} s of {saved.total_s:.2f} s"
            seconds = {"stall_s": saved.stall_s, "total_s": saved.total_s, "removed": saved.removed}
            self._recorder.event(state.step, "saved", text, seconds, show=False)
            if saved.unremoved is not None:
                text = f"{saved.path.name} is saved, but old checkpoints could not be removed: {saved.unremoved}"
                self._recorder.event(state.step, "unremoved", text)

    def resume(self, checkpoint: Path) -> RunState:
        """Take over a checkpoint.

        Raises:
            RunStopped: the model that was loaded is not the one that was saved.
        """
        loaded = load(self._engine, checkpoint)
        self._check_restored(checkpoint, loaded)
        for kind in loaded.absent:
            self._recorder.say(f"{checkpoint.name} has no {kind}: it starts at zero")
        if self._same_data(loaded) and "health" in loaded.saved:
            self.health.remember(loaded.saved["health"])
        self._recorder.say(f"resumed from {checkpoint} at step {loaded.state.step}\n")
        return loaded.state

    def _check_restored(self, checkpoint: Path, loaded: Loaded) -> None:
        """Compare the loss on a few windows with what it was when the run was saved."""
        before, after = loaded.saved["probe_loss"], self._validation.probe_loss()
        if not self._same_data(loaded):
            return  # other windows: nothing to compare with
        same = loaded.saved["facts"]["precision"] == self._facts["precision"]
        if not abs(after - before) <= (_SAME_PRECISION if same else _OTHER_PRECISION) * before:
            raise RunStopped(
                Problem(
                    f"after loading '{checkpoint}' the loss on its probe windows is {after:.4f}; when it was saved it was {before:.4f}",
                    "the restored model is not the one that was saved, though every file is intact: training on would waste the run",
                    "check that code and configuration are those of the saved run (run.yaml and environment.json in its folder)",
                )
            )

    def _same_data(self, loaded: Loaded) -> bool:
        """Whether a loss of the saved run means what it means in this one."""
        saved, current = loaded.saved["facts"], self._facts
        same_windows = saved["dataset_digest"] == current["dataset_digest"] and saved["data"]["val_fraction"] == current["data"]["val_fraction"]
        return same_windows and saved["loss"] == current["loss"]

    def treat(self, state: RunState, verdict: Verdict) -> RunState | None:
        """Act on what health found. Returns the state to go on from where the run was taken back, else None.

        Raises:
            RunStopped: it is ``action: stop``, it came back too often, or there is no way back and no step is applied any more.
        """
        if verdict.severity == "ok":
            return None
        config = self._run.health
        self._recorder.event(state.step, verdict.kind, f"{verdict.message}. {verdict.remedy}", {"since": verdict.since})
        if verdict.severity != "rollback" or config.action == "warn":
            return None
        if config.action == "stop" or state.rollbacks >= config.max_rollbacks:
            tried = f", after {state.rollbacks} rollbacks (health.max_rollbacks = {config.max_rollbacks})" if config.action == "rollback" else ""
            raise _sick(state, verdict, tried, "training on would make it worse; nothing was saved since")
        return self._roll_back(state, verdict)

    def _go_back(self, step: int) -> RunState | None:
        """Load the newest checkpoint up to `step`, and remove the later ones; None where there is none."""
        target = newest_intact(self._folder.checkpoints, self._engine.ranks, self._recorder.say, step)
        if target is None:
            return None
        if self._engine.ranks.is_first:  # what was saved since is not to be resumed from either
            retire_after(self._folder.checkpoints, step_of(target))
        return load(self._engine, target).state

    def _roll_back(self, state: RunState, verdict: Verdict) -> RunState | None:
        self._completed(self._saver.finish, state, last=False)
        with self._watchdog.at_the_disk():
            loaded = self._go_back(verdict.good_step)
        if loaded is None:
            if verdict.kind == "non_finite" and verdict.step - verdict.since + 1 >= self._run.health.window:
                raise _sick(state, verdict, ", and there is no checkpoint from before", "its weights no longer change")
            saves = self._run.checkpoints.every is not None
            remedy = "smaller checkpoints.every, or larger checkpoints.keep_last" if saves else "set checkpoints.every"
            self._recorder.event(state.step, "no_rollback", f"no checkpoint from step {verdict.good_step} or before to go back to: {remedy}")
            return None
        config = self._run.health
        # It lasts beyond the step at which the run went wrong: where checkpoints are far apart it would have ended before.
        until = max(state.lr_factor_until, state.step + config.lr_factor_steps)
        factor, data_step = config.lr_factor, state.data_step
        if loaded.step < state.lr_factor_until:  # it came back: more of both
            factor *= state.lr_factor
            data_step += state.data_step - state.skipped[-1][0]  # twice as far, so that a long stretch of bad data is passed in a few rollbacks
        skipped = (loaded.data_step, data_step - 1)
        self.health.rolled_back(loaded.step)
        self._due = True  # or a crash before the next save would forget what was skipped
        self._recorder.event(
            state.step,
            "rollback",
            f"rolled back to step {loaded.step}; global batches {skipped[0]} to {skipped[1]} are skipped, the learning rate is x {factor:g} until step {until}",
            {"to_step": loaded.step, "skipped": skipped, "lr_factor": factor, "lr_factor_until": until},
            metrics={"rolled_back_from": state.step},
        )
        return replace(
            loaded,
            data_step=data_step,
            lr_factor=factor,
            lr_factor_until=until,
            rollbacks=state.rollbacks + 1,
            skipped=(*(earlier for earlier in state.skipped if earlier[0] < skipped[0]), skipped),
        )

    def close(self) -> None:
        """End the thread that writes."""
        self._saver.close()


def _sick(state: RunState, verdict: Verdict, tried: str, why: str) -> RunStopped:
    return RunStopped(
        Problem(
            f"the run is sick at step {state.step}{tried}: {verdict.message}",
            why,
            f"{verdict.remedy}. With that changed, --resume goes on from the last checkpoint",
        )
    )
