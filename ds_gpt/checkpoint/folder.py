"""The folders that checkpoints lie in. A folder that bears its final name is complete.

``step_0001000/`` holds one file a rank, ``run_state.json``, and ``manifest.json`` with the size and checksum of every
other file. It is written under a temporary name, synced and renamed; ``latest`` is moved last, and atomically.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ds_gpt.checkpoint.shards import SHARD_PATTERN, FileRecord, record
from ds_gpt.data.replacing import replace_text, sync

LATEST = "latest"
STATE = "run_state.json"
MANIFEST = "manifest.json"
_REPLACED = "-replaced"  # a checkpoint whose step was saved anew; it counts as one until the new one has its name
_NAME = re.compile(rf"^step_(\d{{7,}})({_REPLACED})?$")


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after `step` optimizer steps."""
    return f"step_{step:07d}"


def step_of(checkpoint: Path) -> int:
    """Inverse of `checkpoint_name`."""
    return int(checkpoint.name.removeprefix("step_").removesuffix(_REPLACED))


def complete(checkpoints: Path) -> list[Path]:
    """Checkpoint folders that were renamed into place, newest first."""
    found = [path for path in checkpoints.glob("step_*") if _NAME.match(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (step_of(path), not path.name.endswith(_REPLACED)), reverse=True)


def prepare_partial(checkpoints: Path, step: int) -> Path:
    """An empty folder under a temporary name. What an earlier process left half written is removed."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    for leftover in (*checkpoints.glob(".*.partial"), *checkpoints.glob(".*.deleted")):
        remove(leftover)
    partial = partial_of(checkpoints, step)
    partial.mkdir()
    return partial


def partial_of(checkpoints: Path, step: int) -> Path:
    """The temporary name of a checkpoint folder."""
    return checkpoints / f".{checkpoint_name(step)}.partial"


def commit(partial: Path, step: int, state: dict[str, Any], records: Iterable[FileRecord]) -> Path:
    """Complete a partial folder and give it its final name; then move ``latest``.

    Args:
        partial: holds every rank's file, synced.
        step: optimizer steps completed.
        state: content of ``run_state.json``.
        records: the ranks' files.
    """
    checkpoints, final = partial.parent, partial.with_name(checkpoint_name(step))
    replaced = final.with_name(final.name + _REPLACED)
    _write_json(partial / STATE, state)
    files = [*records, record(partial / STATE)]
    _write_json(partial / MANIFEST, {"files": [asdict(file) for file in files]})
    sync(partial)
    if final.exists():  # the same step, saved before a rollback, or damaged
        if replaced.exists():
            retire(replaced)
        os.rename(final, replaced)
    os.rename(partial, final)
    sync(checkpoints)
    _point_latest_at(final)
    if replaced.exists():
        retire(replaced)
    return final


def _point_latest_at(checkpoint: Path) -> None:
    replace_text(checkpoint.parent / LATEST, checkpoint.name + "\n")


def remove(path: Path) -> None:
    """Remove a file or folder, existing or not."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def retire(checkpoint: Path) -> None:
    """Remove a checkpoint so that no half of it can be taken for one."""
    deleted = checkpoint.with_name(f".{checkpoint.name}.deleted")
    remove(deleted)
    os.rename(checkpoint, deleted)
    remove(deleted)


def retire_after(checkpoints: Path, step: int) -> None:
    """Point ``latest`` at the newest checkpoint up to `step`, and remove those of later steps, newest first."""
    found = complete(checkpoints)
    left = [path for path in found if step_of(path) <= step]
    if left:
        _point_latest_at(left[0])
    else:
        (checkpoints / LATEST).unlink(missing_ok=True)
    for path in found:
        if step_of(path) > step:
            retire(path)


def apply_retention(checkpoints: Path, step: int, keep_last: int | None, keep_every: int | None, keep_best: bool) -> list[int]:
    """Remove what need not be kept, once the checkpoint of `step` is complete, and return the steps removed.

    Kept are the newest `keep_last` (None: all), those of every `keep_every`-th step, and the one with the lowest
    validation loss. Those of later steps are damaged, since the run went on from before them: they count for nothing.
    """
    found = [path for path in complete(checkpoints) if step_of(path) <= step]
    if keep_last is None:
        return []
    kept = set(found[:keep_last])
    if keep_every:
        kept |= {path for path in found if step_of(path) % keep_every == 0}
    if keep_best:
        losses = {path: loss for path in found if math.isfinite(loss := _val_loss(path))}
        if losses:
            kept.add(min(losses, key=lambda path: losses[path]))
    removed = [path for path in found if path not in kept]
    for path in removed:
        retire(path)
    return [step_of(path) for path in removed]


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Content of ``run_state.json``. Raises OSError or ValueError where a checkpoint that was not checked is damaged."""
    return json.loads((checkpoint / STATE).read_text())


def _val_loss(checkpoint: Path) -> float:
    """Validation loss at a checkpoint; NaN where none was taken, or it cannot be read."""
    try:
        loss = read_state(checkpoint).get("val_loss")
    except (OSError, ValueError):
        return math.nan
    return math.nan if loss is None else loss


def damage(checkpoint: Path, mine: Callable[[int], bool] = lambda index: True) -> str | None:
    """What is wrong with a checkpoint, naming the file, or None where it is intact.

    Args:
        checkpoint: the folder.
        mine: which files of the manifest to read, by index: ranks share the work.
    """
    try:
        return _damage(checkpoint, mine)
    except OSError as error:  # not raised: the other ranks wait for this one's verdict
        return f"{Path(error.filename or checkpoint).name} cannot be read: {error.strerror or error}"


def _damage(checkpoint: Path, mine: Callable[[int], bool]) -> str | None:
    if not (checkpoint / MANIFEST).exists():
        return f"{MANIFEST} is missing"
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        files = {checkpoint / entry["name"]: FileRecord(**entry) for entry in manifest["files"]}
    except (ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    if checkpoint / STATE not in files:
        return f"{MANIFEST} does not list {STATE}"
    for path in sorted(checkpoint.glob(SHARD_PATTERN)):  # it would be read along with the others
        if path not in files:
            return f"{path.name} is not in {MANIFEST}"
    for index, (path, expected) in enumerate(files.items()):
        if not path.is_file():
            return f"{expected.name} is missing"
        size_bytes = path.stat().st_size
        if size_bytes != expected.size_bytes:
            return f"{expected.name} has {size_bytes} bytes, not {expected.size_bytes}"
        if mine(index) and record(path).sha256 != expected.sha256:
            return f"{expected.name} was altered: its checksum is another"
    return None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
    sync(path)
