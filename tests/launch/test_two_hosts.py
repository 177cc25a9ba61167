"""Runs on two hosts: one of which is lost, and the other does not wait for ever and goes on alone; and over ssh."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Host, two_hosts
from sshd import reached_over_ssh

sys.path.append(str(Path(__file__).parents[1] / "commands"))
from jobs import PLAIN, REPOSITORY, TORCHRUN, TRAIN, Job, checkpoint, metrics, ran, started  # noqa: E402

PORT = 29555
HANG_S = 4.0
ENDS_S = 6.0  # that torchrun takes to end behind its rank, on a busy machine
EVERY, STEPS = 15, 50
SETTINGS = (
    "model.layers=2", "model.width=64", "model.heads=2", "model.context=128", "batch.global_batch_size=16", f"training.steps={STEPS}",
    "schedule.warmup_steps=4", "evaluation.every=1000000", "evaluation.sequences=8", "sample.tokens=2", "data.corpus=synthetic",
    "data.synthetic.tokens=20000", "logging.level=DEBUG", "logging.tensorboard=false", f"checkpoints.every={EVERY}", f"health.hang_timeout_s={HANG_S}",
)  # fmt: skip
ARGUMENTS = [word for setting in SETTINGS for word in ("--set", setting)]
FP32_TOLERANCE = 1e-5  # sums in another order, as in tests/parity


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@contextlib.contextmanager
def on_both(hosts: tuple[Host, Host], folder: Path, *more: object) -> Iterator[tuple[Job, Job]]:
    """The run in `folder`, by a torchrun on each host."""
    place = ["--nnodes", 2, "--nproc-per-node", 1, "--master-addr", hosts[0].name, "--master-port", PORT]
    with contextlib.ExitStack() as stack:
        jobs = []
        for number, host in enumerate(hosts):
            words = host.words(*TORCHRUN, *place, "--node-rank", number, TRAIN, *ARGUMENTS, "--run-dir", folder / "run", *more)
            jobs.append(stack.enter_context(started(folder, *words, GLOO_SOCKET_IFNAME=host.interface)))
        yield jobs[0], jobs[1]


def wait_until_saved(job: Job, run: Path, after: int) -> None:
    """Wait for the first checkpoint of more than `after` steps, and until nothing is being saved any more."""
    due = after + EVERY
    job.wait_for_step(run, due)
    end = time.monotonic() + 30
    while step_of(run) < due:
        assert time.monotonic() < end, job.err
        time.sleep(0.02)
    job.wait_for_step(run, metrics(run)[-1]["step"] + 2)


def step_of(run: Path) -> int:
    """Of the latest checkpoint; 0 where there is none."""
    return int(checkpoint(run).removeprefix("step_")) if (run / "checkpoints" / "latest").exists() else 0


def test_a_host_dies_then_the_network_then_one_goes_on_alone(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with on_both(hosts, tmp_path) as (first, second):
        wait_until_saved(first, run, 0)
        start = time.monotonic()
        first.kill()  # with it dies rank 0, and where the ranks met
        ended = second.wait(60)
        seconds = time.monotonic() - start
    assert ended.status == 1 and seconds < HANG_S + ENDS_S, (seconds, ended)
    said, _, by_torchrun = ended.err.partition("torch.distributed.elastic.multiprocessing.errors.ChildFailedError")
    lost = "rank 1: ds_gpt: on host1: the connection to another rank is lost: "
    assert said.count(lost) == by_torchrun.count(lost) == 1, ended.err
    assert hosts[0].address in ended.err and "--resume" in ended.err and "failure.py" not in ended.err, ended.err
    kept = step_of(run)

    with on_both(hosts, tmp_path, "--resume") as (first, second):
        wait_until_saved(first, run, kept)
        start = time.monotonic()
        hosts[0].pull_the_cable()  # no packet tells the others
        ends = [job.wait(60) for job in (second, first)]
        seconds = time.monotonic() - start
    assert [ended.status for ended in ends] == [1, 1] and HANG_S < seconds < HANG_S + 2 + ENDS_S, (seconds, ends)
    for rank, ended in enumerate(reversed(ends)):
        assert f"rank {rank}: nothing finished in 4 s (health.hang_timeout_s) on host{rank}" in ended.err, ended.err
    assert kept + EVERY == step_of(run)

    newest = checkpoint(run)
    with started(tmp_path, *hosts[0].words(*PLAIN, TRAIN, *ARGUMENTS, "--run-dir", tmp_path / "whole")) as whole:
        alone = ran(tmp_path, *hosts[1].words(*PLAIN, TRAIN, *ARGUMENTS, "--run-dir", run, "--resume"))
        never_stopped = whole.wait(60)
    assert alone.status == 0 and f"resumed from {run / 'checkpoints' / newest}" in alone.out, alone.err
    assert never_stopped.status == 0, never_stopped.err
    found, expected = metrics(run), metrics(tmp_path / "whole")
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm"):
        worst = max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(found, expected, strict=True))
        assert worst < FP32_TOLERANCE, (key, worst)


def test_over_ssh(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """launch/multi_node.sh with the real pdsh, ssh and sshd: the doctor, then training, then SIGTERM."""
    hostfile, run = tmp_path / "hostfile", tmp_path / "run"
    hostfile.write_text("".join(f"{host.name} slots=1\n" for host in hosts))
    script = ["bash", REPOSITORY / "launch" / "multi_node.sh", "--hostfile", hostfile, "--interface", hosts[0].interface, "--doctor"]
    with reached_over_ssh(hosts, tmp_path) as commands:
        path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        with started(tmp_path, *hosts[0].words(*script, *ARGUMENTS, "--run-dir", run), PATH=path) as job:
            wait_until_saved(job, run, 0)
            os.kill(job.process.pid, signal.SIGTERM)
            ended = job.wait(60)
    assert "host0: ok       nodes            2: host0, host1, 1 rank each" in ended.out, ended.out
    assert "GLOO_SOCKET_IFNAME = 'wire': wire" in ended.out, "the environment arrived"
    assert "host0: no problems, no warnings" in ended.out and "host0: run folder  " in ended.out
    assert step_of(run) == metrics(run)[-1]["step"] < STEPS, "saved where it was stopped"
