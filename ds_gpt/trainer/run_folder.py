"""The folder of a run: what was run, with what, and what came of it."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from ds_gpt.config import Composed, ConfigError, Problem
from ds_gpt.data import Tokenizer

_PACKAGES = ("ds_gpt", "torch", "deepspeed", "numpy")


class RunFolder:
    """``runs/NAME``: configuration, environment, tokenizer, metrics, checkpoints, TensorBoard events, sample."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.sample = path / "sample.txt"

    @classmethod
    def new(cls, name: str, run_dir: str | None) -> RunFolder:
        """A folder that no other run has used; nothing is ever overwritten. Not yet created.

        Args:
            name: the run's name, which becomes ``runs/NAME``, ``runs/NAME-2``, ...
            run_dir: the folder itself, where the user chose it.

        Raises:
            ConfigError: ``run_dir`` is not empty.
        """
        if run_dir is not None:
            path = Path(run_dir)
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise ConfigError(
                    Problem(f"--run-dir '{path}' is not empty", "a run never overwrites another", "give another folder, or move that one")
                )
            return cls(path)
        path, number = Path("runs") / name, 1
        while path.exists():
            number += 1
            path = Path("runs") / f"{name}-{number}"
        return cls(path)

    def create(self, composed: Composed, tokenizer: Tokenizer, dataset_digest: str) -> None:
        """Make the folder and write down what is about to be run.

        Raises:
            ConfigError: the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "run.yaml").write_text(yaml.safe_dump(composed.run.model_dump(mode="json"), sort_keys=False))
            (self.path / "deepspeed.json").write_text(json.dumps(composed.deepspeed, indent=2) + "\n")
            (self.path / "environment.json").write_text(json.dumps(_environment(composed, dataset_digest), indent=2) + "\n")
            tokenizer.save(self.path / "tokenizer.json")
        except OSError as error:
            raise ConfigError(
                Problem(f"the run folder '{self.path}' cannot be written: {error.strerror}", "the run would leave nothing behind", "choose another with --run-dir")
            ) from None


def _environment(composed: Composed, dataset_digest: str) -> dict[str, Any]:
    return {
        "command": sys.argv,
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in _PACKAGES},
        "device": composed.hardware.name,
        "world_size": composed.hardware.world_size,
        "precision": composed.precision,
        "activation_checkpointing": composed.checkpoint_policy,
        "dataset_digest": dataset_digest,
    }


def git_commit() -> str | None:
    """Commit of the checkout that ds_gpt runs from, with ``-dirty`` where it was changed; None outside of git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
