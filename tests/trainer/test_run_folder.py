"""The folder of a run is new, complete, and nobody else's."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from tiny import VOCABULARY, tiny

from ds_gpt import __version__
from ds_gpt.config import ConfigError, RunConfig
from ds_gpt.data import SyntheticTokenizer, load_tokenizer
from ds_gpt.trainer import run_folder
from ds_gpt.trainer.run_folder import RunFolder, check_unused, git_commit

TOKENIZER = SyntheticTokenizer(VOCABULARY)


def create(run_dir: str | None = None) -> RunFolder:
    return RunFolder.create(run_dir, tiny("zero2", 2), TOKENIZER, "digest")


def test_names_count_up_and_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [str(create().path) for _ in range(3)] == ["runs/quickstart", "runs/quickstart-2", "runs/quickstart-3"]
    Path("runs/quickstart-4").write_text("a file of that name")
    assert str(create().path) == "runs/quickstart-5"
    assert Path("runs/quickstart-4").read_text() == "a file of that name"


def test_runs_that_start_together_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        folders = list(threads.map(lambda _: create().path, range(24)))
    assert len(set(folders)) == 24


def test_what_is_written_down(tmp_path: Path) -> None:
    folder, composed = create(str(tmp_path / "a" / "b")), tiny("zero2", 2)
    assert folder.path == tmp_path / "a" / "b"
    assert RunConfig.model_validate(yaml.safe_load((folder.path / "run.yaml").read_text())) == composed.run
    assert json.loads((folder.path / "deepspeed.json").read_text()) == composed.deepspeed
    assert load_tokenizer(folder.path / "tokenizer.json") == TOKENIZER
    environment = json.loads((folder.path / "environment.json").read_text())
    assert environment["world_size"] == 2 and environment["device"] == "CPU" and environment["precision"] == "fp32"
    assert environment["dataset_digest"] == "digest"
    assert environment["versions"]["ds_gpt"] == __version__ and environment["versions"].keys() == {"ds_gpt", "torch", "deepspeed", "numpy"}


def refused(function: object, *arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*arguments)  # type: ignore[operator]
    (problem,) = caught.value.problems
    assert problem.fix
    return problem.what


def test_a_chosen_folder_must_be_empty(tmp_path: Path) -> None:
    empty, full, file = tmp_path / "empty", tmp_path / "full", tmp_path / "file"
    empty.mkdir()
    full.mkdir()
    (full / "x").touch()
    file.touch()
    check_unused(str(empty))
    check_unused(str(tmp_path / "none"))
    assert not (tmp_path / "none").exists(), "looking creates nothing"
    assert f"--run-dir '{full}' is not empty" == refused(check_unused, str(full))
    assert "is not empty" in refused(check_unused, str(file))
    create(str(empty))
    assert "File exists" in refused(create, str(empty)), "also where both runs looked while it was empty"


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert f"'{tmp_path}/file/run' cannot be written: Not a directory" in refused(create, str(tmp_path / "file" / "run"))
    monkeypatch.chdir(tmp_path)
    Path("runs").touch()
    assert "'runs/quickstart' cannot be written: File exists" in refused(create)


def test_it_goes_on_with_another_configuration_and_tokenizer_and_keeps_the_old(tmp_path: Path) -> None:
    """Where no checkpoint is intact the run starts again, on whatever text it is given."""
    folder, tokenizer = create(str(tmp_path / "run")), SyntheticTokenizer(VOCABULARY + 1)
    folder.metrics.write_text('{"step": 1}\n{"step": 2}\n{"st')
    folder.continue_from(1, tiny("zero3", 1), tokenizer, "other")
    assert load_tokenizer(folder.path / "tokenizer.json") == tokenizer
    assert json.loads((folder.path / "deepspeed.json").read_text())["zero_optimization"]["stage"] == 3
    assert folder.metrics.read_text() == '{"step": 1}\n'
    history = folder.path / "history" / "until_step_0000001"
    assert load_tokenizer(history / "tokenizer.json") == TOKENIZER
    assert json.loads((history / "deepspeed.json").read_text())["zero_optimization"]["stage"] == 2
    assert not list(folder.path.glob(".*"))


def test_a_disk_that_fills_up_while_it_goes_on_leaves_a_run_that_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each of the files: what is there is whole, the old or the new."""
    new, write_text, failures = tiny("zero3", 1), Path.write_text, 0
    whole = {}
    for composed in (tiny("zero2", 2), new):
        made = RunFolder.create(str(tmp_path / f"whole-{composed.zero_stage}"), composed, TOKENIZER, "digest")
        for path in made.path.iterdir():
            whole.setdefault(path.name, set()).add(path.read_text())
    while True:
        folder, written = create(str(tmp_path / f"run-{failures}")), []

        def fill_up(path: Path, text: str, fails_at: int = failures, written: list[Path] = written, **options: str) -> int:
            written.append(path)
            if len(written) <= fails_at:
                return write_text(path, text, **options)
            write_text(path, text[: len(text) // 2], **options)
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", fill_up)
            try:
                folder.continue_from(0, new, TOKENIZER, "digest")
            except ConfigError as error:
                assert "cannot be written: No space left on device" in str(error)
                failures += 1
            else:
                break
        for path in folder.path.glob("[!.]*.*"):
            assert path.read_text() in whole[path.name], path
        folder.continue_from(0, new, TOKENIZER, "digest")
    assert failures >= 4


def test_one_process_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = create(str(tmp_path / "run"))
    claim = folder.claim()
    assert f"is being trained by process {os.getpid()} on " in refused(folder.claim)
    claim.close()
    folder.claim().close()
    (folder.path / ".lock").unlink()
    (folder.path / ".lock").mkdir()
    assert "cannot be written: Is a directory" in refused(folder.claim)
    (folder.path / ".lock").rmdir()

    def no_locks(*arguments: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)  # Lustre without -o flock
    folder.claim().close()


def test_records_that_are_being_written_do_not_make_a_commit_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ds_gpt/trainer/run_folder.py", "benchmarks/records/cpu/a.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("1\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(run_folder, "__file__", str(tmp_path / "ds_gpt" / "trainer" / "run_folder.py"))
    clean = git_commit()
    assert clean is not None and len(clean) == 40
    (tmp_path / "benchmarks/records/cpu/a.json").write_text("2\n")
    assert git_commit() == clean
    (tmp_path / "ds_gpt/trainer/run_folder.py").write_text("2\n")
    assert git_commit() == f"{clean}-dirty"


def test_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = git_commit()
    assert commit is None or len(commit.removesuffix("-dirty")) == 40

    def no_git(*arguments: object, **options: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", no_git)
    assert git_commit() is None
