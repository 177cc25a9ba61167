"""Which rank a process is, and how ranks meet, under each launcher."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from forked_ranks import run_ranks

from ds_gpt.config import ConfigError
from ds_gpt.engine import ranks as ranks_module
from ds_gpt.engine.node_folder import node_folder
from ds_gpt.engine.ranks import Ranks

CPU = torch.device("cpu")
DEEPSPEED = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_SIZE": "4", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}
LAUNCHER_SETS = {*DEEPSPEED, *TORCHRUN, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"}


@pytest.fixture(autouse=True)
def nobody_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_SETS:
        monkeypatch.delenv(name, raising=False)


def launched(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], gpus: int = 0) -> Ranks:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return Ranks.from_environment()


# ---- Who am I -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environment", [DEEPSPEED, TORCHRUN], ids=["deepspeed", "torchrun"])
def test_a_launcher_numbers_the_ranks(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(monkeypatch, environment) == Ranks(5, 8, 1, 4, CPU)


def test_without_a_launcher_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = launched(monkeypatch, {})
    assert ranks == Ranks(0, 1, 0, 1, CPU)
    assert ranks.is_first and not Ranks(1, 2, 1, 2, CPU).is_first


def test_each_rank_has_the_gpu_of_its_place_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(monkeypatch, DEEPSPEED, gpus=4).device == torch.device("cuda", 1)


@pytest.mark.parametrize("environment", [DEEPSPEED, TORCHRUN], ids=["deepspeed", "torchrun"])
def test_more_ranks_than_gpus_are_refused(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"(?s)4 ranks.*has 3 GPUs.*--num_gpus 3"):
        launched(monkeypatch, environment, gpus=3)


def test_hardware_says_where_bf16_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Ranks(1, 2, 1, 2, CPU).hardware()
    assert (cpu.kind, cpu.world_size, cpu.bf16) == ("cpu", 2, False) and cpu.name
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    for capability, bf16 in (((8, 0), True), ((9, 0), True), ((7, 5), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        gpu = Ranks(0, 8, 0, 8, torch.device("cuda", 0)).hardware()
        assert (gpu.kind, gpu.name, gpu.world_size, gpu.bf16) == ("cuda", "NVIDIA A100-SXM4-40GB", 8, bf16)


# ---- Threads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "local_ranks", "threads"),
    [
        ({}, 1, []),  # torch's default; to set it again would cost speed
        ({}, 2, [4]),
        ({}, 3, [2]),
        ({}, 16, [1]),
        ({"OMP_NUM_THREADS": "3"}, 2, []),  # the user's: torch has read it
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, 2, [4]),  # torchrun's, which nobody asked for
    ],
)
def test_ranks_share_the_cores(environment: dict[str, str], local_ranks: int, threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ranks_module._set_up_device(Ranks(0, local_ranks, 0, local_ranks, CPU))
    assert found == threads


# ---- Memory -------------------------------------------------------------------------------------------------------------


PAGE_FAULTS = """
import resource, torch
from ds_gpt.engine import ranks
ranks._set_up_device(ranks.Ranks(0, 1, 0, 1, torch.device("cpu")))
faults = []
for _ in range(15):
    torch.ones(2**24)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[4])  # the first few make the heap grow
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
@pytest.mark.parametrize(("stated", "kept"), [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "131072"}, False)], ids=["ours", "the user's"])
def test_what_a_step_frees_the_next_one_has(stated: dict[str, str], kept: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ranks_module._MALLOC_VARIABLES}
    command = [sys.executable, "-c", PAGE_FAULTS]
    faults = int(subprocess.run(command, env={**environment, **stated}, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert (faults < 100) == kept, f"{faults} page faults"


@pytest.mark.parametrize(("most", "asked"), [(2**40, [-3, -1]), (2**25, [-3, -3, -1]), (0, [-3, -3])], ids=["new", "before 2.35", "none"])
def test_an_older_glibc_is_asked_for_what_it_takes(most: int, asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limit for blocks of the heap is 32 MiB; the threshold of trimming alone would make it slower than untouched."""
    for name in ranks_module._MALLOC_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    parameters: list[int] = []

    def mallopt(parameter: int, value: int) -> int:
        parameters.append(parameter)
        return int(parameter == -1 or value <= most)

    monkeypatch.setattr(ranks_module.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    ranks_module._keep_freed_memory()
    assert parameters == asked


# ---- Talking ------------------------------------------------------------------------------------------------------------


def talk(ranks: Ranks) -> dict[str, Any]:
    found: dict[str, Any] = {
        "sum": ranks.sum([ranks.rank + 1.0, 0.1]),
        "exact": ranks.sum(torch.tensor([2.0**24 if ranks.is_first else 1.0])),
        "agree": ranks.agree(f"rank {ranks.rank}"),
    }
    if not ranks.is_first:
        time.sleep(0.5)
    before = time.monotonic()
    ranks.barrier()
    found["waited_s"] = time.monotonic() - before
    return found


def test_two_ranks_sum_agree_and_wait() -> None:
    first, second = run_ranks(2, talk)
    for found in (first, second):
        assert found["sum"] == [3.0, 0.2]
        assert found["exact"] == [2.0**24 + 1]  # not a float32
        assert found["agree"] == "rank 0"
    assert first["waited_s"] > 0.3


def test_one_rank_needs_no_process_group() -> None:
    alone = Ranks(0, 1, 0, 1, CPU)
    assert alone.sum([1.5, 2.0]) == [1.5, 2.0]
    assert alone.agree("me") == "me"
    alone.barrier()
    alone.disconnect()
    assert not torch.distributed.is_initialized()


def wait_longer_than_the_limit(ranks: Ranks, told: bool) -> bool:
    """Whether rank 0 waits for rank 1 in each of two groups, both made with a limit of a second."""
    second = torch.distributed.new_group(timeout=timedelta(seconds=1))
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    for group in (None, second):
        torch.distributed.barrier(group)  # they connect
    if told:
        ranks.wait_at_least(60)
    try:
        for group in (None, second):
            if not ranks.is_first:
                time.sleep(2)
            torch.distributed.barrier(group)
    except RuntimeError:
        Ranks.barrier = lambda self: None  # the harness's last word, for which there is no group any more
        return False
    return True


def test_collectives_wait_for_as_long_as_a_watchdog_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPSPEED_TIMEOUT", raising=False)
    assert run_ranks(2, wait_longer_than_the_limit, True) == [True, True]
    assert run_ranks(2, wait_longer_than_the_limit, False) == [False, False]


# ---- Meeting ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rendezvous_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"ds_gpt-{os.getuid()}"


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[psutil.Process]:
    """A process that looks like DeepSpeed's launcher and passes for this one's parent."""
    program = "import time; print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program, "-m", "deepspeed.launcher.launch"], stdout=subprocess.PIPE)
    process.stdout.readline()  # it is there, with the command line of its own
    stand_in = psutil.Process(process.pid)
    monkeypatch.setattr(psutil.Process, "parent", lambda self: stand_in)
    yield stand_in
    process.kill()
    process.wait()


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_ranks_of_one_node_meet_in_a_file_of_their_launcher(launcher: psutil.Process, rendezvous_folder: Path) -> None:
    urls = {ranks_module._rendezvous(Ranks(rank, 2, rank, 2, CPU)) for rank in range(2)}
    assert urls == {f"file://{rendezvous_folder / f'{launcher.pid}-{launcher.create_time()}'}"}
    assert rendezvous_folder.stat().st_mode & 0o777 == 0o700


def test_a_single_process_meets_itself(rendezvous_folder: Path) -> None:
    url = ranks_module._rendezvous(Ranks(0, 1, 0, 1, CPU))
    assert url.startswith(f"file://{rendezvous_folder / str(os.getpid())}-")


def test_files_of_jobs_that_were_killed_are_removed(launcher: psutil.Process, rendezvous_folder: Path) -> None:
    rendezvous_folder.mkdir()
    stale, living = rendezvous_folder / f"{dead_pid()}-1.5", rendezvous_folder / f"{os.getpid()}-1.5"
    stale.touch()
    living.touch()
    ranks_module._rendezvous(Ranks(0, 2, 0, 2, CPU))
    assert not stale.exists() and living.exists()


def test_a_folder_of_another_user_is_refused(rendezvous_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous_folder.symlink_to("/")
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    (rendezvous_folder.parent / "ds_gpt-4242").mkdir()
    with pytest.raises(ConfigError, match=r"(?s)ds_gpt-4242' belongs to user .*TMPDIR"):
        node_folder()


@pytest.mark.parametrize("nodes", [1, 2])
def test_nodes_compile_each_for_itself(nodes: int, rendezvous_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    monkeypatch.setattr(ranks_module, "import_deepspeed", lambda kind: SimpleNamespace(init_distributed=lambda **_: None))
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    Ranks(0, 2, 0, 2 // nodes, CPU).connect("file:///nowhere")
    where = os.environ.pop("TORCH_EXTENSIONS_DIR", "")
    assert where.startswith(f"{rendezvous_folder}/torch-{torch.__version__}-") == (nodes == 2)
    assert os.environ["TRITON_CACHE_DIR"] == "/mine"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def test_ranks_of_several_nodes_meet_at_the_launchers_port(launcher: psutil.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    # A name that leads here from outside only, as that of a Kubernetes service does.
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    assert {ranks_module._rendezvous(Ranks(rank, 4, rank % 2, 2, CPU)) for rank in range(4)} == {"env://"}


def test_torchruns_ranks_meet_at_its_own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:  # by torchrun's agent
        held.bind(("127.0.0.1", 0))
        held.listen()
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1]), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert ranks_module._rendezvous(Ranks(0, 2, 0, 2, CPU)) == "env://"


def connect_to_a_port_in_use(_: Ranks) -> tuple[int, str, float]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        begin = time.monotonic()
        with pytest.raises(ConfigError) as error:
            Ranks(0, 4, 0, 2, CPU).connect()
        return port, str(error.value), time.monotonic() - begin


def test_a_port_in_use_is_named_at_once() -> None:
    ((port, message, elapsed_s),) = run_ranks(1, connect_to_a_port_in_use)
    assert f"port {port} " in message and "--master_port" in message
    assert elapsed_s < 2
