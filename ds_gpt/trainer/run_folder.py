"""The folder of a run: what was run, with what, and what came of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import yaml

from ds_gpt import __version__
from ds_gpt.config import Composed, ConfigError, Problem
from ds_gpt.data import Tokenizer
from ds_gpt.data.replacing import replace_text

STATED = "deepspeed_config.json"  # as the user gave it, "auto" and all: what --resume goes on with
_CONFIG = ("run.yaml", "deepspeed.json", STATED, "environment.json", "tokenizer.json")
_PACKAGES = ("torch", "deepspeed", "numpy")


class RunFolder:
    """``runs/NAME``: configuration, environment, tokenizer, metrics, checkpoints, TensorBoard events, sample, adapter."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.sample = path / "sample.txt"
        self.adapter = path / "adapter"

    @classmethod
    def create(cls, run_dir: str | None, composed: Composed, tokenizer: Tokenizer, dataset_digest: str) -> RunFolder:
        """Make a folder that no other run has, not even one that starts right now, and write down what is about to be run.

        Args:
            run_dir: the folder, where the user chose it; otherwise ``runs/NAME``, ``runs/NAME-2``, ...

        Raises:
            ConfigError: the folder cannot be written.
        """
        path = Path(run_dir or Path("runs") / composed.run.name)
        try:
            if run_dir:
                path.mkdir(parents=True, exist_ok=True)
            else:
                path = _first_free(path)
            # "x": a chosen folder may have been empty for two runs that looked at the same time.
            (path / "run.yaml").open("x").close()
            _write_config(path, composed, tokenizer, dataset_digest)
        except OSError as error:
            raise _unusable(path, error) from None
        return cls(path)

    def claim(self) -> IO[str]:
        """Take the run for this process, for as long as the returned file is open; the kernel frees it if the process dies.

        Raises:
            ConfigError: another process trains it, or the folder cannot be written.
        """
        try:
            lock = (self.path / ".lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise _unusable(self.path, error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigError(
                Problem(
                    f"the run '{self.path}' is being trained by {lock.read().strip() or 'another process'}",
                    "two processes would write into each other's metrics and checkpoints",
                    "wait for it or stop it; without --resume a new run gets a folder of its own",
                )
            ) from None
        except OSError:  # a network disk without locks (Lustre mounted without flock): a run there is worth more than the lock
            return lock
        with contextlib.suppress(OSError):  # full: whoever is refused does not learn by whom
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {platform.node()}\n")
            lock.flush()
        return lock

    def continue_from(self, step: int, composed: Composed, tokenizer: Tokenizer, dataset_digest: str) -> None:
        """Make the folder of an earlier run ready to go on at `step`; what is replaced is copied to ``history/``.

        Metrics of later steps are taken out of ``metrics.jsonl``: these steps are about to be trained again.

        Raises:
            ConfigError: the folder cannot be written. Every file in it is whole, and the run can be resumed later.
        """
        try:
            history = _first_free(self.path / "history" / f"until_step_{step:07d}")
            for name in (*_CONFIG, self.metrics.name):
                if (self.path / name).exists():
                    shutil.copy2(self.path / name, history / name)
            _write_config(self.path, composed, tokenizer, dataset_digest)
            if self.metrics.exists():
                kept = [line for line in self.metrics.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
                replace_text(self.metrics, "".join(f"{line}\n" for line in kept))
        except OSError as error:
            raise _unusable(self.path, error) from None


def _write_config(path: Path, composed: Composed, tokenizer: Tokenizer, dataset_digest: str) -> None:
    replace_text(path / "run.yaml", yaml.safe_dump(composed.run.model_dump(mode="json"), sort_keys=False))
    replace_text(path / "deepspeed.json", json.dumps(composed.deepspeed, indent=2) + "\n")
    replace_text(path / STATED, json.dumps(composed.stated, indent=2) + "\n")
    replace_text(path / "environment.json", json.dumps(environment(composed, dataset_digest), indent=2) + "\n")
    tokenizer.save(path / "tokenizer.json")


def _step_of(line: str) -> float:
    """Step of a line of metrics; a line that a killed run left half written belongs to no step that is kept."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def check_unused(run_dir: str) -> None:
    """Refuse a folder that the user chose and that is not empty. Creates nothing.

    Raises:
        ConfigError: it is not empty.
    """
    path = Path(run_dir)
    try:
        used = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError as error:
        raise _unusable(path, error) from None
    if used:
        raise ConfigError(Problem(f"--run-dir '{path}' is not empty", "a run never overwrites another", "give another folder, or move that one"))


def _first_free(path: Path) -> Path:
    """The first of NAME, NAME-2, ... that could be made; making it is what claims it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    candidate, number = path, 1
    while True:
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            number += 1
            candidate = path.with_name(f"{path.name}-{number}")


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        Problem(
            f"the run folder '{path}' cannot be written: {error.strerror}",
            "the run would leave nothing behind",
            "free space, mend its permissions, or choose another with --run-dir",
        )
    )


def environment(composed: Composed, dataset_digest: str) -> dict[str, Any]:
    """By what command, from which code and on what a run is trained."""
    return {
        "command": sys.argv,
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "versions": {"ds_gpt": __version__, **{package: version(package) for package in _PACKAGES}},  # ds_gpt may not be installed
        "device": composed.hardware.name,
        "world_size": composed.hardware.world_size,
        "precision": composed.precision,
        "activation_checkpointing": composed.checkpoint_policy,
        "compiled": composed.compiled,
        "dataset_digest": dataset_digest,
    }


def git_commit() -> str | None:
    """Commit of the checkout that ds_gpt runs from, with ``-dirty`` where it was changed; None outside of git.

    Records do not count: a suite of benchmarks writes them while it measures.
    """
    git, changed = ["git", "-C", str(Path(__file__).parent)], ["status", "--porcelain", "--untracked-files=no"]
    try:
        commit, changes = (
            subprocess.run([*git, *command], capture_output=True, text=True, check=True, timeout=10).stdout.strip()
            for command in (["rev-parse", "HEAD"], [*changed, "--", ":(top)", ":(top,exclude)benchmarks/records"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changes else commit
