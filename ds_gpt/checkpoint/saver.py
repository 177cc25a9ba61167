"""Save checkpoints: all ranks together, in the foreground or behind the training."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_gpt.checkpoint.folder import apply_retention, checkpoint_name, commit, partial_of, prepare_partial, remove
from ds_gpt.checkpoint.run_state import RunState
from ds_gpt.checkpoint.shards import FileRecord, snapshot, write_shard
from ds_gpt.config.run import CheckpointsConfig
from ds_gpt.engine.engine import Engine


class SaveError(Exception):
    """A checkpoint could not be written. The previous one is intact."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete.

    Attributes:
        path: its folder.
        stall_s: seconds for which training stood still.
        total_s: seconds until it was complete.
        removed: steps of older checkpoints that were removed.
        unremoved: why others could not be; None where all is as it should be.
    """

    path: Path
    stall_s: float
    total_s: float
    removed: list[int]
    unremoved: str | None


@dataclass
class _Pending:
    step: int
    state: dict[str, Any]
    written: Future[FileRecord]
    started: float
    stall_s: float


class Saver:
    """Every rank makes the same calls. No rank acts on its own knowledge: what one cannot write, all know of.

    Under ``checkpoints.background`` a save only copies the state to host memory; a thread writes it while training
    goes on. The threads use no collectives: ranks find out in `poll`, together, that all of them are done.
    """

    def __init__(self, engine: Engine, checkpoints: Path, config: CheckpointsConfig) -> None:
        self._engine, self._checkpoints, self._config = engine, checkpoints, config
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: _Pending | None = None

    def save(self, state: RunState, facts: dict[str, Any], background: bool | None = None) -> Saved | None:
        """Begin to save; complete it too unless it may go on in the background.

        Args:
            state: where the run stands.
            facts: what else ``run_state.json`` is to hold.
            background: overrides the configuration (the last save of a run is awaited).

        Raises:
            SaveError: on every rank, where any rank could not write.
        """
        self.finish()
        started, ranks = time.perf_counter(), self._engine.ranks
        failure = None
        if ranks.is_first:
            try:
                prepare_partial(self._checkpoints, state.step)
            except OSError as error:
                failure = error
        self._agree(state.step, failure)  # also: the folder exists now for every rank
        tensors = snapshot(self._engine.pieces())
        partial = partial_of(self._checkpoints, state.step)
        written = self._thread.submit(write_shard, partial, ranks.rank, tensors)
        content = {**asdict(state), **facts, **self._engine.state_facts()}
        self._pending = _Pending(state.step, content, written, started, time.perf_counter() - started)
        in_background = self._config.background if background is None else background
        return None if in_background else self.finish()

    @property
    def busy(self) -> bool:
        """Whether a save goes on behind training."""
        return self._pending is not None

    def poll(self) -> Saved | None:
        """Complete a save that went on in the background, once every rank has written its part."""
        if self._pending is None:
            return None
        (unfinished,) = self._engine.ranks.sum([float(not self._pending.written.done())])
        return None if unfinished else self.finish()

    def finish(self) -> Saved | None:
        """Wait until the save in progress is complete, if there is one. Raises SaveError on every rank."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        waited = time.perf_counter()
        error = pending.written.exception()  # waits
        self._agree(pending.step, error)
        records = self._engine.ranks.gather(pending.written.result())
        failure, removed, unremoved = None, [], None
        if self._engine.ranks.is_first:
            try:
                commit(partial_of(self._checkpoints, pending.step), pending.step, pending.state, records)
            except OSError as error_of_first:
                failure = error_of_first
            else:
                removed, unremoved = self._retain(pending.step)
        self._agree(pending.step, failure)
        now = time.perf_counter()
        path = self._checkpoints / checkpoint_name(pending.step)
        return Saved(path, pending.stall_s + now - waited, now - pending.started, removed, unremoved)

    def _retain(self, step: int) -> tuple[list[int], str | None]:
        """Steps that were removed, and why others could not be: that costs room, and not the checkpoint that was saved."""
        config = self._config
        try:
            return apply_retention(self._checkpoints, step, config.keep_last, config.keep_every, config.keep_best), None
        except OSError as error:
            return [], str(error)

    def _agree(self, step: int, error: BaseException | None) -> None:
        """Raise on every rank where any rank has an error."""
        told = [text for text in self._engine.ranks.gather(None if error is None else str(error)) if text is not None]
        if not told:
            return
        if self._engine.ranks.is_first:
            remove(partial_of(self._checkpoints, step))
        raise SaveError(f"the checkpoint of step {step} could not be saved: {told[0]}")

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True)
