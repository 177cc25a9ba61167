"""Ctrl-C and SIGTERM: the step is finished, the run saved, every process gone."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest
from jobs import DEEPSPEED, PLAIN, TORCHRUN, TRAIN, Ended, checkpoint, metrics, started


def assert_saved(ended: Ended, run: Path) -> None:
    """The last step that was logged is the one that was saved, and it was evaluated."""
    last = metrics(run)[-1]
    assert checkpoint(run) == f"step_{last['step']:07d}" and "val_loss" not in last
    assert ended.out.count("as asked to stop") == 1
    assert "sample:" not in ended.out
    assert "Traceback" not in ended.out


def test_ctrl_c_and_sigterm_on_one_process(tmp_path: Path, endless: list[str]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        run = tmp_path / number.name
        with started(tmp_path, *PLAIN, TRAIN, *endless, "--run-dir", run) as job:
            job.wait_for_step(run, 3)
            job.interrupt(number)
            ended = job.wait(20)
        assert ended.status == 0, ended.out + ended.err
        assert ended.err == ""
        assert_saved(ended, run)


def test_a_terminal_that_is_closed(tmp_path: Path, endless: list[str]) -> None:
    """As where a connection breaks: nobody reads the output any more, and SIGHUP comes."""
    run = tmp_path / "run"
    with started(tmp_path, "bash", "-c", f'exec "$@" > >(head -n 1 >"{tmp_path}/first")', "bash", *PLAIN, TRAIN, *endless, "--run-dir", run) as job:
        job.wait_for_step(run, 30)  # its lines would have ended it long before
        job.interrupt(signal.SIGHUP)
        ended = job.wait(20)
    assert ended.status == 0 and ended.err == ""
    assert (tmp_path / "first").read_text().startswith("model ")
    assert checkpoint(run) == f"step_{metrics(run)[-1]['step']:07d}"


@pytest.mark.parametrize(
    ("launcher", "number"),
    [((*DEEPSPEED, "--num_gpus", 2), signal.SIGINT), ((*DEEPSPEED, "--num_gpus", 2), signal.SIGTERM), ((*TORCHRUN, "--nproc-per-node", 2), signal.SIGINT)],
    ids=["Ctrl-C under deepspeed", "SIGTERM under deepspeed", "Ctrl-C under torchrun"],
)
def test_a_signal_to_all_processes_of_a_job(launcher: tuple[str | int, ...], number: signal.Signals, tmp_path: Path, endless: list[str]) -> None:
    """Ctrl-C in a terminal; what Slurm sends. DeepSpeed's launcher sends the ranks what they have already: no second request."""
    run = tmp_path / "run"
    with started(tmp_path, *launcher, TRAIN, *endless, "--run-dir", run) as job:
        job.wait_for_step(run, 3)
        ranks = job.ranks()
        assert len(ranks) == 2
        job.interrupt(number)
        ended = job.wait(30)
    assert_saved(ended, run)
    # torchrun's ranks are in sessions of their own and get it from torchrun alone.
    # Whatever the ranks return: both launchers end on a signal with 1, or by the signal itself.
    assert ended.status in (1, -number)
    assert not any(rank.is_running() for rank in ranks)


def test_a_signal_before_training_leaves_nothing(tmp_path: Path, endless: list[str]) -> None:
    with started(tmp_path, *PLAIN, TRAIN, *endless) as job:
        job.interrupt()
        ended = job.wait(20)
    assert ended.status != 0
    assert not (tmp_path / "runs").exists()


def test_also_where_its_launcher_does_not_hear_it(tmp_path: Path, endless: list[str]) -> None:
    """launch/slurm.sbatch starts torchrun without SIGINT, and so the ranks: the signal would be lost until they train."""
    with started(tmp_path, "bash", "-c", 'trap "" INT; exec "$@"', "bash", *PLAIN, TRAIN, *endless) as job:
        while not psutil.Process(job.process.pid).name().startswith("python"):
            time.sleep(0.01)
        end = time.monotonic() + 20
        while job.process.poll() is None and time.monotonic() < end:
            job.interrupt()
            time.sleep(0.2)
        ended = job.wait(1)
    assert ended.status != 0
    assert not (tmp_path / "runs").exists()
