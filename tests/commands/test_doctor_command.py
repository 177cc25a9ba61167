"""``ds-gpt doctor`` as it is typed: alone, under both launchers, and where ranks cannot meet."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hosts import Host, two_hosts
from jobs import DEEPSPEED, DS_GPT, REPOSITORY, TORCHRUN, ran, started

from ds_gpt.commands.doctor import check_devices, text
from ds_gpt.config import ConfigError
from ds_gpt.engine.ranks import Ranks
from ds_gpt.trainer.preflight import Check

LAUNCHED = {
    "torchrun": [*TORCHRUN, "--nproc-per-node", "2", "-m"],
    "deepspeed": [*DEEPSPEED, "--quiet", "--num_gpus", "2", "--module"],
}
PATH = {"PYTHONPATH": str(REPOSITORY)}


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_ranks_of_a_launcher_compare_notes(launcher: str, tmp_path: Path) -> None:
    ended = ran(tmp_path, *LAUNCHED[launcher], "ds_gpt", "doctor", "--deadline", "30", deadline_s=90, **PATH)
    assert ended.status == 0, ended.out + ended.err
    assert ended.out.count("2 ranks, 2 on this node") == 1
    for name in ("devices", "nodes", "network", "run folder", "disk", "extension locks", "versions", "shared folder", "all-reduce"):
        assert f"ok       {name} " in ended.out, ended.out


def test_a_problem_ends_every_rank_with_status_1(tmp_path: Path) -> None:
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (time.time() - 7200,) * 2)
    words = [*LAUNCHED["deepspeed"], "ds_gpt", "doctor", "--json"]
    ended = ran(tmp_path, *words, deadline_s=90, TORCH_EXTENSIONS_DIR=str(tmp_path), **PATH)
    assert ended.status == 1
    checks, _ = json.JSONDecoder().raw_decode(ended.out, ended.out.index("[\n"))  # behind it the launcher speaks
    (found,) = [check for check in checks if check["verdict"] == "problem"]
    assert found["name"] == "extension locks" and str(lock) in found["saw"] and found["why"] and found["fix"]


def test_one_process_checks_its_machine(tmp_path: Path) -> None:
    ended = ran(tmp_path, *DS_GPT, "doctor", **PATH)
    assert ended.status == 0 and "no problems" in ended.out and "torchrun --nproc-per-node" in ended.out
    huge = ran(tmp_path, *DS_GPT, "doctor", "--set", "model.layers=20000000", **PATH)
    assert huge.status == 1 and "problem  disk" in huge.out
    shared = ran(tmp_path, *DS_GPT, "doctor", "--set", "parallel.tensor=2", "--set", "model.vocab_size=100", **PATH)
    assert shared.status == 0 and "1 rank," in shared.out and "ok       memory" in shared.out, shared.out + shared.err
    assert not [path for path in tmp_path.iterdir() if path.suffix not in (".out", ".err")]


def checks_for(folder: Path, *arguments: str) -> dict[str, str]:
    """What each check saw."""
    ended = ran(folder, sys.executable, "-m", "ds_gpt", "doctor", "--json", "--set", "model.vocab_size=50257", *arguments, **PATH)
    return {check["name"]: check["saw"] for check in json.loads(ended.out)}


def test_one_process_judges_the_machine_for_the_run_as_planned(tmp_path: Path) -> None:
    """Ranks on a CPU share its memory: four of ZeRO-0, of equal micro-batches, need four times what one does."""
    same = ("--set", "zero_optimization.stage=0", "--set", "batch.micro_batch_size=2")
    alone, planned = (checks_for(tmp_path, *same, *more) for more in ([], ["--devices", "4"]))
    needs = [float(found["memory"].partition(" needs ")[2].partition(" GiB")[0]) for found in (alone, planned)]
    assert needs[1] == pytest.approx(4 * needs[0], rel=0.02)
    assert alone["devices"].partition(" for ")[2] == "1 rank, over gloo" and planned["devices"].partition(" for ")[2] == "4 ranks, over gloo"


def test_the_number_of_ranks_is_that_of_the_launcher() -> None:
    alone, launched = (Ranks(0, number, 0, number, torch.device("cpu")) for number in (1, 2))
    check_devices(8, alone)
    check_devices(2, launched)
    check_devices(None, launched)
    with pytest.raises(ConfigError, match="--devices 4, but a launcher started 2 ranks"):
        check_devices(4, launched)
    with pytest.raises(ConfigError, match="--devices 0 is not a number of ranks"):
        check_devices(0, alone)
    check = Check("memory", "ok", "enough")
    assert text([check], alone, 8).startswith("this machine, for a run of 8 ranks\n")
    assert text([check], launched, 2).startswith("2 ranks, 2 on this node\n")


def test_bad_input_is_no_diagnosis(tmp_path: Path) -> None:
    ended = ran(tmp_path, *DS_GPT, "doctor", "--deadline", "0", **PATH)
    assert ended.status == 2 and "--deadline 0" in ended.err


def test_a_rendezvous_port_that_is_taken(tmp_path: Path) -> None:
    """Rank 0 says so. Rank 1 meets a stranger who never speaks, and does not wait for ever."""
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        number = str(holder.getsockname()[1])
        place = {"WORLD_SIZE": "2", "LOCAL_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": number}
        command = [sys.executable, "-m", "ds_gpt", "doctor", "--deadline", "3"]
        with (
            started(tmp_path, *command, RANK="0", PYTHONPATH=str(REPOSITORY), **place) as first,
            started(tmp_path, *command, RANK="1", PYTHONPATH=str(REPOSITORY), **place) as second,
        ):
            ended = [job.wait(60) for job in (first, second)]
    assert [job.status for job in ended] == [1, 1]
    assert f"the rendezvous port {number} cannot be opened" in ended[0].out
    assert "rank 1 on" in ended[1].err and f"127.0.0.1:{number}" in ended[1].err


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts(named=False) as both:
        yield both


@pytest.mark.parametrize("told", [True, False])
def test_two_hosts(told: bool, hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """Told the interface they reduce; else gloo takes the loopback, on which neither host reaches the other."""
    place = {"WORLD_SIZE": "2", "LOCAL_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29555"}
    doctor = [sys.executable, "-m", "ds_gpt", "doctor", "--deadline", "15" if told else "4"]
    environments = [
        {**place, **PATH, "RANK": str(rank), **({"GLOO_SOCKET_IFNAME": host.interface} if told else {})}
        for rank, host in enumerate(hosts)
    ]
    with (
        started(tmp_path, *hosts[0].words(*doctor), **environments[0]) as first,
        started(tmp_path, *hosts[1].words(*doctor), **environments[1]) as second,
    ):
        ended = [job.wait(60) for job in (first, second)]
    assert [job.status for job in ended] == ([0, 0] if told else [1, 1]), ended
    assert "2 ranks, 1 on this node" in ended[0].out
    if told:
        assert "2: host0, host1, 1 rank each" in ended[0].out
        assert "all nodes are within" in ended[0].out and "ok       all-reduce " in ended[0].out
    else:
        for host in hosts:
            assert f"problem  network          {host.name}: " in ended[0].out
            assert f"set GLOO_SOCKET_IFNAME to the one that reaches the other nodes: {host.interface}" in ended[0].out
        assert "problem  all-reduce " in ended[0].out
