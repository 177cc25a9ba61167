"""launch/multi_node.sh: the hostfile is checked by DeepSpeed's rules before anything starts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch_scripts import LAUNCH, REPOSITORY, StandIn, wait_until, words_of

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
    options = [f"--hostfile={path}", "--num_nodes=2", "--num_gpus", "4", "--master_addr", "10.0.0.1", "--master_port=30000"]
    words = stand_in.dry_run("multi_node.sh", *options, "--", "--num_nodes", "mine")
    assert [option(words, f"--{name}") for name in ("hostfile", "num_nodes", "num_gpus", "master_addr", "master_port")] == [
        path, "2", "4", "10.0.0.1", "30000"
    ]  # fmt: skip
    assert words[words.index(TRAIN) + 1 :] == ["--num_nodes", "mine"]


def test_options_of_the_script_may_stand_anywhere(stand_in: StandIn, hostfile: Callable[[str], str]) -> None:
    path = hostfile("a slots=2\nb slots=2")
    result = stand_in.run("multi_node.sh", "--config", "c.yaml", "--hostfile", path, "--set", "x=1", "--num_nodes=1", "--resume", "--doctor=only", "--dry-run")
    words = words_of(result.stdout)
    assert words[words.index("doctor") + 1 :] == ["--config", "c.yaml", "--set", "x=1", "--resume"]
    assert (option(words, "--hostfile"), option(words, "--num_nodes")) == (path, "1")


def test_the_doctor_comes_first(stand_in: StandIn, hostfile: Callable[[str], str]) -> None:
    options = ["--hostfile", hostfile("a slots=2\nb slots=2"), "--master_port", "30000"]
    train = stand_in.dry_run("multi_node.sh", *options, "--config", "c.yaml")
    doctor = [*train[: train.index(TRAIN)], "--module", "ds_gpt", "doctor", "--config", "c.yaml"]
    for option_of_it, expected in (("--doctor", [doctor, train]), ("--doctor=only", [doctor])):
        result = stand_in.run("multi_node.sh", "--dry-run", *options, option_of_it, "--config", "c.yaml")
        assert list(map(words_of, result.stdout.splitlines())) == expected


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


def test_other_launchers_are_refused(stand_in: StandIn, hostfile: Callable[[str], str]) -> None:
    result = stand_in.run("multi_node.sh", "--hostfile", hostfile("a slots=1"), "--launcher", "openmpi")
    assert result.returncode == 2 and "would train alone" in result.stderr


def test_pdsh_is_asked_for(stand_in: StandIn, hostfile: Callable[[str], str]) -> None:
    tools = stand_in.folder / "bin"
    for tool in ("bash", "dirname"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    result = stand_in.run("multi_node.sh", "--hostfile", hostfile("a slots=1"), PATH=str(tools))
    assert result.returncode == 2 and "'pdsh' is not on PATH" in result.stderr


@pytest.fixture
def pdsh(stand_in: StandIn) -> StandIn:
    """A pdsh that writes down its words and whatever it is told to say of the machines."""
    stand_in.command("pdsh", 'printf "%s " "$@" >>"$STAND_IN/pdsh"; echo "$PDSH_SSH_ARGS_APPEND" >>"$STAND_IN/pdsh"; echo "${PDSH_SAYS:-}"; exit ${PDSH_STATUS:-0}')
    stand_in.environment |= {"STAND_IN_CODE": "0", "HOME": str(stand_in.folder)}
    return stand_in


def test_the_launcher_takes_the_place_of_the_script(pdsh: StandIn, hostfile: Callable[[str], str]) -> None:
    """exec: the launcher's own handler, which reaches the other machines, gets the signals of whoever started the script."""
    arguments = ["--hostfile", hostfile("a slots=1"), "--config", "a b"]
    with pdsh.started(LAUNCH / "multi_node.sh", *arguments, STAND_IN_START_S="50") as process:
        wait_until(lambda: pdsh.lines("pids"))
        assert pdsh.pids() == [process.pid]
        assert pdsh.argv()[-2:] == ["--config", "a b"]
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=20) == -signal.SIGTERM


@pytest.mark.parametrize(("code", "part"), [("0", TRAIN), ("1", "ds_gpt")])
def test_what_the_doctor_finds_stops_it(pdsh: StandIn, hostfile: Callable[[str], str], code: str, part: str) -> None:
    result = pdsh.run("multi_node.sh", "--hostfile", hostfile("a slots=1"), "--doctor", "--config", "c.yaml", STAND_IN_CODE=code)
    assert result.returncode == int(code), result.stderr
    assert part in pdsh.argv() and pdsh.argv()[-2:] == ["--config", "c.yaml"]


def test_a_machine_that_cannot_start_it_is_named_before_any_rank_starts(pdsh: StandIn, hostfile: Callable[[str], str]) -> None:
    path = hostfile("a slots=1\nb slots=1\nc slots=1")
    result = pdsh.run("multi_node.sh", "--hostfile", path, "--num_nodes", "2", PDSH_STATUS="255", PDSH_SAYS="pdsh@here: b: ssh exited with exit code 255")
    assert result.returncode == 2 and "b: ssh exited with exit code 255" in result.stderr and not pdsh.lines("pids")
    (asked,) = pdsh.lines("pdsh")
    assert " -w a,b " in asked and f"test -r '{TRAIN}'" in asked
    assert "BatchMode=yes" in asked and "ServerAliveInterval=10" in asked  # a dead machine does not keep the launcher waiting


def test_the_environment_that_training_needs_is_passed_on(pdsh: StandIn, hostfile: Callable[[str], str]) -> None:
    (pdsh.folder / ".deepspeed_env").write_text("# ours\n\nTRITON_CACHE_DIR=/from the file\n")
    given = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth1", "OMP_NUM_THREADS": "4", "DEEPSPEED_TIMEOUT": "60", "SECRET": "x", "HF_HOME": "/a b"}
    result = pdsh.run("multi_node.sh", "--hostfile", hostfile("a slots=1"), cwd=pdsh.folder / "bin", **given)
    assert result.returncode == 0, result.stderr
    passed = dict(line.split("=", 1) for line in pdsh.lines("passed"))
    assert {key: passed[key] for key in given if key != "SECRET"} == {key: value for key, value in given.items() if key != "SECRET"}
    assert passed["TRITON_CACHE_DIR"] == "/from the file" and "SECRET" not in passed and "HOME" not in passed
    (pdsh.folder / ".deepspeed_env").write_text("export A=1\n")
    bad = pdsh.run("multi_node.sh", "--hostfile", hostfile("a slots=1"), "--dry-run")
    assert bad.returncode == 2 and ".deepspeed_env: 'export A=1' is not NAME=VALUE" in bad.stderr
    odd = pdsh.run("multi_node.sh", "--hostfile", hostfile("a slots=1"), "--dry-run", NCCL_X="$(date)", DS_ENV_FILE="/none")
    assert odd.returncode == 2 and "NCCL_X=$(date)" in odd.stderr


def test_an_interface_settles_where_they_meet_and_how_they_talk(pdsh: StandIn, hostfile: Callable[[str], str]) -> None:
    arguments = ["--hostfile", hostfile("a slots=1\nb slots=1"), "--interface", "ib0"]
    said = "3: ib0    inet 10.9.8.7/24 brd 10.9.8.255 scope global ib0"
    result = pdsh.run("multi_node.sh", *arguments, PDSH_SAYS=said, GLOO_SOCKET_IFNAME="other")
    assert result.returncode == 0, result.stderr
    assert option(pdsh.argv(), "--master_addr") == "10.9.8.7"
    assert {"NCCL_SOCKET_IFNAME=ib0", "GLOO_SOCKET_IFNAME=ib0"} <= set(pdsh.lines("passed"))
    assert "-w a ip -4 -o addr show dev 'ib0'" in pdsh.lines("pdsh")[1]
    missing = pdsh.run("multi_node.sh", *arguments, PDSH_SAYS='Device "ib0" does not exist.')
    assert missing.returncode == 2 and "a has no interface 'ib0'" in missing.stderr and "does not exist" in missing.stderr
    shown = pdsh.run("multi_node.sh", *arguments, "--dry-run")
    assert "passed on: NCCL_SOCKET_IFNAME=ib0" in shown.stderr and "the address of ib0 on a" in shown.stderr


# A `deepspeed` that notes its words and the machines of its hostfile, and ends as the plan says, one status a start.
PLANNED = """\
echo "$*" >>"$STAND_IN/starts"
cut -d ' ' -f 1 "$2" | paste -s -d , >>"$STAND_IN/machines"
mkdir -p "$STAND_IN/run" && touch "$STAND_IN/run/run.yaml"
status=$(sed -n "$(wc -l <"$STAND_IN/starts")p" "$STAND_IN/plan")
[[ "$status" != wait ]] || { trap 'echo TERM >>"$STAND_IN/heard"; kill $!; exit 1' TERM; sleep 60 & wait $!; }
exit "$status"
"""
# A `pdsh` in which a machine that is in the file `lost` does not answer.
ANSWERS = """\
while [[ $1 != -w ]]; do shift; done
[[ ! -s "$STAND_IN/starts" ]] || ! grep -qx "$2" "$STAND_IN/lost" || exit 255
echo "$2: 3: ib0    inet 10.0.0.${#2}${2#node}/24"
"""


@pytest.fixture
def planned(stand_in: StandIn, hostfile: Callable[[str], str]) -> Callable[..., tuple[subprocess.CompletedProcess[str], list[str], list[str]]]:
    """Runs it with restarts: what came of it, the machines of each start, and its arguments."""
    stand_in.command("deepspeed", PLANNED)
    stand_in.command("pdsh", ANSWERS)
    stand_in.command("sleep", 'echo "$1" >>"$STAND_IN/slept"; exec /bin/sleep $(($1 > 30 ? $1 : 0))')
    path = hostfile("node1 slots=2\nnode2 slots=4\nnode3 slots=2")

    def run(plan: list[object], lost: list[str], *options: str) -> tuple[subprocess.CompletedProcess[str], list[str], list[str]]:
        (stand_in.folder / "plan").write_text("".join(f"{status}\n" for status in plan))
        (stand_in.folder / "lost").write_text("".join(f"{name}\n" for name in lost))
        arguments = ["--hostfile", path, "--restarts", "2", *options, "--run-dir", str(stand_in.folder / "run"), "--set", "seed=3"]
        result = stand_in.run("multi_node.sh", *arguments)
        return result, stand_in.lines("machines"), stand_in.lines("starts")

    return run


def test_it_goes_on_without_a_machine_that_is_lost(planned: Callable[..., Any], stand_in: StandIn) -> None:
    result, machines, starts = planned([255, 1, 0], ["node1"], "--interface", "ib0")
    assert result.returncode == 0, result.stderr
    assert machines == ["node1,node2,node3", "node2,node3", "node2,node3"]
    assert [("--num_nodes 3" in start, "--resume" in start) for start in starts] == [(True, False), (False, True), (False, True)]
    assert ["10.0.0.51" in starts[0], "10.0.0.52" in starts[1]] == [True, True], "they meet at the first that is left"
    assert "node1 does not answer" in result.stderr and "restart 2 of 2 in 20 s" in result.stderr
    assert stand_in.lines("slept") == ["10", "20"]


@pytest.mark.parametrize(
    ("plan", "lost", "options", "status", "starts", "said"),
    [
        ([0], [], [], 0, 1, ""),
        ([2], [], [], 2, 1, ""),
        ([1, 1, 1], [], [], 1, 3, "restart 2 of 2"),
        ([247, 0], ["node1"], ["--master_addr", "10.0.0.9"], 247, 1, "node1 is lost, whose address was given"),
        ([1, 0], ["node1", "node2", "node3"], [], 1, 1, "no machine answers"),
    ],
)
def test_what_restarts_mend(
    planned: Callable[..., Any], plan: list[object], lost: list[str], options: list[str], status: int, starts: int, said: str
) -> None:
    result, machines, _ = planned(plan, lost, *options)
    assert (result.returncode, len(machines)) == (status, starts) and said in result.stderr, result.stderr


def test_a_signal_is_no_crash(planned: Callable[..., Any], stand_in: StandIn, hostfile: Callable[[str], str]) -> None:
    planned(["0"], [])  # the stand-ins are there
    for name in ("starts", "machines"):
        (stand_in.folder / name).unlink()
    (stand_in.folder / "plan").write_text("wait\n0\n")
    arguments = ["--hostfile", hostfile("node1 slots=1"), "--restarts", "2", "--run-dir", "x"]
    with stand_in.started(LAUNCH / "multi_node.sh", *arguments) as process:
        wait_until(lambda: stand_in.lines("machines"))
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=20) == 1
    assert stand_in.lines("heard") == ["TERM"] and len(stand_in.lines("starts")) == 1


def test_restarts_need_a_folder(stand_in: StandIn, hostfile: Callable[[str], str]) -> None:
    result = stand_in.run("multi_node.sh", "--hostfile", hostfile("a slots=1"), "--restarts", "2")
    assert result.returncode == 2 and "--restarts without --run-dir" in result.stderr
