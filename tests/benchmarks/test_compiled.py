"""``python -m benchmarks compile``: its two engines train alike, and what is written down is theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_record_holds_both_sides(tmp_path: Path) -> None:
    """With the compiler switched off, which is PyTorch's own switch: compiling takes minutes, and the parity tests do it."""
    command = [sys.executable, "-m", "benchmarks", "compile", "--steps", "2", "--records", str(tmp_path)]
    environment = {**os.environ, "TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    measured = json.loads((tmp_path / "compile.json").read_text())["measured"]
    assert set(measured) == {"gpt2", "llama"}
    for found in measured.values():
        assert found["speed_up"] == pytest.approx(found["cpu_step_s"]["eager"] / found["cpu_step_s"]["compiled"])
        assert found["largest_relative_difference_of_losses"] < 1e-5 and found["steps_timed"] == 2
