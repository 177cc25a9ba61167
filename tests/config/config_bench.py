"""What the config tests share: two files written to disk, loaded as a user would, and the problems that come out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_gpt.config import Composed, ConfigError, Hardware, Problem, load

CPU = Hardware(kind="cpu", name="CPU", world_size=2, bf16=False)
A100 = Hardware(kind="cuda", name="NVIDIA A100-SXM4-40GB", world_size=8, bf16=True)
V100 = Hardware(kind="cuda", name="Tesla V100-SXM2-32GB", world_size=8, bf16=False)

RUN: dict[str, Any] = {
    "name": "test",
    "model": {"layers": 2, "width": 64, "heads": 4, "context": 32},
    "batch": {"global_batch_size": 64},
    "optimizer": {"lr": 0.001},
    "training": {"steps": 10},
}
DEEPSPEED: dict[str, Any] = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}


class Bench:
    """Writes a run YAML and a DeepSpeed JSON and loads them; ``run`` and ``deepspeed`` may be values or raw text."""

    hardware = {"cpu": CPU, "a100": A100, "v100": V100}

    def __init__(self, folder: Path) -> None:
        self.run_path, self.deepspeed_path = folder / "run.yaml", folder / "ds.json"
        self.run(RUN)
        self.deepspeed(DEEPSPEED)

    def run(self, content: dict[str, Any] | str) -> None:
        """Write the run YAML."""
        self.run_path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")

    def deepspeed(self, content: dict[str, Any] | str) -> None:
        """Write the DeepSpeed JSON."""
        self.deepspeed_path.write_text(content if isinstance(content, str) else json.dumps(content, indent=2), encoding="utf-8")

    def load(self, *overrides: str, on: Hardware = CPU) -> Composed:
        """Load both, with ``--set`` overrides."""
        return load(self.run_path, self.deepspeed_path, on, overrides)

    def problems(self, *overrides: str, on: Hardware = CPU) -> tuple[Problem, ...]:
        """The problems of ONE ConfigError; fails where nothing is wrong."""
        with pytest.raises(ConfigError) as caught:
            self.load(*overrides, on=on)
        return caught.value.problems

    def problem(self, *overrides: str, on: Hardware = CPU) -> Problem:
        """The only problem; fails where there are more, so that one mistake stays one problem."""
        (problem,) = self.problems(*overrides, on=on)
        return problem
