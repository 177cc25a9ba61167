"""Training as the README starts it: plainly, under the deepspeed launcher, under torchrun, installed or not."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from jobs import CONFIGS, DEEPSPEED, DS_GPT, PLAIN, REPOSITORY, TORCHRUN, TRAIN, Ended, checkpoint, metrics, ran, started

from ds_gpt.commands.train import parser, settle
from ds_gpt.config import parallel
from ds_gpt.engine.ranks import Ranks


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run)]


def assert_trained(ended: Ended, run: Path, steps: int = 4) -> None:
    assert ended.status == 0, ended.out + ended.err
    assert metrics(run)[-1]["step"] == steps
    assert checkpoint(run) == f"step_{steps:07d}"
    assert (run / "sample.txt").exists()
    assert ended.out.count("saved in") == 1 and ended.out.count("\nsample:\n") == 1, "only rank 0 speaks"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tiny: list[str]) -> tuple[Ended, Path]:
    """One process, `python ds_gpt/train.py`, started somewhere else."""
    folder = tmp_path_factory.mktemp("plain")
    return ran(folder, *PLAIN, TRAIN, *tiny), folder / "runs" / "quickstart"


def test_plain_python(plain: tuple[Ended, Path]) -> None:
    ended, run = plain
    assert_trained(ended, run)
    assert ended.err == ""
    assert "run folder  runs/quickstart\n" in ended.out
    assert {path.name for path in run.iterdir()} >= {"run.yaml", "deepspeed.json", "environment.json", "tokenizer.json", "metrics.jsonl", "tensorboard"}
    assert json.loads((run / "environment.json").read_text())["world_size"] == 1


def test_deepspeed_launcher_on_two_ranks(plain: tuple[Ended, Path], tmp_path: Path, tiny: list[str]) -> None:
    ended = ran(tmp_path, *DEEPSPEED, "--num_gpus", 2, TRAIN, *tiny)
    assert_trained(ended, run := tmp_path / "runs" / "quickstart")
    assert ended.err == ""
    assert "8 a rank x 2 ranks" in ended.out
    assert losses(run) == pytest.approx(losses(plain[1]), rel=1e-5), "the batch is the same, split otherwise"


def test_two_ranks_that_share_each_sequence(plain: tuple[Ended, Path], tmp_path: Path, tiny: list[str]) -> None:
    ended = ran(tmp_path, *DEEPSPEED, "--num_gpus", 2, TRAIN, *tiny, "--set", "parallel.sequence=2")
    assert_trained(ended, run := tmp_path / "runs" / "quickstart")
    assert ended.err == ""
    assert "16 a rank x 1 data rank x 1 accumulation step" in ended.out and "sequence 2: 1 copy of the model" in ended.out
    assert losses(run) == pytest.approx(losses(plain[1]), rel=1e-5)
    assert metrics(run)[-1]["val_loss"] == pytest.approx(metrics(plain[1])[-1]["val_loss"], rel=1e-5)
    assert (run / "sample.txt").read_text() == (plain[1] / "sample.txt").read_text()


def test_a_tensor_parallel_run_goes_on_alone_and_is_used(plain: tuple[Ended, Path], tmp_path: Path, tiny: list[str]) -> None:
    ended = ran(tmp_path, *DEEPSPEED, "--num_gpus", 2, TRAIN, *tiny, "--set", "parallel.tensor=2")
    assert_trained(ended, run := tmp_path / "runs" / "quickstart")
    assert ended.err == ""
    assert "16 a rank x 1 data rank" in ended.out and "tensor 2: 1 copy of the model" in ended.out
    assert losses(run) == pytest.approx(losses(plain[1]), rel=1e-5)
    ended = ran(tmp_path, *PLAIN, TRAIN, "--resume", run, "--set", "training.steps=6", "--set", "parallel.tensor=1")
    assert ended.status == 0 and metrics(run)[-1]["step"] == 6, ended.out + ended.err
    assert "changed since it was saved: parallel.tensor: 2 when saved, 1 now" in ended.out
    ended = ran(tmp_path, *PLAIN, "-m", "ds_gpt", "export", run / "checkpoints" / "step_0000004", PYTHONPATH=str(REPOSITORY))
    assert ended.status == 0, ended.out + ended.err


def test_torchrun_on_two_ranks(plain: tuple[Ended, Path], tmp_path: Path, tiny: list[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ended = ran(tmp_path, *TORCHRUN, "--nproc-per-node", 2, "--master-port", port, TRAIN, *tiny, "--deepspeed_config", CONFIGS / "zero3.json")
    assert_trained(ended, run := tmp_path / "runs" / "quickstart")
    assert "ZeRO stage 3, activation checkpointing full" in ended.out
    assert losses(run) == pytest.approx(losses(plain[1]), rel=1e-5)


def test_the_8_gpu_command_of_the_readme(tmp_path: Path, tiny: list[str]) -> None:
    """Eight ranks, the 1B recipe, ZeRO-2; only the sizes and the corpus are others. Its prompt, "ROMEO:", is no token of this corpus."""
    files = ("--config", "ds_configs/runs/gpt_1b.yaml", "--deepspeed_config", "ds_configs/zero2.json")
    assert " ".join(("deepspeed --num_gpus 8 ds_gpt/train.py", *files)) in (REPOSITORY / "README.md").read_text().splitlines()
    smaller = ("--set", "data.corpus=synthetic", "--set", "data.synthetic.tokens=20000")
    command = (*DEEPSPEED, "--num_gpus", 8, "ds_gpt/train.py", *files, *tiny, *smaller, "--run-dir", tmp_path / "run")
    job_folder = tmp_path / "elsewhere"
    job_folder.mkdir()
    for name in ("ds_gpt", "ds_configs"):  # relative paths, as in the README, without writing into the checkout
        (job_folder / name).symlink_to(REPOSITORY / name)
    ended = ran(job_folder, *command, deadline_s=120)
    assert_trained(ended, tmp_path / "run")
    assert ended.err == ""
    assert "64 sequences = 1,024 tokens: 8 a rank x 8 ranks x 1 accumulation step" in ended.out
    assert "ZeRO stage 2" in ended.out
    # lr 4e-4, times the root of 8 ranks, in the 4th of 1000 steps of warm-up.
    assert metrics(tmp_path / "run")[-1]["lr"] == pytest.approx(4e-4 * 8**0.5 * 4 / 1000)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout of its own, whose ranks say which ``ds_gpt`` they are."""
    folder = tmp_path / "copy"
    for name in ("ds_gpt", "ds_configs"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "ds_gpt" / "commands" / "train.py").open("a") as file:
        file.write('\nprint("this is", __import__("ds_gpt").__file__)\n')
    return folder


@pytest.fixture
def without_ds_gpt(tmp_path: Path) -> dict[str, str]:
    """An environment with every installed package but ds_gpt: links to them, where Python reads no .pth of an editable install."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "ds_gpt" not in path.name:
            (packages / path.name).symlink_to(path)
    return {"PYTHONPATH": str(packages)}


def test_a_checkout_that_is_not_installed(copy: Path, tmp_path: Path, tiny: list[str], without_ds_gpt: dict[str, str]) -> None:
    python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    assert "No module named 'ds_gpt'" in ran(tmp_path, python, "-c", "import ds_gpt", **without_ds_gpt).err
    launcher = (python, "-m", "deepspeed.launcher.runner")  # what the `deepspeed` script calls
    ended = ran(tmp_path, *launcher, "--num_gpus", 2, copy / "ds_gpt" / "train.py", *tiny, **without_ds_gpt)
    assert_trained(ended, tmp_path / "runs" / "quickstart")
    assert ended.out.count(f"this is {copy / 'ds_gpt' / '__init__.py'}\n") == 2


@pytest.mark.parametrize("options", [(), ("-P",)], ids=["", "-P"])
def test_the_checkout_that_is_run_wins_over_the_installed_one(copy: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    ended = ran(tmp_path, *PLAIN, *options, copy / "ds_gpt" / "train.py", "--help")
    assert ended.status == 0 and f"this is {copy / 'ds_gpt' / '__init__.py'}\n" in ended.out


def test_two_jobs_at_once(tmp_path: Path, endless: list[str]) -> None:
    """The same command twice, same port, same folder: each gets its run folder, and neither meets the other's ranks.

    Then a rank of the second is killed, which ends that job; and the first, asked to stop, saves.
    """
    command = (*DEEPSPEED, "--num_gpus", 2, TRAIN, *endless)
    with started(tmp_path, *command) as first, started(tmp_path, *command) as second:
        runs = [tmp_path / "runs" / "quickstart", tmp_path / "runs" / "quickstart-2"]
        for run in runs:
            first.wait_for_step(run, 3)
        mine = runs[0] if "run folder  runs/quickstart\n" in first.out else runs[1]
        second.ranks()[1].kill()
        ended = second.wait(20)
        assert ended.status not in (0, None), ended.out + ended.err

        before = metrics(mine)[-1]["step"]
        first.wait_for_step(mine, before + 3)
        for rank in first.ranks():
            rank.terminate()
        ended = first.wait(20)
        assert ended.status == 0, ended.out + ended.err
        assert "as asked to stop" in ended.out and ended.err == ""
        assert checkpoint(mine) == f"step_{metrics(mine)[-1]['step']:07d}"


def test_console_script_trains_too(tmp_path: Path, tiny: list[str]) -> None:
    ended = ran(tmp_path, *DS_GPT, "train", *tiny, "--set", "training.steps=1", "--run-dir", tmp_path / "mine")
    assert_trained(ended, tmp_path / "mine", steps=1)


def test_the_summary_says_that_matrices_are_shared_over_the_network(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parallel.COMBINATIONS, frozenset({"tensor"}), (0, 1, 2))
    options = parser().parse_args([*tiny, "--set", "parallel.tensor=2"])
    for local, said in ((2, False), (1, True)):
        composed, *_ = settle(options, Ranks(0, 4, 0, local, torch.device("cpu")))
        notes = [note for note in composed.notes if "share matrices (tensor 2) and are not on one node" in note]
        assert bool(notes) == said, composed.notes
