"""``ds-gpt plan`` as it is typed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_gpt.commands.train import parser as train_parser

REPOSITORY = Path(__file__).resolve().parents[2]
GPT_1B = ("--config", "ds_configs/runs/gpt_1b.yaml", "--device", "a100-40gb", "--devices", "8")


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ds_gpt", "plan", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)


def test_it_answers_at_once_and_recommends_what_can_be_typed() -> None:
    start = time.process_time()
    result = plan(*GPT_1B)
    assert result.returncode == 0, result.stderr
    assert "fastest that fits" in result.stdout and "tokens/s, MFU" in result.stdout
    command = shlex.split(result.stdout.strip().splitlines()[-1])
    assert command[:4] == ["deepspeed", "--num_gpus", "8", "ds_gpt/train.py"]
    options = train_parser().parse_args(command[4:])
    assert options.config == "ds_configs/runs/gpt_1b.yaml"
    assert time.process_time() - start < 2


def test_json_lists_every_candidate() -> None:
    found = json.loads(plan(*GPT_1B, "--json").stdout)
    assert {candidate["zero_stage"] for candidate in found} == {0, 1, 2, 3}
    assert {candidate["activation_checkpointing"] for candidate in found} == {None, "selective", "full"}
    for candidate in found:
        assert {"micro_batch", "fits", "peak_bytes", "step_s", "tokens_per_s", "mfu"} <= set(candidate)
        assert sum(candidate["bytes"].values()) == candidate["peak_bytes"]


def test_what_fits_nowhere_is_said_with_the_reason() -> None:
    result = plan("--config", "ds_configs/runs/gpt_1b.yaml", "--device", "l4", "--devices", "1", "--set", "model.layers=200")
    assert result.returncode == 0
    assert re.search(r"nothing fits\. Nearest, .* GiB short", result.stdout)


def test_why_names_the_remedy() -> None:
    result = plan(*GPT_1B[:2], "--device", "l4", "--devices", "8", "--why")
    assert re.search(r"activations .* GiB of 22\.5, .* too much; (full|selective) checkpointing brings it to", result.stdout)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "a100-41gb"), "did you mean 'a100-40gb'"),
        (("--devices", "0"), "--devices 0 is not a number of GPUs"),
        (("--devices", "7"), "batch.global_batch_size = 64 is not 7 ranks"),
        (("--price", "-1"), "--price -1.0 is negative"),
        (("--set", "model.heads=3"), "model.heads"),
        (("--colour",), "--colour"),
    ],
)
def test_bad_input_is_told_plainly(arguments: tuple[str, ...], said: str) -> None:
    result = plan("--config", "ds_configs/runs/gpt_1b.yaml", *arguments)
    assert result.returncode == 2
    assert said in result.stderr and "Traceback" not in result.stderr


def test_the_planner_loads_neither_torch_nor_deepspeed() -> None:
    code = "import sys, ds_gpt.planner.search, ds_gpt.commands.plan; print({'torch', 'deepspeed', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY).stdout.strip() == "set()"
