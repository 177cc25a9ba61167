"""A checkpoint is a folder that appears complete: it is written under a temporary name, synced, then renamed."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from ds_gpt.engine.engine import Engine

_LATEST = "latest"
_STATE = "run_state.json"


@dataclass(frozen=True)
class RunState:
    """What a run is, besides weights and optimizer: the sampler and all dropout follow from the step.

    Attributes:
        step: optimizer steps completed.
        tokens: tokens trained on.
    """

    step: int = 0
    tokens: int = 0


def save(engine: Engine, checkpoints: Path, state: RunState) -> Path:
    """Write ``checkpoints/step_0001000``; every rank must call it.

    ``latest`` is moved last, and atomically: DeepSpeed itself writes it while other ranks are still writing shards.
    Whatever happens before the rename leaves the previous checkpoint untouched.
    """
    final = checkpoints / f"step_{state.step:07d}"
    partial = final.with_name(f".{final.name}.partial")
    if engine.ranks.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    engine.ranks.barrier()
    engine.save_shards(partial)
    engine.ranks.barrier()
    if engine.ranks.is_first:
        (partial / _STATE).write_text(json.dumps(asdict(state), indent=2) + "\n")
        for path in partial.rglob("*"):
            _sync(path)
        shutil.rmtree(final, ignore_errors=True)  # the same step, saved before a rollback or by an interrupted run
        os.rename(partial, final)
        _sync(checkpoints)
        pointer = checkpoints / f".{_LATEST}.partial"
        pointer.write_text(final.name + "\n")
        _sync(pointer)
        os.replace(pointer, checkpoints / _LATEST)
        _sync(checkpoints)
    engine.ranks.barrier()
    return final


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
