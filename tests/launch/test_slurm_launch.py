"""launch/slurm.sbatch: what it asks srun for, in and out of Slurm, and how a job that runs out of time saves."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch_scripts import LAUNCH, REPOSITORY, StandIn, wait_until, words_of

SCRIPT = LAUNCH / "slurm.sbatch"
TRAIN = str(REPOSITORY / "ds_gpt" / "train.py")


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


@pytest.fixture
def slurm(stand_in: StandIn) -> StandIn:
    """A job of three nodes with four GPUs each."""
    hosts = '[[ "$*" != "show hostnames gpu[07-09]" ]] || printf "gpu07\\ngpu08\\ngpu09\\n"'
    stand_in.command("scontrol", f'{hosts}; [[ "$1" != requeue ]] || echo "$2" >"$STAND_IN/requeued"')
    job = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "gpu[07-09]", "SLURM_JOB_NUM_NODES": "3", "SLURM_GPUS_PER_NODE": "a100:4"}
    stand_in.environment.update(job)
    return stand_in


def test_outside_of_slurm_a_dry_run_shows_the_header(stand_in: StandIn) -> None:
    words = stand_in.dry_run("slurm.sbatch", "--config", "a b.yaml")
    assert words[0] == "srun" and "exec torchrun --node_rank \"$SLURM_NODEID\"" in " ".join(words)
    assert (option(words, "--nnodes"), option(words, "--nproc_per_node"), option(words, "--master_addr")) == ("2", "8", "node1")
    assert words[words.index(TRAIN) + 1 :] == ["--run-dir", "runs/ds_gpt-0", "--config", "a b.yaml"]


def test_in_a_job_the_first_node_is_the_meeting_point(slurm: StandIn) -> None:
    words = slurm.dry_run("slurm.sbatch")
    assert (option(words, "--nnodes"), option(words, "--nproc_per_node")) == ("3", "4")
    assert (option(words, "--master_addr"), option(words, "--master_port")) == ("gpu07", "23456")
    assert option(slurm.dry_run("slurm.sbatch", MASTER_PORT="31000"), "--master_port") == "31000"
    assert "--cpus-per-task" not in words
    assert option(slurm.dry_run("slurm.sbatch", SLURM_CPUS_PER_TASK="64"), "--cpus-per-task") == "64"


@pytest.mark.parametrize(
    ("arguments", "restarts", "expected"),
    [
        ([], "0", ["--run-dir", "runs/mine-123456"]),
        ([], "1", ["--run-dir", "runs/mine-123456", "--resume"]),
        (["--run-dir", "x"], "0", ["--run-dir", "x"]),
        (["--run-dir=x"], "2", ["--run-dir=x", "--resume"]),
        (["--resume", "x"], "0", ["--resume", "x"]),
        (["--resume=x"], "1", ["--resume=x"]),
    ],
)
def test_a_job_that_is_queued_again_goes_on_in_its_folder(slurm: StandIn, arguments: list[str], restarts: str, expected: list[str]) -> None:
    words = slurm.dry_run("slurm.sbatch", *arguments, SLURM_JOB_NAME="mine", SLURM_RESTART_COUNT=restarts)
    assert words[words.index(TRAIN) + 1 :] == expected


def test_options_of_the_script_may_stand_anywhere(slurm: StandIn) -> None:
    result = slurm.run("slurm.sbatch", "--config", "c.yaml", "--requeue", "--set", "x=1", "--run-dir", "x", "--doctor=only", "--dry-run", "--", "--requeue")
    words = words_of(result.stdout)
    assert words[words.index("doctor") + 1 :] == ["--config", "c.yaml", "--set", "x=1", "--run-dir", "x", "--requeue"]


def test_outside_of_slurm_it_says_what_to_do(stand_in: StandIn) -> None:
    result = stand_in.run("slurm.sbatch")
    assert result.returncode == 2 and "this is not a Slurm job" in result.stderr and "sbatch launch/slurm.sbatch" in result.stderr


def test_a_job_without_nodes_is_an_error(slurm: StandIn) -> None:
    slurm.command("scontrol", "true")
    result = slurm.run("slurm.sbatch", "--dry-run")
    assert result.returncode == 2 and "scontrol names no node of 'gpu[07-09]'" in result.stderr


def test_slurms_copy_finds_the_repository(slurm: StandIn, tmp_path: Path) -> None:
    """slurmd runs /var/spool/slurmd/job.../slurm_script, far from ds_gpt/train.py."""
    spool = tmp_path / "spool" / "slurm_script"
    spool.parent.mkdir()
    shutil.copy(SCRIPT, spool)
    environment = {**slurm.environment, "SLURM_SUBMIT_DIR": str(REPOSITORY)}
    arguments = ["bash", str(spool), "--dry-run"]
    assert TRAIN in subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True).stdout
    lost = subprocess.run(arguments, env={**environment, "SLURM_SUBMIT_DIR": "/"}, capture_output=True, text=True, check=False)
    assert lost.returncode == 2 and "call sbatch in the repository" in lost.stderr


def test_the_header_asks_for_one_torchrun_per_node_and_a_warning() -> None:
    header = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", SCRIPT.read_text(), flags=re.MULTILINE))
    assert header["ntasks-per-node"] == "1" and header["nodes"] == "2" and header["gpus-per-node"] == "8"
    assert "requeue" in header and header["open-mode"] == "append"
    assert header["signal"] == "B:TERM@600"  # to the batch shell alone, ten minutes before the end
    text = SCRIPT.read_text()
    assert text.rindex("#SBATCH") < text.index("set -euo pipefail")  # Slurm stops reading at the first command


RANK = '''
import os, signal, sys, time
path, seen = f"{os.environ['STAND_IN']}/rank.{os.environ['RANK']}", []
def note(text):
    with open(path, "a") as file: print(text, file=file)
def handle(number, frame): note(signal.Signals(number).name); seen.append(number)
signal.signal(signal.SIGINT, handle); signal.signal(signal.SIGTERM, handle)
with open(f"{os.environ['STAND_IN']}/pids", "a") as file: print(os.getpid(), file=file)
note("started")
end = time.monotonic() + 60
while not seen and time.monotonic() < end: time.sleep(0.05)
time.sleep(1); note("saved")
'''


@pytest.fixture
def job(slurm: StandIn, tmp_path: Path) -> Path:
    """The script beside ranks that wait, to run with the real torchrun under stand-ins for srun and scancel, which signals
    every process of the step as Slurm does."""
    (tmp_path / "ds_gpt").mkdir()
    (tmp_path / "ds_gpt" / "train.py").write_text(RANK)
    shutil.copytree(LAUNCH, tmp_path / "launch")
    # One node that is this machine, met at a loopback address.
    slurm.command("scontrol", '[[ "$1" == requeue ]] && echo "$2" >"$STAND_IN/requeued"; echo 127.0.0.1')
    torchrun = Path(sys.executable).with_name("torchrun")
    slurm.command("torchrun", f'echo $$ >>"$STAND_IN/pids"; exec {torchrun} "$@"')
    # Slurm starts a step with every signal at its default; bash, here its parent, starts background jobs without SIGINT.
    slurm.command("srun", 'while [[ $1 == --* ]]; do shift; done; SLURM_NODEID=0 exec env --default-signal=INT "$@"')
    slurm.command("scancel", f'echo "$*" >"$STAND_IN/scancel"; exec {sys.executable} "$STAND_IN/signal_step.py"')
    # Everything that the batch script started, but not this stand-in for scancel, which it started too.
    (tmp_path / "signal_step.py").write_text(
        "import os, signal\nfor pid in open(os.environ['STAND_IN'] + '/pids').read().split():\n    os.kill(int(pid), signal.SIGINT)\n"
    )
    return tmp_path / "launch" / "slurm.sbatch"


def test_ranks_save_when_slurm_warns(slurm: StandIn, job: Path, tmp_path: Path) -> None:
    with slurm.started(job, "--requeue", SLURM_JOB_NUM_NODES="1", SLURM_GPUS_PER_NODE="2", OMP_NUM_THREADS="1") as process:
        wait_until(lambda: all("started" in slurm.lines(f"rank.{rank}") for rank in range(2)), timeout_s=60)
        assert len(slurm.pids()) == 3
        os.kill(process.pid, signal.SIGTERM)
        _, said = process.communicate(timeout=40)
        assert process.returncode == 0, said
        assert (tmp_path / "scancel").read_text() == "--signal=INT 123456.0\n"
        assert [slurm.lines(f"rank.{rank}") for rank in range(2)] == [["started", "SIGINT", "saved"]] * 2
        assert slurm.alive() == []
        assert slurm.lines("requeued") == ["123456"]


def test_the_doctor_comes_first(slurm: StandIn) -> None:
    """What it finds stops the job. The step that is told to save is then the second one."""
    slurm.command("srun", 'echo "$*" >>"$STAND_IN/steps"; [[ "$*" != *"ds_gpt doctor"* ]] || exit ${DOCTOR:-0}; kill -TERM $PPID; sleep 0.5')
    slurm.command("scancel", 'echo "$*" >"$STAND_IN/scancel"')
    for status, told, steps in (("1", "--doctor", 1), ("0", "--doctor=only", 1), ("0", "--doctor", 2)):
        (slurm.folder / "steps").unlink(missing_ok=True)
        result = slurm.run("slurm.sbatch", told, "--config", "c.yaml", DOCTOR=status)
        assert result.returncode == int(status) and len(slurm.lines("steps")) == steps, result.stderr
        assert slurm.lines("steps")[0].endswith(" -m ds_gpt doctor --run-dir runs/ds_gpt-123456 --config c.yaml")
    assert slurm.lines("scancel") == ["--signal=INT 123456.1"]
    assert slurm.lines("requeued") == []  # nobody asked for that
