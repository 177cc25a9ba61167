"""The README keeps its word: every command in it runs, its tables are the records', its map is the code's."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
README = (REPOSITORY / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
SET_UP, RUN_TESTS = COMMANDS[:2]

_SMALL = "training.steps=4 evaluation.sequences=4 sample.tokens=4 model.layers=2 model.width=32 model.heads=2 model.context=16 data.corpus=python_docs model.vocab_size=auto"


def _small_run(command: str, folder: Path) -> list[str]:
    """A training command of the README, on a model that takes seconds."""
    settings = [argument for setting in _SMALL.split() for argument in ("--set", setting)]
    return [*shlex.split(command), "--run-dir", str(folder / "run"), *settings]


def _run(command: list[str], deadline_s: float) -> str:
    """Run a command of the README from the repository's root; its processes are ended at the deadline."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    return output


def test_ci_does_what_the_readme_says() -> None:
    ci = (REPOSITORY / ".ci" / "run").read_text()
    set_up, train = SET_UP.rsplit(" && ", 1)
    assert set_up in ci.splitlines()
    assert train == "deepspeed --num_gpus 2 ds_gpt/train.py"
    activate, run_tests = RUN_TESTS.split(" && ")
    assert activate in set_up
    assert any(line.partition(" || ")[0] == run_tests for line in ci.splitlines())


# Eight ranks once: tests/commands/test_train_command.py runs this one, and asks more of it.
EIGHT_RANKS = "deepspeed --num_gpus 8 ds_gpt/train.py --config ds_configs/runs/gpt_1b.yaml --deepspeed_config ds_configs/zero2.json"
TRAINING = [SET_UP.rsplit(" && ", 1)[1], *(command for command in COMMANDS[2:] if "ds_gpt/train.py" in command)]
WALK = [command for command in COMMANDS[2:] if "toy_" in command]
OTHERS = [command for command in COMMANDS[2:] if command not in TRAINING + WALK]
TRAINING.remove(EIGHT_RANKS)


@pytest.mark.parametrize("command", TRAINING)
def test_training_commands_run(command: str, tmp_path: Path) -> None:
    output = _run(_small_run(command, tmp_path), deadline_s=240)
    assert "sample:" in output
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 4 and lines[-1]["val_loss"] < 6
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == "step_0000004"


def test_the_walk_to_an_aligned_model_runs(tmp_path: Path) -> None:
    """Each run starts from the one before; the model is as small as that."""
    shape = [setting for setting in _SMALL.split() if "model." in setting or "steps" in setting]
    settings = [setting.replace("context=16", "context=96") for setting in [*shape, "logging.tensorboard=false"]]
    small = [argument for setting in settings for argument in ("--set", setting)]
    _run(["ds-gpt", "train", "--run-dir", f"{tmp_path}/quickstart", *small], deadline_s=120)
    for command in WALK:
        arguments = shlex.split(command)
        if arguments[1] == "train":
            stage, before = re.search(r"toy_(\w+)", command)[1], {"sft": "quickstart", "dpo": "toy_sft"}
            arguments += ["--run-dir", f"{tmp_path}/toy_{stage}", *small]
            arguments += ["--set", f"init_from={tmp_path}/{before[stage]}"]
        else:
            arguments = [argument.replace("runs/", f"{tmp_path}/") for argument in arguments]
        assert _run(arguments, deadline_s=120).strip()
    last = json.loads((tmp_path / "toy_dpo" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"accuracy", "val_accuracy", "reward_margin", "val_pretraining_loss"} <= last.keys()
    assert (tmp_path / "toy_dpo" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that the README's first command leaves, for copies."""
    folder = tmp_path_factory.mktemp("quickstart")
    _run(_small_run(f"{sys.executable} ds_gpt/train.py", folder), deadline_s=120)
    return folder / "run"


@pytest.mark.parametrize("command", [command for command in OTHERS if "python -m benchmarks" not in command])
def test_other_commands_run(command: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if "runs/quickstart" in command:
        shutil.copytree(request.getfixturevalue("quickstart"), tmp_path / "run")
        if command.startswith("ds-gpt import"):  # what the export before it leaves
            _run(["ds-gpt", "export", str(tmp_path / "run"), "--output", str(tmp_path / "run" / "hf")], deadline_s=60)
        command = command.replace("runs/quickstart", str(tmp_path / "run")).replace("runs/imported", str(tmp_path / "imported"))
    command = command.replace("shards/", f"{tmp_path}/")
    assert _run(shlex.split(command), deadline_s=60).strip()


def test_benchmark_commands_run(tmp_path: Path) -> None:
    commands = [command for command in OTHERS if "python -m benchmarks" in command and command.split()[-1] != "planner"]
    quick = {"overhead": "--rounds 1 --steps 20 --quick", "convergence": "--steps 20 --corpus python_docs", "checkpoints": "--quick --saves 1", "generation": "--rounds 1 --tokens 8"}
    assert {command.split()[-1] for command in commands} == set(quick)
    for command in commands:
        case = command.split()[-1]
        _run(shlex.split(f"{command} {quick[case]} --records {tmp_path}"), deadline_s=240)
        assert json.loads((tmp_path / f"{case}.json").read_text())["measured"]


def test_the_planner_is_checked_by_its_command() -> None:
    assert "# Left out" in _run(shlex.split("python -m benchmarks planner"), deadline_s=120)
    assert "python -m benchmarks planner" in OTHERS


def test_tables_and_map_are_up_to_date() -> None:
    from benchmarks.readme import PACKAGES, filled

    assert filled(README) == README, "run: python -m benchmarks readme"
    assert set(PACKAGES) == {path.parent.name for path in (REPOSITORY / "ds_gpt").glob("*/__init__.py")}


def test_every_shipped_config_is_named_in_the_readme() -> None:
    for recipe in (REPOSITORY / "ds_configs" / "runs").glob("*.yaml"):
        assert f"`{recipe.name}`" in README


def test_every_record_tells_how_to_repeat_it() -> None:
    for path in (REPOSITORY / "benchmarks" / "records").glob("*.json"):
        record = json.loads(path.read_text())
        assert record["command"].startswith("python -m benchmarks") and record["versions"] and record["measured"], path
