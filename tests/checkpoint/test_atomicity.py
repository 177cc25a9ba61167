"""A save that ends anywhere leaves an intact newest checkpoint, the earlier ones untouched, and nothing in the way of the next."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from made import OneRankEngine, contents, make, make_and_retain

from ds_gpt.checkpoint.folder import complete, damage, read_state, retire_after, step_of
from ds_gpt.checkpoint.run_state import RunState
from ds_gpt.checkpoint.saver import SaveError, Saver
from ds_gpt.config.run import CheckpointsConfig

# Everything by which a save changes the disk, but the shards' contents.
OPERATIONS = ((os, "rename"), (os, "replace"), (os, "fsync"), (Path, "write_text"), (Path, "mkdir"), (Path, "unlink"), (shutil, "rmtree"))


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are a thousand saves here, and no power cut."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Crash(BaseException):
    """The process is gone: nothing handles it."""


@contextmanager
def failing(at: int, error: BaseException, halfway: bool) -> Iterator[list[str]]:
    """The operation number `at` raises `error`, undone or half done; yields the names of those that were begun."""
    begun: list[str] = []
    real = {(owner, name): getattr(owner, name) for owner, name in OPERATIONS}

    def counted(owner: Any, name: str) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            begun.append(name)
            if len(begun) - 1 != at:
                return real[owner, name](*arguments, **options)
            if halfway:
                if name == "write_text":
                    real[owner, name](arguments[0], arguments[1][: len(arguments[1]) // 2])
                elif name == "rmtree":
                    for file in sorted(Path(arguments[0]).iterdir())[:1]:
                        os.unlink(file)
                else:
                    real[owner, name](*arguments, **options)  # a single system call is done or not
            raise error

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in OPERATIONS:
            patch.setattr(owner, name, counted(owner, name))
        yield begun


def moments() -> Iterator[tuple[int, bool]]:
    """(operation, whether it is half done), without end."""
    return ((at, halfway) for at in itertools.count() for halfway in (False, True))


def every_crash(folder: Path, prepare: Callable[[Path], object], save: Callable[[Path], object]) -> Iterator[tuple[Path, dict[Path, dict[str, str]]]]:
    """For each moment at which `save` can be cut off: the folder as it is then, and the contents of its checkpoints before."""
    for at, halfway in moments():
        checkpoints = folder / f"{at}-{halfway}"
        prepare(checkpoints)
        before = {path: contents(path) for path in complete(checkpoints)}
        try:
            with failing(at, Crash(), halfway) as begun:
                save(checkpoints)
        except Crash:
            yield checkpoints, before
        else:
            assert at == len(begun) > 5, "every operation was cut off once"
            return


def assert_sound(checkpoints: Path, at_least: int) -> Path:
    """Every folder under a final name is intact; returns the newest."""
    found = complete(checkpoints)
    assert all(damage(path) is None for path in found), [damage(path) for path in found]
    assert found and step_of(found[0]) >= at_least
    return found[0]


def assert_next_save_works(checkpoints: Path, step: int) -> None:
    path = make_and_retain(checkpoints, step, version=0.5)
    assert assert_sound(checkpoints, step) == path and read_state(path)["version"] == 0.5
    assert (checkpoints / "latest").read_text() == f"{path.name}\n"
    assert {entry.name for entry in checkpoints.iterdir()} == {"latest", *(entry.name for entry in complete(checkpoints))}, "nothing is left over"


def three(checkpoints: Path) -> None:
    for step in (1, 2, 3):
        make(checkpoints, step)


def test_a_crash_anywhere_in_a_save(tmp_path: Path) -> None:
    crashes = 0
    for checkpoints, before in every_crash(tmp_path, three, lambda folder: make_and_retain(folder, 4)):
        assert_sound(checkpoints, 3)
        latest = checkpoints / (checkpoints / "latest").read_text().strip()
        assert damage(latest) is None and step_of(latest) >= 3
        for path, content in before.items():
            if step_of(path) == 3 or path.exists():  # retention was going to remove the others
                assert contents(path) == content
        assert_next_save_works(checkpoints, 5)
        crashes += 1
    assert crashes > 30


def test_a_crash_anywhere_while_a_step_is_saved_anew_and_then_another(tmp_path: Path) -> None:
    """After a rollback, say. The one that is replaced is the only one there."""

    def again(folder: Path) -> None:
        make_and_retain(folder, 7, version=0.25)

    seen: list[set[str]] = []
    for crashed, _ in every_crash(tmp_path / "once", lambda folder: make(folder, 7), again):
        assert_sound(crashed, 7)
        names = {str(path.relative_to(crashed)) for path in crashed.rglob("*")}
        if names in seen:
            continue
        seen.append(names)

        def copied(folder: Path, crashed: Path = crashed) -> None:
            shutil.copytree(crashed, folder)

        for checkpoints, _ in every_crash(tmp_path / "twice" / crashed.name, copied, again):
            assert_sound(checkpoints, 7)
            assert_next_save_works(checkpoints, 7)
    assert len(seen) > 8


def test_a_crash_anywhere_while_a_rollback_retires_later_checkpoints(tmp_path: Path) -> None:
    for checkpoints, before in every_crash(tmp_path, three, lambda folder: retire_after(folder, 1)):
        assert_sound(checkpoints, 1)
        assert damage(checkpoints / (checkpoints / "latest").read_text().strip()) is None
        assert contents(checkpoints / "step_0000001") == before[checkpoints / "step_0000001"]
        assert_next_save_works(checkpoints, 4)


@pytest.mark.parametrize("step", [4, 3], ids=["new", "anew"])
def test_a_disk_that_refuses_any_operation_costs_that_save_alone(step: int, tmp_path: Path) -> None:
    outcomes = set()
    for at, halfway in moments():
        checkpoints = tmp_path / f"{at}-{halfway}"
        three(checkpoints)
        before = contents(checkpoints / "step_0000002")
        saver = Saver(OneRankEngine(), checkpoints, CheckpointsConfig(keep_last=2))  # type: ignore[arg-type]
        try:
            with failing(at, OSError(28, "No space left on device"), halfway) as begun:
                saver.save(RunState(step=step), {})
            outcomes.add("saved")
        except SaveError as error:
            assert f"step {step} could not be saved" in str(error) and "No space left on device" in str(error)
            outcomes.add("refused")
        assert_sound(checkpoints, 3)
        assert contents(checkpoints / "step_0000002") == before or not (checkpoints / "step_0000002").exists()
        saver.save(RunState(step=5), {})
        saver.close()
        assert step_of(assert_sound(checkpoints, 5)) == 5
        assert not list(checkpoints.glob(".*"))
        if len(begun) <= at:
            break
    assert outcomes == {"saved", "refused"}


def test_what_a_killed_process_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    make(tmp_path, 1)
    for name in (".step_0000002.partial", ".step_0000001.deleted"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank_00000.safetensors").write_bytes(b"half")
    (tmp_path / ".latest.0123.partial").write_text("step_00")
    assert [step_of(path) for path in complete(tmp_path)] == [1], "they are never taken for checkpoints"
    make(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step_0000001", "step_0000002"}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_have_the_mode_that_the_umask_says(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        path = make(tmp_path, 1)
    finally:
        os.umask(before)
    assert {file.name: file.stat().st_mode & 0o777 for file in path.iterdir()} == dict.fromkeys(
        ("rank_00000.safetensors", "rank_00001.safetensors", "run_state.json", "manifest.json"), mode
    )


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of fsync and rename is what a power cut would show."""
    log: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def logged_fsync(descriptor: int) -> None:
        log.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "rename", lambda old, new: (log.append(("name", Path(new).name)), rename(old, new)))
    monkeypatch.setattr(os, "replace", lambda old, new: (log.append(("name", Path(new).name)), replace(old, new)))
    path = make(tmp_path / "checkpoints", 1)
    files = [entry["name"] for entry in json.loads((path / "manifest.json").read_text())["files"]]
    assert sorted(files) == ["rank_00000.safetensors", "rank_00001.safetensors", "run_state.json"]
    named = log.index(("name", path.name))
    for name in (*files, "manifest.json", f".{path.name}.partial"):
        assert ("sync", name) in log[:named], f"{name} is synced first"
    moved = log.index(("name", "latest"))
    synced = [name for kind, name in log[named:moved] if kind == "sync"]
    assert "checkpoints" in synced and any(name.startswith(".latest.") for name in synced)
    assert ("sync", "checkpoints") in log[moved:]
