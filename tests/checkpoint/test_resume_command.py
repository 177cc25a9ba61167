"""``--resume``: which run it goes on with, what it refuses, what it names, and what it leaves in the folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked_ranks import run_ranks
from launches import Launched, in_folder, launch, options
from made import contents

from ds_gpt.checkpoint.folder import complete, step_of

REPOSITORY = Path(__file__).resolve().parents[2]
RUN, SECOND, THIRD = Path("runs/quickstart"), Path("runs/quickstart-2"), Path("runs/quickstart-3")


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def shown_in_tensorboard(run: Path) -> dict[str, list[int]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [event.step for event in found.Scalars(tag)] for tag in ("train/loss", "validation/loss")}


def checkpoints(run: Path) -> list[int]:
    return [step_of(path) for path in complete(run / "checkpoints")]


def which_run() -> dict[str, Any]:
    """Without a path, with a run's, and with a checkpoint's."""
    told: dict[str, Any] = {"nothing to resume": launch("--resume", "training.steps=4")}
    told["finished"] = launch("--resume", "training.steps=6")
    told["6 steps"] = {"steps": steps_of(RUN), "tensorboard": shown_in_tensorboard(RUN), "checkpoints": checkpoints(RUN)}
    told["history"] = {path.name: path.read_text() for path in (RUN / "history" / "until_step_0000004").iterdir()}
    launch("training.steps=2")
    told["the second is newer"] = launch("--resume", "training.steps=3")
    told["second"] = (steps_of(SECOND), steps_of(RUN))
    told["by its folder"] = launch("--resume", str(RUN), "training.steps=8")
    told["8 steps"] = (steps_of(RUN), checkpoints(RUN))
    before = contents(RUN)
    told["branch"] = launch("--resume", f"{RUN}/checkpoints/step_0000006", "training.steps=7")
    told["old run"] = (contents(RUN) == before, (steps_of(THIRD), checkpoints(THIRD)))
    files = {name: text for name, text in contents(RUN).items() if "checkpoints/" in name or name == "metrics.jsonl"}
    told["already finished"] = launch("--resume", str(RUN), "training.steps=8")
    told["shorter than it is"] = launch("--resume", str(RUN), "training.steps=3")
    told["as it was"] = files == {name: text for name, text in contents(RUN).items() if name in files}
    told["in a chosen folder"] = [launch("--resume", "--run-dir", "mine", f"training.steps={steps}") for steps in (1, 2)]
    told["chosen"] = steps_of(Path("mine"))
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(1, in_folder, tmp_path_factory.mktemp("which") / "folder", which_run)[0]


def test_every_launch_is_accepted(told: dict[str, Any]) -> None:
    launches = {name: value for name, value in told.items() if isinstance(value, Launched)}
    assert {name: launched.error for name, launched in launches.items()} == dict.fromkeys(launches, "")
    assert all(launched.error == "" for launched in told["in a chosen folder"])


def test_alone_it_starts_a_run_or_goes_on_with_the_newest(told: dict[str, Any]) -> None:
    assert "resumed from" not in told["nothing to resume"].out and f"run folder  {RUN}\n" in told["nothing to resume"].out
    assert f"resumed from {RUN}/checkpoints/step_0000004 at step 4\n" in told["finished"].out
    assert f"resumed from {SECOND}/checkpoints/step_0000002 at step 2\n" in told["the second is newer"].out
    assert told["second"] == ([1, 2, 3], [1, 2, 3, 4, 5, 6])


def test_a_run_goes_on_in_its_folder(told: dict[str, Any]) -> None:
    assert told["6 steps"]["steps"] == [1, 2, 3, 4, 5, 6]
    assert told["6 steps"]["tensorboard"] == {"train/loss": [1, 2, 3, 4, 5, 6], "validation/loss": [2, 4, 6]}
    assert f"resumed from {RUN}/checkpoints/step_0000006 at step 6\n" in told["by its folder"].out
    assert told["8 steps"][0] == list(range(1, 9)) and told["8 steps"][1][0] == 8
    first, second = told["in a chosen folder"]
    assert "resumed from" not in first.out and "resumed from mine/checkpoints/step_0000001 at step 1\n" in second.out
    assert told["chosen"] == [1, 2]


def test_history_keeps_what_was_there(told: dict[str, Any]) -> None:
    history = told["history"]
    assert history.keys() == {"run.yaml", "deepspeed.json", "deepspeed_config.json", "environment.json", "tokenizer.json", "metrics.jsonl"}
    assert yaml.safe_load(history["run.yaml"])["training"]["steps"] == 4
    assert [json.loads(line)["step"] for line in history["metrics.jsonl"].splitlines()] == [1, 2, 3, 4]


def test_a_checkpoint_branches_into_a_new_run(told: dict[str, Any]) -> None:
    assert f"run folder  {THIRD}\n" in told["branch"].out
    assert f"resumed from {RUN}/checkpoints/step_0000006 at step 6\n" in told["branch"].out
    untouched, branch = told["old run"]
    assert untouched and branch == ([7], [7])


def test_a_run_that_is_done_stays_as_it_is(told: dict[str, Any]) -> None:
    assert told["already finished"].changes == []
    assert told["shorter than it is"].changes == ["training.steps"]
    assert told["as it was"]


def test_what_changed_is_named_field_by_field(told: dict[str, Any]) -> None:
    assert "changed since it was saved: training.steps: 4 when saved, 6 now\n" in told["finished"].out
    assert told["finished"].changes == ["training.steps"]


def refusals() -> dict[str, Any]:
    """What is refused, and whether a refusal leaves anything behind; and what is only named."""
    launch("--run-dir", str(RUN), "training.steps=2")
    Path("full").mkdir()
    Path("full/environment.json").write_text("mine")
    by_name = f"{RUN}/checkpoints/step_0000002"
    before = contents(Path("."))
    told: dict[str, Any] = {
        "nowhere": launch("--resume", "nowhere"),
        "not a run": launch("--resume", "runs"),
        "the checkpoints": launch("--resume", f"{RUN}/checkpoints"),
        "another run-dir": launch("--resume", str(RUN), "--run-dir", "other"),
        "a full run-dir": launch("--resume", "--run-dir", "full"),
        "a branch into a used one": launch("--resume", by_name, "--run-dir", str(RUN)),
        "shape": launch("--resume", str(RUN), "model.width=32", "model.layers=2"),
        "shape of a branch": launch("--resume", by_name, "model.context=8"),
        "tokenizer": launch("--resume", str(RUN), "data.corpus=digits.txt"),
        "altered weights": launch("--resume", str(RUN), "training.steps=3", alter=1.5),
    }
    shard = Path(by_name, "rank_00000.safetensors")
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    told["damaged"] = launch("--resume", by_name)
    shard.write_bytes(content)
    after = contents(Path("."))
    told["left"] = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name) and not name.startswith("cache/"))
    changes = ("optimizer.weight_decay=0.2", "optimizer.betas=[0.9,0.99]", "batch.global_batch_size=8", "gradient_clipping=0.5", "zero_optimization.stage=2")
    told["named"] = launch("--resume", by_name, "training.steps=3", *changes)
    told["other text"] = launch("--resume", by_name, "training.steps=3", "data.corpus=anagram.txt")
    told["same text elsewhere"] = launch("--resume", by_name, "training.steps=3", "data.cache_dir=cache2", alter=1.5)
    launch("--run-dir", "sgd", "training.steps=2", "optimizer.name=sgd", "optimizer.lr=0.05")
    told["sgd to adamw"] = launch("--resume", "sgd", "training.steps=3", "optimizer.name=adamw", "optimizer.lr=0.05")
    told["optimizer steps"] = [json.loads((path / "run_state.json").read_text())["optimizer_steps"] for path in complete(Path("sgd/checkpoints"))]
    return told


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(1, in_folder, tmp_path_factory.mktemp("refused") / "folder", refusals)[0]


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("nowhere", ["--resume 'nowhere' is neither the folder of a run nor a checkpoint"]),
        ("not a run", ["--resume 'runs' is neither"]),
        ("the checkpoints", ["is neither", f"'{RUN}/checkpoints/step_0000002' is one"]),
        ("another run-dir", ["--run-dir 'other' is not the run to resume"]),
        ("a full run-dir", ["--run-dir 'full' is not empty"]),
        ("a branch into a used one", [f"--run-dir '{RUN}' is not empty"]),
        ("shape", ["model.width is 32, but the checkpoint", "was saved with 16", "model.layers is 2", "model.ffn_width is 128"]),
        ("shape of a branch", ["model.context is 8, but the checkpoint"]),
        ("tokenizer", ["tokenizer_identity is ", "its token ids mean other text"]),
        ("damaged", [f"checkpoint '{RUN}/checkpoints/step_0000002' is damaged: rank_00000.safetensors has "]),
    ],
)
def test_what_cannot_be_resumed_is_refused_with_the_reason(name: str, texts: list[str], refused: dict[str, Any]) -> None:
    for text in texts:
        assert text in refused[name].error


def test_a_refusal_leaves_nothing_behind(refused: dict[str, Any]) -> None:
    assert refused["left"] == []


def test_weights_that_are_not_the_saved_ones_are_refused_with_both_losses(refused: dict[str, Any]) -> None:
    for name in ("altered weights", "same text elsewhere"):
        first = refused[name].error.splitlines()[0]
        assert "after loading" in first
        after, before = (float(words.split()[-1].rstrip(";.")) for words in (first.split("; when")[0], first))
        assert before > 2.5 and abs(after - before) > 0.01, first


def test_other_changes_are_named_one_by_one(refused: dict[str, Any]) -> None:
    assert refused["named"].error == ""
    named = set(refused["named"].changes)
    assert named >= {"optimizer.weight_decay", "optimizer.betas", "batch.global_batch_size", "deepspeed.gradient_clipping", "deepspeed.zero_optimization.stage", "training.steps"}
    assert all(key.startswith(("deepspeed.", "optimizer.", "batch.", "training.steps")) for key in named)
    assert "changed since it was saved: optimizer.weight_decay: 0.1 when saved, 0.2 now\n" in refused["named"].out


def test_another_text_is_warned_of(refused: dict[str, Any]) -> None:
    assert refused["other text"].error == ""
    assert set(refused["other text"].changes) == {"training.steps", "data.corpus", "dataset_digest"}


def test_moments_that_were_not_saved_start_at_zero_and_that_is_said(refused: dict[str, Any]) -> None:
    launched = refused["sgd to adamw"]
    assert launched.error == ""
    assert "step_0000002 has no exp_avg: it starts at zero\n" in launched.out and "has no exp_avg_sq: it starts at zero\n" in launched.out
    assert refused["optimizer steps"] == [1, 0], "Adam's bias correction begins anew with them"


def begin() -> None:
    launch("--resume", "training.steps=2")


def test_two_ranks_of_the_launcher_go_on_with_the_run_of_one(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    run_ranks(1, in_folder, folder, begin)
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    command = [sys.executable, launcher, "--num_gpus", "2", str(REPOSITORY / "ds_gpt" / "train.py"), *options("--resume", "training.steps=4")]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"resumed from {RUN}/checkpoints/step_0000002 at step 2" in ended.stdout
    assert "changed since it was saved: world_size: 1 when saved, 2 now\n" in ended.stdout
    assert steps_of(folder / RUN) == [1, 2, 3, 4] and checkpoints(folder / RUN) == [4, 2]


def losses_of(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def zero3_with_selective_checkpointing() -> tuple[list[str], list[float], list[float]]:
    """Losses of a run that never stopped and of one that did."""
    words = ("zero_optimization.stage=3", "activation_checkpointing.policy=selective", "model.layers=2")
    ended = [launch(*words, "training.steps=4"), launch(*words, "training.steps=2"), launch("--resume", str(SECOND), *words, "training.steps=4")]
    return [launched.error for launched in ended], losses_of(RUN), losses_of(SECOND)


def test_zero3_resumes_where_selective_checkpointing_recomputes(tmp_path: Path) -> None:
    """The evaluation that follows the loading leaves ZeRO-3's parameters as no step does."""
    errors, never_stopped, resumed = run_ranks(1, in_folder, tmp_path / "folder", zero3_with_selective_checkpointing)[0]
    assert errors == ["", "", ""] and len(resumed) == 4
    assert resumed == never_stopped
