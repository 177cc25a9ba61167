"""A run that hangs ends by itself and says where every rank stood; one that is only slow goes on."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forked_ranks import Job, run_ranks
from torch import nn

from ds_gpt.trainer.watchdog import Watchdog

for _folder in ("checkpoint", "commands"):
    sys.path.append(str(Path(__file__).parents[1] / _folder))
from jobs import DEEPSPEED, TRAIN, Ended, started  # noqa: E402
from running import train_run  # noqa: E402

SHORT = ["training.steps=4", "evaluation.every=2", "evaluation.sequences=16"]
TIMEOUT_S = 3.0


def hangs(ranks: Any, folder: Path, how: str, deepspeed: str, degrees: list[str]) -> None:
    """Rank 1 hangs when it reads the batch of the third step; each rank's stderr goes to a file."""
    from ds_gpt.data.loader import BatchLoader

    descriptor = os.open(folder / f"stderr.{ranks.rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 2)
    prepare = BatchLoader._prepare

    def prepare_or_hang(self: BatchLoader, step: int) -> Any:
        if step == 2 and ranks.rank == 1:
            time.sleep(600) if how == "asleep" else ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the GIL
        return prepare(self, step)

    BatchLoader._prepare = prepare_or_hang  # type: ignore[method-assign]
    train_run(ranks, str(folder / "run"), deepspeed, [*SHORT, *degrees, f"health.hang_timeout_s={TIMEOUT_S}"])


def ended(folder: Path, how: str, deepspeed: str = "zero2", degrees: Sequence[str] = ()) -> tuple[list[int | None], list[str], float]:
    """Exit codes, stderr, and seconds until both ranks were gone."""
    folder.mkdir()
    with Job(2, hangs, folder, how, deepspeed, list(degrees)) as job:
        while not (folder / "run" / "metrics.jsonl").exists():
            time.sleep(0.05)
        start = time.monotonic()
        for process in job.processes:
            process.join(timeout=40)
        seconds = time.monotonic() - start
        return [process.exitcode for process in job.processes], [(folder / f"stderr.{rank}").read_text() for rank in range(2)], seconds


def test_a_hang_in_the_loader_of_one_rank(tmp_path: Path) -> None:
    codes, said, seconds = ended(tmp_path / "asleep", "asleep")
    assert codes == [1, 1] and seconds < TIMEOUT_S + 10
    stacks = [(tmp_path / "asleep" / "run" / "stacks" / f"rank_0000{rank}.txt").read_text() for rank in range(2)]
    assert "prepare_or_hang" in stacks[1] and "prepare_or_hang" not in stacks[0]
    assert "in train" in stacks[0] and "all_reduce" in stacks[0], "the other waits for it in a collective"
    for rank in range(2):
        (line,) = [line for line in said[rank].splitlines() if line.startswith("ds_gpt: ")]
        assert f"rank {rank}: nothing finished in 3 s (health.hang_timeout_s)" in line and f"stacks/rank_0000{rank}.txt" in line


def test_a_stage_of_a_pipeline_that_hangs(tmp_path: Path) -> None:
    """The first stage waits for the gradients of its last micro-batch, not in a collective."""
    codes, _, seconds = ended(tmp_path / "staged", "asleep", "zero1", ["parallel.pipeline=2"])
    assert codes == [1, 1] and seconds < TIMEOUT_S + 10
    stacks = [(tmp_path / "staged" / "run" / "stacks" / f"rank_0000{rank}.txt").read_text() for rank in range(2)]
    assert "prepare_or_hang" in stacks[1] and "train_batch" in stacks[0] and "prepare_or_hang" not in stacks[0]


def test_a_rank_that_hangs_with_the_gil_speaks_too(tmp_path: Path) -> None:
    """As in a page fault on a dead network disk: no Python thread of that rank runs, yet it is the one to look at."""
    codes, said, seconds = ended(tmp_path / "gil", "with the GIL")
    assert codes == [1, 1] and seconds < TIMEOUT_S + 15
    assert "prepare_or_hang" in said[1] and "Timeout (" in said[1]
    assert (tmp_path / "gil" / "run" / "stacks" / "rank_00000.txt").exists()


def slow(ranks: Any, folder: Path) -> Any:
    """Every part takes longer than the timeout, none of its passes does; a save takes longer too, and has no passes."""
    from ds_gpt.checkpoint import saver
    from ds_gpt.model.gpt import GPT

    forward, write = GPT.forward, saver.write_shard

    def slow_forward(self: GPT, *args: Any, **options: Any) -> Any:
        time.sleep(0.45)
        return forward(self, *args, **options)

    def slow_write(*args: Any) -> Any:
        time.sleep(2.0)
        return write(*args)

    started_at = time.monotonic()
    time.sleep(1.2)  # preparing data, building an engine: before the watch begins
    GPT.forward, saver.write_shard = slow_forward, slow_write  # type: ignore[method-assign,assignment]
    settings = ["training.steps=2", "evaluation.every=1", "evaluation.sequences=8", "sample.tokens=4", "checkpoints.every=1", "health.hang_timeout_s=1.2"]
    result = train_run(ranks, str(folder), "zero2", [*settings, "batch.micro_batch_size=2", "batch.global_batch_size=16"])
    return result["state"].step, time.monotonic() - started_at


def test_what_is_slow_but_gets_on_is_left_alone(tmp_path: Path) -> None:
    """4 micro-steps of a step, 2 batches of an evaluation and 4 of a probe, 4 tokens: 1 to 2 s each, at a timeout of 1.2 s."""
    for step, seconds in run_ranks(2, slow, tmp_path):
        assert step == 2 and seconds > 8
    assert not (tmp_path / "stacks").exists() and (tmp_path / "sample.txt").exists()


def at_a_dead_disk(folder: Path) -> None:
    model = nn.Identity()
    with (folder / "stderr").open("w") as said, Watchdog(folder, 0, 0.2, model) as watchdog:
        sys.__stderr__ = said
        with watchdog.at_the_disk():
            time.sleep(1)
        (folder / "saved").touch()
        with watchdog.at_the_disk():
            time.sleep(60)


def test_a_disk_has_ten_times_as_long_and_no_longer(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=at_a_dead_disk, args=(tmp_path,))
    process.start()
    process.join(20)
    assert process.exitcode == 1 and (tmp_path / "saved").exists()
    assert "nothing finished in 2 s (at the disk: 10 x health.hang_timeout_s)" in (tmp_path / "stderr").read_text()
    assert "at_a_dead_disk" in (tmp_path / "stacks" / "rank_00000.txt").read_text()


def test_a_timeout_of_ages_is_no_watch(tmp_path: Path) -> None:
    with Watchdog(tmp_path, 0, 1e15, nn.Identity()) as watchdog, watchdog.at_the_disk():
        pass


# Under the real launcher

HANGING_TRAIN = f"""
import sys, time, os
sys.path.insert(0, {str(TRAIN.parents[1])!r})
from ds_gpt.data import loader
prepare = loader.BatchLoader._prepare
def hang(self, step):
    if step == 5 and os.environ["RANK"] == "1":
        time.sleep(600)
    return prepare(self, step)
loader.BatchLoader._prepare = hang
from ds_gpt.commands.train import main
main()
"""
SMALL = (
    "model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "training.steps=1000000", "evaluation.every=1000000", "evaluation.sequences=8",
    "data.corpus=synthetic", "data.synthetic.tokens=20000", "logging.level=DEBUG", "logging.tensorboard=false", "checkpoints.every=null",  # in a save the watchdog waits ten times as long
)  # fmt: skip


def test_under_the_launcher_no_process_is_left_not_even_a_stopped_one(tmp_path: Path) -> None:
    """SIGSTOP: the stopped rank writes no stack, the others say that they wait; the launcher kills it after its 30 s."""
    settings = [word for setting in (*SMALL, "health.hang_timeout_s=6") for word in ("--set", setting)]
    script = tmp_path / "train_hangs.py"
    script.write_text(HANGING_TRAIN)
    command = (*DEEPSPEED, "--num_gpus", 2)
    with (
        started(tmp_path, *command, script, *settings, "--run-dir", tmp_path / "asleep") as asleep,
        started(tmp_path, *command, TRAIN, *settings, "--run-dir", tmp_path / "stopped") as stopped,
    ):
        stopped.wait_for_step(tmp_path / "stopped", 4)
        stopped.ranks()[1].send_signal(signal.SIGSTOP)
        slept: Ended = asleep.wait(60)
        assert slept.status == 1, slept.err
        assert [slept.err.count(f"rank {rank}: nothing finished in 6 s") for rank in range(2)] == [1, 1], slept.err
        assert sorted(path.name for path in (tmp_path / "asleep" / "stacks").iterdir()) == ["rank_00000.txt", "rank_00001.txt"]
        was_stopped = stopped.wait(90)
    assert was_stopped.status == 1, was_stopped.err
    assert was_stopped.err.count("ds_gpt: ") == 1 and "rank 0: nothing finished in 6 s" in was_stopped.err
    assert [path.name for path in (tmp_path / "stopped" / "stacks").iterdir()] == ["rank_00000.txt"]
