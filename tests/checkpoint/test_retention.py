"""What is kept: the last N, every Mth, the best; and always the newest."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path

import pytest
from made import OneRankEngine, make

from ds_gpt.checkpoint.folder import apply_retention, complete, damage, retire_after, step_of
from ds_gpt.checkpoint.run_state import RunState
from ds_gpt.checkpoint.saver import Saver
from ds_gpt.config.run import CheckpointsConfig


def kept_of(folder: Path, losses: list[float | None], keep_last: int | None, keep_every: int | None, keep_best: bool) -> list[int]:
    """Steps that are left after a run that saved each of `losses`, retention applied after every save."""
    for step, loss in enumerate(losses, 1):
        make(folder, step, loss)
        removed = apply_retention(folder, step, keep_last, keep_every, keep_best)
        assert not any((folder / f"step_{gone:07d}").exists() for gone in removed)
        assert (folder / (folder / "latest").read_text().strip()) == folder / f"step_{step:07d}"
        assert damage(folder / f"step_{step:07d}") is None, "the newest is never removed"
    return sorted(step_of(path) for path in complete(folder))


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "keep_best", "kept"),
    [
        (None, None, False, [1, 2, 3, 4, 5, 6, 7, 8]),
        (None, 3, True, [1, 2, 3, 4, 5, 6, 7, 8]),
        (1, None, False, [8]),
        (2, None, False, [7, 8]),
        (1, 3, False, [3, 6, 8]),
        (1, None, True, [2, 8]),
        (2, 3, True, [2, 3, 6, 7, 8]),
        (20, 3, True, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_rules_combine(keep_last: int | None, keep_every: int | None, keep_best: bool, kept: list[int], tmp_path: Path) -> None:
    losses = [3.0, 1.0, None, 2.0, math.nan, 1.5, math.inf, 1.2]  # nobody evaluated at 3; 5 is no loss
    assert kept_of(tmp_path, losses, keep_last, keep_every, keep_best) == kept


def test_any_combination_keeps_what_its_rules_name(tmp_path: Path) -> None:
    chance = random.Random(5)
    for case in range(25):
        losses = [chance.choice([None, math.nan, chance.random()]) for _ in range(chance.randint(1, 9))]
        keep_last, keep_every, keep_best = chance.randint(1, 4), chance.choice([None, 1, 2, 4]), chance.random() < 0.5
        kept = kept_of(tmp_path / str(case), losses, keep_last, keep_every, keep_best)
        last = len(losses)
        assert set(range(max(1, last - keep_last + 1), last + 1)) <= set(kept)
        if keep_every:
            assert set(range(keep_every, last + 1, keep_every)) <= set(kept)
        finite = {step: loss for step, loss in enumerate(losses, 1) if loss is not None and math.isfinite(loss)}
        if keep_best and finite:
            assert min(finite, key=lambda step: finite[step]) in kept
        allowed = keep_last + (last // keep_every if keep_every else 0) + keep_best
        assert len(kept) <= allowed


def test_a_damaged_later_checkpoint_does_not_crowd_out_the_one_just_saved(tmp_path: Path) -> None:
    """Steps 8 and 9 were found damaged, so the run goes on from 4: what it saves at 5 is its newest."""
    for step in (3, 4, 8, 9):
        make(tmp_path, step)
    for step in (8, 9):
        (tmp_path / f"step_{step:07d}" / "manifest.json").unlink()
    make(tmp_path, 5)
    assert apply_retention(tmp_path, 5, 1, None, keep_best=True) == [4, 3]
    assert damage(tmp_path / "step_0000005") is None
    for step in (8, 9):
        make(tmp_path, step)
        apply_retention(tmp_path, step, 1, None, keep_best=False)
        assert damage(tmp_path / f"step_{step:07d}") is None, "saved anew, it is whole"


def test_one_that_cannot_be_removed_does_not_cost_the_one_that_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 1)
    rename = os.rename

    def busy(old: Path, new: Path) -> None:
        if new.name.endswith(".deleted"):
            raise OSError(16, "Device or resource busy", str(old))
        rename(old, new)

    saver = Saver(OneRankEngine(), tmp_path, CheckpointsConfig(keep_last=1, keep_best=False))  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", busy)
        saved = saver.save(RunState(step=2), {})
    assert saved is not None and saved.removed == [] and "busy" in str(saved.unremoved) and "step_0000001" in str(saved.unremoved)
    assert [step_of(path) for path in complete(tmp_path)] == [2, 1] and damage(saved.path) is None
    saved = saver.save(RunState(step=3), {})
    assert saved is not None and sorted(saved.removed) == [1, 2] and saved.unremoved is None
    saver.close()


def test_later_ones_are_retired_by_a_rollback(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        make(tmp_path, step)
    retire_after(tmp_path, 4)
    assert [step_of(path) for path in complete(tmp_path)] == [4, 2]
    assert (tmp_path / "latest").read_text() == "step_0000004\n"
    retire_after(tmp_path, 1)
    assert complete(tmp_path) == [] and not (tmp_path / "latest").exists()
