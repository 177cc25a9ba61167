"""A file that is not what was written is named, and what was saved before it is used; loading runs no code from it."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_ranks
from made import make
from running import train_run
from safetensors import SafetensorError

from ds_gpt.checkpoint.folder import complete, damage, step_of
from ds_gpt.checkpoint.shards import ShardReader, record
from ds_gpt.config import ConfigError

FIRST, SECOND, STATE, MANIFEST = "rank_00000.safetensors", "rank_00001.safetensors", "run_state.json", "manifest.json"


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit_manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))

    return edit


# name: (file, what is done to it, what is said of it)
DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "truncated": (FIRST, truncate, f"{FIRST} has "),
    "empty": (SECOND, lambda path: os.truncate(path, 0), f"{SECOND} has 0 bytes, not "),
    "longer": (FIRST, lambda path: path.write_bytes(path.read_bytes() + b"\0"), f"{FIRST} has "),
    "bit of rank 0's": (FIRST, flip_a_bit, f"{FIRST} was altered: its checksum is another"),
    "bit of rank 1's": (SECOND, flip_a_bit, f"{SECOND} was altered: its checksum is another"),
    "missing shard": (SECOND, Path.unlink, f"{SECOND} is missing"),
    "a folder for a shard": (FIRST, lambda path: (path.unlink(), path.mkdir()), f"{FIRST} is missing"),
    "foreign shard": ("rank_00002.safetensors", lambda path: shutil.copy(path.with_name(FIRST), path), f"rank_00002.safetensors is not in {MANIFEST}"),
    "altered state": (STATE, flip_a_bit, f"{STATE} was altered"),
    "truncated state": (STATE, truncate, f"{STATE} has "),
    "missing state": (STATE, Path.unlink, f"{STATE} is missing"),
    "missing manifest": (MANIFEST, Path.unlink, f"{MANIFEST} is missing"),
    "half a manifest": (MANIFEST, lambda path: os.truncate(path, 40), f"{MANIFEST} cannot be read"),
    "no manifest but bytes": (MANIFEST, lambda path: path.write_bytes(b"\xff\xfe\0"), f"{MANIFEST} cannot be read"),
    "a list": (MANIFEST, lambda path: path.write_text("[]"), f"{MANIFEST} cannot be read"),
    "no name": (MANIFEST, edit_manifest(lambda m: m["files"][0].update(name=3)), f"{MANIFEST} cannot be read"),
    "no checksum": (MANIFEST, edit_manifest(lambda m: m["files"][0].pop("sha256")), f"{MANIFEST} cannot be read"),
    "nothing listed": (MANIFEST, edit_manifest(lambda m: m["files"].clear()), f"{MANIFEST} does not list {STATE}"),
    "a shard not listed": (MANIFEST, edit_manifest(lambda m: m["files"].pop(0)), f"{FIRST} is not in {MANIFEST}"),
    "empty folder": (".", lambda path: (shutil.rmtree(path), path.mkdir()), f"{MANIFEST} is missing"),
}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each damage a folder with three checkpoints, of which the newest has it."""
    folder = tmp_path_factory.mktemp("damaged")
    for name, (file, harm, _) in DAMAGES.items():
        for step in (1, 2, 3):
            path = make(folder / name, step)
        harm(path / file)
    return folder


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_wrong_is_said_and_where(name: str, damaged: Path) -> None:
    found = damage(damaged / name / "step_0000003")
    assert found is not None and found.startswith(DAMAGES[name][2])
    assert damage(damaged / name / "step_0000002") is None


def test_harmless_neighbours_are_no_damage(tmp_path: Path) -> None:
    path = make(tmp_path, 4)
    (path / "notes.txt").write_text("a good one")
    (tmp_path / "step_0000009").write_text("no folder")
    (tmp_path / "step_12").mkdir()
    (tmp_path / "step_0000012.bak").mkdir()
    assert damage(path) is None and complete(tmp_path) == [path]


def search(ranks: Any, folder: Path) -> dict[str, Any]:
    """For each damage: the step that is used, what was said, and the refusal of the damaged one by name."""
    from ds_gpt.checkpoint.resume import newest_intact, require_intact

    found: dict[str, Any] = {}
    for name in DAMAGES:
        said: list[str] = []
        used = newest_intact(folder / name, ranks, said.append)
        try:
            require_intact(folder / name / "step_0000003", ranks)
            refusal = ""
        except ConfigError as error:
            refusal = str(error)
        found[name] = (used and step_of(used), said, refusal)
    found["earlier"] = newest_intact(folder / "truncated", ranks, lambda text: None, until_step=1)
    found["nowhere"] = newest_intact(folder / "nowhere", ranks, lambda text: None)
    found["unreadable"] = unreadable(ranks, folder / "truncated")
    return found


def unreadable(ranks: Any, checkpoints: Path) -> list[str]:
    """What is said where the disk of the last rank gives no answer."""
    from ds_gpt.checkpoint import folder as module
    from ds_gpt.checkpoint.resume import newest_intact

    def no_answer(path: Path) -> Any:
        raise OSError(errno.EIO, "Input/output error", str(path))

    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == ranks.world_size - 1:
            patch.setattr(module, "record", no_answer)
        assert newest_intact(checkpoints, ranks, said.append) is None
    return said


@pytest.mark.parametrize("world_size", [1, 2])
def test_all_ranks_pass_over_what_one_of_them_found_damaged(world_size: int, damaged: Path) -> None:
    results = run_ranks(world_size, search, damaged)
    assert all(result == results[0] for result in results)
    for name, (file, _, text) in DAMAGES.items():
        used, said, refusal = results[0][name]
        assert used == 2, name
        (line,) = said
        assert line.startswith(f"checkpoint step_0000003 is damaged and was passed over: {text}") and file.strip(".") in line
        assert text in refusal and str(damaged / name / "step_0000003") in refusal, "asked for by name it is refused"
    assert step_of(results[0]["earlier"]) == 1 and results[0]["nowhere"] is None
    name = FIRST if world_size == 1 else SECOND
    assert results[0]["unreadable"][1:] == [f"checkpoint step_000000{step} is damaged and was passed over: {name} cannot be read: Input/output error" for step in (2, 1)]


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_under_a_shards_name_runs_no_code(tmp_path: Path) -> None:
    """Even where the manifest vouches for it."""
    path, marker = make(tmp_path / "checkpoints", 1), tmp_path / "ran"
    crafted = pickle.dumps(Touch(marker))
    pickle.loads(crafted)
    assert marker.exists(), "the pickle does what it should not"
    marker.unlink()
    (path / FIRST).write_bytes(crafted)
    assert damage(path) is not None

    def vouch(manifest: dict[str, Any]) -> None:
        size_bytes, sha256 = record(path / FIRST).size_bytes, record(path / FIRST).sha256
        manifest["files"][0].update(size_bytes=size_bytes, sha256=sha256)

    edit_manifest(vouch)(path / MANIFEST)
    assert damage(path) is None
    with pytest.raises(SafetensorError):
        ShardReader(path)
    assert not marker.exists()


EVERY_TWO = ["training.steps=8", "checkpoints.every=2", "checkpoints.keep_last=2", "model.dropout=0.1"]


def resume_past_damage(ranks: Any, folder: Path) -> dict[str, Any]:
    """A run whose newest checkpoint is damaged goes on; one without any that is intact starts again."""
    whole = train_run(ranks, str(folder / "whole"), "zero2", EVERY_TWO)
    results = {"whole": whole}
    for name, harmed in {"newest": ["step_0000008"], "all": ["step_0000008", "step_0000006"]}.items():
        if ranks.is_first:
            shutil.copytree(folder / "whole", folder / name)
            for step in harmed:
                flip_a_bit(folder / name / "checkpoints" / step / SECOND)
        ranks.barrier()
        results[name] = train_run(ranks, str(folder / name), "zero2", EVERY_TWO)
    return results


def test_a_run_goes_on_from_the_newest_intact_one_and_ends_alike(tmp_path: Path) -> None:
    for rank, results in enumerate(run_ranks(2, resume_past_damage, tmp_path)):
        assert results["newest"]["from"] == 6 and results["all"]["from"] == 0
        for name in ("newest", "all"):
            assert results[name]["weights"] == results["whole"]["weights"], f"rank {rank}, {name}"
            assert results[name]["said"][0] == f"checkpoint step_0000008 is damaged and was passed over: {SECOND} was altered: its checksum is another"
        assert results["all"]["said"][-1] == f"no intact checkpoint in '{tmp_path / 'all'}': starting from step 0"
    for name in ("newest", "all"):
        assert [damage(path) for path in complete(tmp_path / name / "checkpoints")] == [None, None]
        steps = [json.loads(line)["step"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(1, 9))
