"""Saving behind training: the same run and the same checkpoints, every save completed or its failure told, no thread left."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import at_steps, events, limit_files, slow_writes, writing_threads
from forked_ranks import run_ranks
from made import OneRankEngine
from running import train_run

from ds_gpt.checkpoint import saver as saver_module
from ds_gpt.checkpoint.folder import complete, damage, step_of
from ds_gpt.checkpoint.run_state import RunState
from ds_gpt.checkpoint.saver import SaveError, Saver
from ds_gpt.checkpoint.shards import ShardReader
from ds_gpt.config import RunStopped
from ds_gpt.config.run import CheckpointsConfig

SETTINGS = ["training.steps=13", "checkpoints.every=3", "checkpoints.keep_last=null", "model.dropout=0.1", "health.enabled=false"]
BACKGROUND = [*SETTINGS, "checkpoints.background=true"]


def runs(ranks: Any, folder: Path) -> dict[str, Any]:
    """Pairs of runs in the foreground and behind training, with disks that are fast, slow, and slower than the saves are apart."""
    results: dict[str, Any] = {}
    for stage in ("zero1", "zero3"):
        results[f"{stage} foreground"] = train_run(ranks, str(folder / f"{stage} foreground"), stage, SETTINGS)
        for name, seconds in {"fast": 0.0, "slow": 0.02, "slower": 0.3}.items():
            if name == "fast" or stage == "zero1":
                with slow_writes(seconds):
                    results[f"{stage} {name}"] = train_run(ranks, str(folder / f"{stage} {name}"), stage, BACKGROUND)
    results["threads"] = writing_threads()
    return results


def test_training_and_checkpoints_are_those_of_the_foreground(tmp_path: Path) -> None:
    by_rank = run_ranks(2, runs, tmp_path)
    for results in by_rank:
        assert results.pop("threads") == []
        for name, result in results.items():
            assert result["weights"] == results[f"{name.split()[0]} foreground"]["weights"]
    for name in by_rank[0]:
        foreground = tmp_path / f"{name.split()[0]} foreground" / "checkpoints"
        found = complete(tmp_path / name / "checkpoints")
        assert [step_of(path) for path in found] == [13, 12, 9, 6, 3], name
        for path in found:
            assert damage(path) is None
            assert not list(path.parent.glob(".*"))
            for file in path.glob("rank_*"):
                assert file.read_bytes() == (foreground / path.name / file.name).read_bytes(), f"{name}: {path.name}/{file.name}"
            state, expected = (json.loads((folder / "run_state.json").read_text()) for folder in (path, foreground / path.name))
            assert state["facts"].pop("checkpoints") != expected["facts"].pop("checkpoints") or "foreground" in name
            assert state == expected
        assert len(events(tmp_path / name, "saved")) == 5, f"{name}: each save is reported once"
    stalls = [json.loads(line) for line in (tmp_path / "zero1 slow" / "events.jsonl").read_text().splitlines()]
    behind = [line for line in stalls if line["event"] == "saved" and line["text"].startswith("saved step_0000003")]
    assert behind[0]["step"] > 3 and behind[0]["stall_s"] < behind[0]["total_s"], "training went on meanwhile"


def failures(ranks: Any, folder: Path) -> dict[str, Any]:
    """Rank 1 cannot write the checkpoint of step 3, and can again from step 5 on; the run goes on, or stops."""
    results: dict[str, Any] = {}
    for name, overrides, seconds in (
        ("told at a poll", [*BACKGROUND, "checkpoints.on_failure=continue"], 0.0),
        ("told at the next save", [*BACKGROUND, "checkpoints.on_failure=continue"], 0.3),
        ("stops", BACKGROUND, 0.0),
        ("found out at the end", [*BACKGROUND, "checkpoints.on_failure=continue", "training.steps=4"], 0.3),
    ):
        # The limit is there while the thread writes: before the save is begun, at the end of step 3.
        actions = {2: lambda: limit_files(20_000), 6 if "next" in name else 5: lambda: limit_files(None)} if ranks.rank == 1 else {}
        try:
            with at_steps(actions), slow_writes(seconds):
                train_run(ranks, str(folder / name), "zero2", overrides, report=False)
            results[name] = ""
        except RunStopped as error:
            results[name] = str(error)
        limit_files(None)
        results[f"{name}: threads"] = writing_threads()
    return results


def test_a_failure_behind_training_is_told_to_every_rank_at_the_next_poll(tmp_path: Path) -> None:
    first, other = run_ranks(2, failures, tmp_path)
    assert first == other
    assert all(threads == [] for name, threads in first.items() if name.endswith("threads"))
    for name in ("told at a poll", "told at the next save"):
        assert first[name] == ""
        ((step, _),) = events(tmp_path / name, "save_failed")
        assert 3 < step <= 6
        # Its failure costs no other save: step 6 saved, too, though it was due just then.
        assert [step_of(path) for path in complete(tmp_path / name / "checkpoints")] == [13, 12, 9, 6]
    assert "the checkpoint of step 3 could not be saved" in first["stops"] and "rank_00001.safetensors" in first["stops"]
    assert complete(tmp_path / "stops" / "checkpoints") == []
    assert "the checkpoint of step 4 could not be saved" in first["found out at the end"]
    assert events(tmp_path / "found out at the end", "save_failed") == [(4, "save_failed")], "step 3's"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The thread writes once this is set."""
    event, real = threading.Event(), saver_module.write_shard

    def write_shard(*arguments: Any) -> Any:
        assert event.wait(10)
        return real(*arguments)

    monkeypatch.setattr(saver_module, "write_shard", write_shard)
    return event


def test_what_is_written_is_what_was_there_when_the_save_began(gate: threading.Event, tmp_path: Path) -> None:
    engine = OneRankEngine()
    saver = Saver(engine, tmp_path, CheckpointsConfig(background=True))  # type: ignore[arg-type]
    engine.weight.fill_(1.0)
    assert saver.save(RunState(step=1), {}) is None
    engine.weight.fill_(2.0)
    assert saver.poll() is None and complete(tmp_path) == []
    gate.set()
    saved = saver.finish()
    assert saved is not None and saved.path == tmp_path / "step_0000001" and saved.stall_s <= saved.total_s
    with ShardReader(saved.path) as shards:
        value = shards.read("w", "weight", 0, 1000)
    assert value is not None and torch.equal(value, torch.ones(1000))
    assert saver.poll() is None and saver.finish() is None, "nothing is reported twice"
    saver.close()
    assert writing_threads() == []


def test_a_save_waits_for_the_one_before_it(gate: threading.Event, tmp_path: Path) -> None:
    saver = Saver(OneRankEngine(), tmp_path, CheckpointsConfig(background=True))  # type: ignore[arg-type]
    saver.save(RunState(step=1), {})
    threading.Timer(0.1, gate.set).start()
    saver.save(RunState(step=2), {})
    assert [step_of(path) for path in complete(tmp_path)] == [1]
    saver.save(RunState(step=3), {}, background=False)
    assert [step_of(path) for path in complete(tmp_path)] == [3, 2, 1]
    saver.close()


def test_closing_in_the_middle_of_a_save_leaves_no_thread_and_no_half_checkpoint(gate: threading.Event, tmp_path: Path) -> None:
    saver = Saver(OneRankEngine(), tmp_path, CheckpointsConfig(background=True))  # type: ignore[arg-type]
    saver.save(RunState(step=1), {})
    gate.set()
    saver.close()
    assert writing_threads() == [] and complete(tmp_path) == []


def test_an_error_of_any_kind_in_the_thread_is_a_save_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_memory(*arguments: Any) -> None:
        raise MemoryError("no memory for the header")

    monkeypatch.setattr(saver_module, "write_shard", no_memory)
    saver = Saver(OneRankEngine(), tmp_path, CheckpointsConfig(background=True))  # type: ignore[arg-type]
    saver.save(RunState(step=1), {})
    with pytest.raises(SaveError, match="step 1 could not be saved: no memory for the header"):
        saver.finish()
    saver.close()
