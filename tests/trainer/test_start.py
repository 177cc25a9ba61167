"""Where a run starts: which configuration it goes on with, and that every rank sees its folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_ranks
from tiny import VOCABULARY, tiny

from ds_gpt.data import SyntheticTokenizer
from ds_gpt.trainer.run_folder import STATED, RunFolder
from ds_gpt.trainer.start import configuration


def test_a_checkpoint_is_of_its_run_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder.create(str(tmp_path / "run"), tiny("zero2", 2), SyntheticTokenizer(VOCABULARY), "digest")
    checkpoint = run.checkpoints / "step_0000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "run_state.json").write_text("{}")
    (tmp_path / "best").symlink_to(checkpoint)
    (tmp_path / "same").symlink_to(run.path)
    for folder, name in ((tmp_path, "best"), (checkpoint, "."), (run.checkpoints, "step_0000010"), (tmp_path, str(checkpoint)), (tmp_path, "same")):
        monkeypatch.chdir(folder)
        found = configuration(None, None, [], None, name)
        assert [path.resolve() for path in found] == [run.path / "run.yaml", run.path / STATED], name


def looks(ranks: Any, folders: list[Path]) -> str:
    """Each rank in a folder of its own; the refusal of a run that is in the first one's."""
    from ds_gpt.config import ConfigError
    from ds_gpt.trainer import start

    start._CACHED_S = 0.2
    os.chdir(folders[ranks.rank])
    try:
        start.require_shared(Path("runs/a"), ranks)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_run_that_a_node_cannot_see_is_refused_before_it_trains(tmp_path: Path) -> None:
    """Its first checkpoint would fail; and to resume, that node would find every checkpoint damaged."""
    shared, other = tmp_path / "shared", tmp_path / "other"
    (shared / "runs" / "a").mkdir(parents=True)
    (shared / "runs" / "a" / "run.yaml").touch()
    other.mkdir()
    assert run_ranks(2, looks, [shared, shared]) == ["", ""]
    for refusal in run_ranks(2, looks, [shared, other]):
        assert "runs/a', made on the node of rank 0, is not there on " in refusal and "all nodes share" in refusal
