"""launch/multi_node.sh: the hostfile is checked by DeepSpeed's rules before anything starts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_scripts import LAUNCH, REPOSITORY, StandIn, wait_until

TRAIN = str(REPOSITORY / "ds_gpt" / "train.py")


@pytest.fixture
def hostfile(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "host file"
        path.write_text(text)
        return str(path)

    return write


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_the_example_gives_the_whole_command(stand_in: StandIn) -> None:
    example = str(LAUNCH / "hostfile.example")
    words = stand_in.dry_run("multi_node.sh", "--hostfile", example, "--config", "a b.yaml")
    assert words == [
        "deepspeed", "--hostfile", example, "--force_multi", "--launcher", "pdsh", "--num_nodes", "2", "--master_port", "29500", TRAIN, "--config", "a b.yaml"
    ]  # fmt: skip


def test_every_option_is_passed_on(stand_in: StandIn, hostfile: Callable[[str], str]) -> None:
    path = hostfile("# mine\n\n  node1   slots=8  # fast\nnode2 slots=4\nnode3\tslots=4")
    options = [f"--hostfile={path}", "--num_nodes=2", "--num_gpus", "4", "--master_addr", "10.0.0.1", "--master_port=30000", "--launcher", "slurm"]
    words = stand_in.dry_run("multi_node.sh", *options, "--", "--num_nodes", "mine")
    assert [option(words, f"--{name}") for name in ("hostfile", "num_nodes", "num_gpus", "master_addr", "master_port", "launcher")] == [
        path, "2", "4", "10.0.0.1", "30000", "slurm"
    ]  # fmt: skip
    assert words[words.index(TRAIN) + 1 :] == ["--num_nodes", "mine"]


def test_our_rules_for_hostfiles_are_deepspeeds() -> None:
    from deepspeed.launcher.runner import _parse_hostfile

    assert _parse_hostfile((LAUNCH / "hostfile.example").read_text().splitlines()) == {"node1": 8, "node2": 8}
    for bad in (["node1"], ["node1 slots=x"], ["node1 slots=1", "node1 slots=1"], ["# nothing"]):
        with pytest.raises(ValueError):
            _parse_hostfile(bad)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("node1 slots=8\nnode2\n", ":2: 'node2' is not 'name slots=GPUS'"),
        ("node1 slots=eight\n", ":1: 'node1 slots=eight' is not"),
        ("node1 slots=0\n", ":1: 'node1 slots=0' is not"),
        ("node1 slots=8 max=9\n", ":1: "),
        ("node1:8\n", ":1: "),
        ("node1 slots=8\n\n# again\nnode1 slots=4", ":4: the machine 'node1' stands there twice"),
        ("# only\n\n", "names no machine"),
        ("", "names no machine"),
    ],
)
def test_a_bad_hostfile_names_the_line(stand_in: StandIn, hostfile: Callable[[str], str], content: str, said: str) -> None:
    result = stand_in.run("multi_node.sh", "--dry-run", "--hostfile", hostfile(content))
    assert result.returncode == 2 and result.stdout == "" and said in result.stderr
    assert [line[:5] for line in result.stderr.splitlines()[-2:]] == ["why: ", "do:  "]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--hostfile is missing"),
        (["--hostfile"], "--hostfile has no value"),
        (["--hostfile", "/nowhere/hosts"], "'/nowhere/hosts' does not exist"),
        (["--hostfile", "/"], "does not exist or cannot be read"),
        (["--hostfile", "HOSTS", "--num_nodes", "3"], "names 2 machine(s)"),
        (["--hostfile", "HOSTS", "--num_nodes", "none"], "--num_nodes = 'none'"),
        (["--hostfile", "HOSTS", "--num_gpus", "5"], "has 4 slot(s)"),
        (["--hostfile", "HOSTS", "--master_port", "99999"], "--master_port = '99999'"),
        (["--hostfile", "HOSTS", "--set", "sample.prompt=$HOME"], "the remote shells would interpret"),
        (["--hostfile", "HOSTS", "--set", "x='a;b'"], "the remote shells would interpret"),
        (["--hostfile", "HOSTS", "--config", "runs/*.yaml"], "the remote shells would interpret"),
    ],
)
def test_mistakes_are_answered_before_anything_starts(stand_in: StandIn, hostfile: Callable[[str], str], arguments: list[str], said: str) -> None:
    path = hostfile("node1 slots=8\nnode2 slots=4\n")
    result = stand_in.run("multi_node.sh", *[path if word == "HOSTS" else word for word in arguments])
    assert result.returncode == 2 and said in result.stderr and "why: " in result.stderr and "do:  " in result.stderr
    assert not (stand_in.folder / "argv.json").exists()


def test_other_launchers_pass_any_argument(stand_in: StandIn, hostfile: Callable[[str], str]) -> None:
    words = stand_in.dry_run("multi_node.sh", "--hostfile", hostfile("a slots=1"), "--launcher", "openmpi", "--set", "x={a: $1}")
    assert words[-1] == "x={a: $1}"


def test_pdsh_is_asked_for(stand_in: StandIn, hostfile: Callable[[str], str]) -> None:
    result = stand_in.run("multi_node.sh", "--hostfile", hostfile("a slots=1"), PATH=f"{stand_in.folder / 'bin'}:/usr/bin:/bin")
    assert result.returncode == 2 and "'pdsh' is not on PATH" in result.stderr


def test_the_launcher_takes_the_place_of_the_script(stand_in: StandIn, hostfile: Callable[[str], str]) -> None:
    """exec: the launcher's own handler, which reaches the other machines, gets the signals of whoever started the script."""
    arguments = ["--hostfile", hostfile("a slots=1"), "--launcher", "openmpi", "--config", "a b"]
    with stand_in.started(LAUNCH / "multi_node.sh", *arguments, STAND_IN_START_S="50") as process:
        wait_until(lambda: stand_in.lines("pids"))
        assert stand_in.pids() == [process.pid]
        assert stand_in.argv()[-2:] == ["--config", "a b"]
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=20) == -signal.SIGTERM
