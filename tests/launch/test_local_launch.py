"""launch/local.sh: the command it builds, and signals that reach the ranks and leave nobody behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from launch_scripts import LAUNCH, REPOSITORY, StandIn, alive, wait_until, words_of

SCRIPT = LAUNCH / "local.sh"
TRAIN = str(REPOSITORY / "ds_gpt" / "train.py")


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_defaults_on_a_machine_without_gpus(stand_in: StandIn) -> None:
    words = stand_in.dry_run("local.sh", DS_ACCELERATOR="cpu")
    assert words[0] == "deepspeed" and words[-1] == TRAIN
    assert option(words, "--num_gpus") == "2"


@pytest.fixture
def four_gpus(stand_in: StandIn) -> StandIn:
    smi = stand_in.folder / "bin" / "nvidia-smi"
    smi.write_text('#!/bin/sh\nfor i in 0 1 2 3; do echo "GPU $i: NVIDIA A100-SXM4-40GB (UUID: GPU-$i)"; done\n')
    smi.chmod(0o755)
    return stand_in


def test_defaults_to_the_number_of_gpus(four_gpus: StandIn) -> None:
    assert option(four_gpus.dry_run("local.sh"), "--num_gpus") == "4"
    assert option(four_gpus.dry_run("local.sh", "--num_gpus", "3"), "--num_gpus") == "3"
    assert option(four_gpus.dry_run("local.sh", DS_ACCELERATOR="cpu"), "--num_gpus") == "2"


def test_chosen_gpus_are_left_to_the_launcher(four_gpus: StandIn) -> None:
    """`--num_gpus 4` would make the launcher ignore CUDA_VISIBLE_DEVICES and take the first four."""
    assert "--num_gpus" not in four_gpus.dry_run("local.sh", CUDA_VISIBLE_DEVICES="1,3")
    assert option(four_gpus.dry_run("local.sh", "--num_gpus=1", CUDA_VISIBLE_DEVICES="1,3"), "--num_gpus") == "1"


def test_a_broken_driver_counts_as_no_gpu(stand_in: StandIn) -> None:
    smi = stand_in.folder / "bin" / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    smi.chmod(0o755)
    assert option(stand_in.dry_run("local.sh"), "--num_gpus") == "2"


def test_the_port_is_free_and_not_the_same_for_two_jobs(stand_in: StandIn) -> None:
    ports = [int(option(stand_in.dry_run("local.sh"), "--master_port")) for _ in range(3)]
    assert len(set(ports)) > 1 and 29500 not in ports
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_given_port_is_used(stand_in: StandIn) -> None:
    assert option(stand_in.dry_run("local.sh", "--master_port", "31234"), "--master_port") == "31234"
    assert option(stand_in.dry_run("local.sh", "--master_port=31235"), "--master_port") == "31235"


ODD = ["--config", "my runs/a b.yaml", "--set", 'sample.prompt="say $HOME; *"', "--set", "x={a: [1, 2]}", "", "back\\slash", "new\nline"]


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_arguments_arrive_as_they_were_given(stand_in: StandIn, separator: list[str]) -> None:
    words = stand_in.dry_run("local.sh", "--num_gpus", "3", *separator, *ODD)
    assert words[words.index(TRAIN) + 1 :] == ODD
    result = stand_in.run("local.sh", "--num_gpus", "3", *separator, *ODD, STAND_IN_CODE="0")
    assert result.returncode == 0, result.stderr
    argv = stand_in.argv()
    assert argv[argv.index(TRAIN) + 1 :] == ODD and option(argv, "--num_gpus") == "3"


def test_options_of_the_script_may_stand_anywhere(stand_in: StandIn) -> None:
    result = stand_in.run("local.sh", "--config", "a.yaml", "--num_gpus", "7", "--set", "x=1", "--master_port=31234", "--resume", "--dry-run")
    assert result.returncode == 0 and not (stand_in.folder / "argv.json").exists()
    words = words_of(result.stdout)
    assert words[words.index(TRAIN) + 1 :] == ["--config", "a.yaml", "--set", "x=1", "--resume"]
    assert (option(words, "--num_gpus"), option(words, "--master_port")) == ("7", "31234")


def test_all_behind_the_separator_belongs_to_training(stand_in: StandIn) -> None:
    words = stand_in.dry_run("local.sh", "--config", "a.yaml", "--", "--num_gpus", "7", "--", "--help")
    assert words[words.index(TRAIN) + 1 :] == ["--config", "a.yaml", "--num_gpus", "7", "--", "--help"]
    assert option(stand_in.dry_run("local.sh", "--", "--dry-run"), TRAIN) == "--dry-run"


def test_it_runs_from_any_directory_and_stays_there(stand_in: StandIn, tmp_path: Path) -> None:
    """Relative paths among the arguments are the user's."""
    link = tmp_path / "a link"
    link.symlink_to(LAUNCH.parent)
    command = ["bash", "a link/launch/local.sh", "--dry-run", "--config", "mine.yaml"]
    result = subprocess.run(command, cwd=tmp_path, env=stand_in.environment, capture_output=True, text=True, check=True)
    *_, train, _, config = words_of(result.stdout)
    assert Path(train).is_absolute() and Path(train).samefile(TRAIN) and config == "mine.yaml"


@pytest.mark.parametrize(
    "arguments",
    [["--num_gpus", "0"], ["--num_gpus", "two"], ["--num_gpus", "-1"], ["--num_gpus", "99999"], ["--num_gpus="], ["--num_gpus"], ["--master_port", "70000"]],
)
def test_wrong_numbers_are_answered_in_three_parts(stand_in: StandIn, arguments: list[str]) -> None:
    result = stand_in.run("local.sh", *arguments)
    assert result.returncode == 2 and result.stdout == ""
    what, why, remedy = result.stderr.splitlines()
    assert what.startswith(f"launch/local.sh: {arguments[0].partition('=')[0]}") and why.startswith("why: ") and remedy.startswith("do:  ")


def test_a_missing_launcher_is_said_before_anything_starts(stand_in: StandIn) -> None:
    tools = stand_in.folder / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname", "python3"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    result = stand_in.run("local.sh", PATH=str(tools))
    assert result.returncode == 2 and "'deepspeed' is not on PATH" in result.stderr and "pip install -e" in result.stderr


@pytest.mark.parametrize("script", ["local.sh", "multi_node.sh", "slurm.sbatch"])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(stand_in: StandIn, script: str, flag: str) -> None:
    result = stand_in.run(script, flag)
    assert result.returncode == 0 and result.stdout.startswith("usage: ") and "--dry-run" in result.stdout and result.stderr == ""


def ranks_started(stand_in: StandIn) -> bool:
    return all("started" in stand_in.lines(f"rank.{rank}") for rank in range(2))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda n: n.name)
def test_one_signal_reaches_every_rank_once_and_they_save(stand_in: StandIn, number: signal.Signals) -> None:
    with stand_in.started(SCRIPT) as process:
        wait_until(lambda: ranks_started(stand_in))
        os.kill(process.pid, number)
        _, said = process.communicate(timeout=20)
        assert process.returncode == 0, said
        name = "SIGINT" if number == signal.SIGINT else "SIGTERM"
        assert [stand_in.lines(f"rank.{rank}") for rank in range(2)] == [["started", name, "saved"]] * 2
        assert stand_in.lines("launch") == []  # launch.py is left alone: it would kill a rank that saves for over 30 s
        assert "they finish their step and save" in said
        assert len(stand_in.pids()) == 4 and stand_in.alive() == []


def test_ctrl_c_at_a_terminal_reaches_the_ranks_once(stand_in: StandIn) -> None:
    """A terminal signals its whole foreground group; the run is in another, so that nobody hears it twice."""
    with stand_in.started(SCRIPT) as process:
        wait_until(lambda: ranks_started(stand_in))
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode == 0
        assert stand_in.lines("rank.0") == ["started", "SIGINT", "saved"]
        assert stand_in.alive() == []


def test_a_second_signal_stops_at_once(stand_in: StandIn) -> None:
    with stand_in.started(SCRIPT, STAND_IN_SAVE_S="50") as process:
        wait_until(lambda: ranks_started(stand_in))
        os.kill(process.pid, signal.SIGINT)
        wait_until(lambda: all("SIGINT" in stand_in.lines(f"rank.{rank}") for rank in range(2)))
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode == 3  # the rank's own
        assert "stopped at once" in stand_in.lines("rank.0") + stand_in.lines("rank.1") and stand_in.alive() == []


def test_a_third_signal_kills_ranks_that_do_not_listen(stand_in: StandIn) -> None:
    with stand_in.started(SCRIPT, STAND_IN_DEAF="1") as process:
        wait_until(lambda: ranks_started(stand_in))
        for count in (1, 2):
            os.kill(process.pid, signal.SIGTERM)
            wait_until(lambda count=count: all(stand_in.lines(f"rank.{rank}").count("SIGTERM") == count for rank in range(2)))
        assert len(stand_in.alive()) == 4
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=20)
        assert process.returncode == 128 + 15 and stand_in.alive() == []


def test_a_signal_before_the_ranks_exist_ends_the_launcher(stand_in: StandIn) -> None:
    with stand_in.started(SCRIPT, STAND_IN_START_S="50") as process:
        wait_until(lambda: stand_in.lines("pids"))
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=20)
        assert process.returncode == 128 + 15 and stand_in.alive() == [] and stand_in.lines("rank.0") == []


@pytest.mark.parametrize(("code", "status"), [("0", 0), ("7", 7), ("-9", 137)])
def test_the_exit_status_is_that_of_the_rank(stand_in: StandIn, code: str, status: int) -> None:
    result = stand_in.run("local.sh", STAND_IN_CODE=code)
    assert result.returncode == status and stand_in.alive() == []


def test_no_process_outlives_the_script(stand_in: StandIn) -> None:
    result = stand_in.run("local.sh", STAND_IN_CODE="0", STAND_IN_STRAY="1")
    assert result.returncode == 0 and len(stand_in.pids()) == 5 and stand_in.alive() == []


def test_a_killed_launcher_is_no_success(stand_in: StandIn) -> None:
    """`deepspeed` itself ends with 0 then, and the ranks train on without parents."""
    with stand_in.started(SCRIPT) as process:
        wait_until(lambda: ranks_started(stand_in))
        os.kill(stand_in.pids()[1], signal.SIGKILL)
        _, said = process.communicate(timeout=20)
        assert process.returncode == 137 and "launch.py was killed" in said
        assert [stand_in.lines(f"rank.{rank}") for rank in range(2)] == [["started", "SIGTERM", "saved"]] * 2
        assert stand_in.alive() == []


STUB = '''
import os, signal, sys, time
folder, rank, seen = os.environ["STAND_IN"], os.environ["RANK"], []
def note(text):
    with open(f"{folder}/rank.{rank}", "a") as file: print(text, file=file)
def handle(number, frame):
    if number in seen: note("stopped at once"); os._exit(3)
    note(signal.Signals(number).name); seen.append(number)
signal.signal(signal.SIGINT, handle); signal.signal(signal.SIGTERM, handle)
with open(f"{folder}/pids", "a") as file: print(os.getpid(), os.getppid(), sep="\\n", file=file)
note("started"); note(sys.argv[-1])
end = time.monotonic() + 60
while not seen and time.monotonic() < end: time.sleep(0.05)
time.sleep(1); note("saved")
'''


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_the_real_launcher_behaves_like_the_stand_in(stand_in: StandIn, tmp_path: Path, number: signal.Signals) -> None:
    """The real `deepspeed` command, two ranks that do not import torch: the layers and the habits are what we think."""
    (tmp_path / "ds_gpt").mkdir()
    (tmp_path / "ds_gpt" / "train.py").write_text(STUB)
    shutil.copytree(LAUNCH, tmp_path / "launch")
    (tmp_path / "bin" / "deepspeed").unlink()
    stand_in.environment["DS_ACCELERATOR"] = "cpu"
    with stand_in.started(tmp_path / "launch" / "local.sh", "--set", "a=b c") as process:
        wait_until(lambda: all("a=b c" in stand_in.lines(f"rank.{rank}") for rank in range(2)), timeout_s=90)
        assert all(alive(pid) for pid in stand_in.pids())
        os.kill(process.pid, number)
        _, said = process.communicate(timeout=40)
        assert process.returncode == 0, said
        assert [stand_in.lines(f"rank.{rank}") for rank in range(2)] == [["started", "a=b c", number.name, "saved"]] * 2
        assert stand_in.alive() == []
