"""Which rank this process is, on which device, and how it meets the others."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch

from ds_gpt.config import ConfigError, Hardware, Problem
from ds_gpt.engine.deepspeed_import import import_deepspeed
from ds_gpt.engine.node_folder import keep_compiled_code_here, node_folder

_MEETING_MINUTES = 30.0  # that a rank waits for the others to arrive; DEEPSPEED_TIMEOUT overrides it
_FOR_EVER_S = 1e8
# glibc's mallopt(3): its numbers for what may be set, and what the environment may have set already.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of the run, as its launcher numbered them.

    Attributes:
        rank: 0 to world_size - 1 over all nodes.
        world_size: processes in the run.
        local_rank: 0 to local_world_size - 1 on this node; also the index of its GPU.
        local_world_size: processes on this node.
        device: the device this rank computes on.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device

    @classmethod
    def from_environment(cls) -> Ranks:
        """Read what the deepspeed launcher, torchrun or nobody (one process) set.

        Raises:
            ConfigError: more ranks on this node than it has GPUs.
        """
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", world_size)))
        gpus = torch.cuda.device_count()
        if gpus and local_world_size > gpus:
            raise ConfigError(
                Problem(
                    f"{local_world_size} ranks were asked for on this node, which has {gpus} GPU{'s' if gpus > 1 else ''}",
                    "each rank needs a GPU of its own",
                    f"launch with --num_gpus {gpus} or fewer (or set CUDA_VISIBLE_DEVICES= to train on the CPU)",
                )
            )
        device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
        return cls(int(os.environ.get("RANK", 0)), world_size, local_rank, local_world_size, device)

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    @property
    def spans_nodes(self) -> bool:
        """Whether there are ranks on other nodes too."""
        return self.world_size > self.local_world_size

    def hardware(self) -> Hardware:
        """What the configuration needs to know about these devices."""
        if self.device.type == "cpu":
            # bf16 without matrix units (AMX) is emulated: 4 to 8 times slower than fp32, so "auto" does not pick it.
            return Hardware("cpu", platform.processor() or "CPU", self.world_size, bf16=False)
        name = torch.cuda.get_device_name(self.device)
        ampere_or_newer = torch.cuda.get_device_capability(self.device) >= (8, 0)
        return Hardware("cuda", name, self.world_size, bf16=ampere_or_newer)

    def connect(self, init_method: str | None = None) -> None:
        """Set up the device and join the process group; every rank must call it.

        Args:
            init_method: URL of the rendezvous, where the launcher's is not wanted.

        Raises:
            ConfigError: the rendezvous port is taken.
        """
        _set_up_device(self)
        if self.spans_nodes:
            keep_compiled_code_here()
        # DeepSpeed asks the environment, not the process group; a process started by hand has none of these. Without the
        # last one, ZeRO-3 on a CPU asks a process, `numactl`, at every reduction how many devices there are.
        of_this_node = {"LOCAL_RANK": str(self.local_rank), "LOCAL_SIZE": str(self.local_world_size)}
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.world_size), **of_this_node)
        deepspeed = import_deepspeed(self.device.type)
        deepspeed.init_distributed(
            dist_backend="nccl" if self.device.type == "cuda" else "gloo",
            auto_mpi_discovery=False,
            verbose=False,
            init_method=init_method or _rendezvous(self),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(minutes=float(os.environ.get("DEEPSPEED_TIMEOUT", _MEETING_MINUTES))),
        )

    def wait_at_least(self, seconds: float) -> None:
        """Let collectives wait so long from now on, in every process group that there is.

        Without it NCCL's or gloo's own time limit, 10 or 30 minutes, ends a rank before a watchdog with more patience can
        say where the ranks stand. A limit that the user set by DEEPSPEED_TIMEOUT stays.
        """
        if self.world_size == 1 or "DEEPSPEED_TIMEOUT" in os.environ:
            return
        limit = timedelta(seconds=min(max(seconds, 60 * _MEETING_MINUTES), _FOR_EVER_S))
        for group in torch.distributed.distributed_c10d._world.pg_map:
            torch.distributed.distributed_c10d._set_pg_timeout(limit, group)

    def store(self, timeout: timedelta) -> torch.distributed.Store:
        """The rendezvous' key-value store alone, without waiting for all ranks; rank 0 has to outlive the others.

        Raises:
            ConfigError: the rendezvous port is taken.
            torch.distributed.DistError: it cannot be reached within `timeout`.
        """
        scheme, _, path = _rendezvous(self).partition("://")
        if scheme == "file":
            store = torch.distributed.FileStore(path, self.world_size)
            store.set_timeout(timeout)
            return store
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun, which has opened the port
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        is_server = self.is_first and not hosted
        return torch.distributed.TCPStore(host, port, is_master=is_server, timeout=timeout, wait_for_workers=False)

    def disconnect(self) -> None:
        """Leave the process group."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def sum(self, values: Sequence[float] | torch.Tensor) -> list[float]:
        """Element-wise sum over all ranks, in float64; every rank must call it."""
        total = torch.as_tensor(values, dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            torch.distributed.all_reduce(total)
        return total.tolist()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.sum([0.0])

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order, on every rank; every rank must call it."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def agree(self, value: Any) -> Any:
        """Rank 0's picklable value, on every rank; every rank must call it."""
        box = [value]
        if self.world_size > 1:
            torch.distributed.broadcast_object_list(box, src=0, device=self.device)
        return box[0]


def _set_up_device(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
        torch.set_float32_matmul_precision("high")  # TF32 on Ampere and newer: 8 x fp32's rate, fp32's range
        return
    _keep_freed_memory()
    # Every rank would otherwise start one thread a core, and they would fight over the cores. torchrun sets
    # OMP_NUM_THREADS=1 whether or not cores are idle, so there it says nothing about what the user wants.
    if "OMP_NUM_THREADS" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    threads = max(1, len(os.sched_getaffinity(0)) // ranks.local_world_size)
    # Even with the number that is set already, the call turns off MKL's choice of threads for each product: 5% slower.
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def _keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next one.

    By default blocks go back to the system, some at every step, as the heap happens to lie: up to 3,000 page faults a step
    of the quickstart, 5% of its time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # another C library has none
    if mallopt is None or any(name in os.environ for name in _MALLOC_VARIABLES):
        return
    # glibc before 2.35 takes no more than 32 MiB for the first. To set the second alone would hold the first at 128 KiB, as
    # either ends glibc's own adjustment of it: every larger block would come from the system and go back there.
    if any(mallopt(_M_MMAP_THRESHOLD, most) for most in (2**30, 2**25)):
        mallopt(_M_TRIM_THRESHOLD, 2**30)


def _rendezvous(ranks: Ranks) -> str:
    """The URL at which the ranks meet.

    Under the deepspeed launcher all jobs meet at port 29500, so that a second job on the machine dies or, worse, talks
    to the first. Ranks of one node can meet through a file instead, named after the launcher process that is their
    common parent; a single process needs nobody.
    """
    parent = psutil.Process().parent()
    if ranks.world_size == 1:
        return _rendezvous_file(psutil.Process())
    launched_by_deepspeed = parent is not None and any("deepspeed.launcher.launch" in part for part in parent.cmdline())
    if launched_by_deepspeed and ranks.local_world_size == ranks.world_size:
        return _rendezvous_file(parent)
    if ranks.is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        require_free_port(int(os.environ["MASTER_PORT"]))
    return "env://"


def _rendezvous_file(process: psutil.Process) -> str:
    """A URL that no other job has: a process id alone would be met again."""
    folder = node_folder()
    for file in folder.iterdir():  # left by jobs that were killed
        pid = file.name.partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            file.unlink(missing_ok=True)
    return f"file://{folder / f'{process.pid}-{process.create_time()}'}"


def require_free_port(port: int) -> None:
    """Raises ConfigError where the ranks could not meet at this port of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))  # as the rendezvous does: MASTER_ADDR may be a name that leads here from outside only
        except OSError as error:
            raise ConfigError(
                Problem(
                    f"the rendezvous port {port} cannot be opened: {error.strerror}",
                    "the ranks meet there; another run probably holds it",
                    "launch with another --master_port",
                )
            ) from None
