"""What can be wrong with one machine before a run: devices, network, folders, locks, limits. Changes nothing."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from ds_gpt.config import Composed, ConfigError, RunConfig
from ds_gpt.engine.deepspeed_import import ABANDONED_S
from ds_gpt.engine.node_folder import keep_compiled_code_here
from ds_gpt.engine.ranks import Ranks, require_free_port
from ds_gpt.model.counts import parameters
from ds_gpt.planner import predict

GIB, MIB = 2**30, 2**20
_PROBE_BYTES = MIB
_FOREIGN_MIB = 1024  # of GPU memory in use: more than idle desktops and contexts take
_SHM_BYTES = GIB  # a container has 64 MiB unless it is told otherwise
_FULL = 0.92  # of the memory: buffers, fragments and contexts take the rest
_INFINIBAND = Path("/dev/infiniband")
_DEFAULT_PORT = 29500  # of torchrun and of the deepspeed launcher


@dataclass(frozen=True)
class Check:
    """One check and what came of it.

    Attributes:
        name: what was checked.
        verdict: "problem" costs the run, "warning" may cost time or later trouble.
        saw: what was found, with values.
        why: why that matters; empty where all is well.
        fix: what to do about it.
    """

    name: str
    verdict: Literal["ok", "warning", "problem"]
    saw: str
    why: str = ""
    fix: str = ""


def of_error(name: str, error: ConfigError) -> list[Check]:
    """The problems of an error as failed checks."""
    return [Check(name, "problem", problem.what, problem.why, problem.fix) for problem in error.problems]


def of_this_node(ranks: Ranks, composed: Composed, run_dir: Path) -> Iterator[Check]:
    """Every check that one process of a node can make.

    Args:
        ranks: this process among the others.
        composed: what is to be trained.
        run_dir: where.
    """
    yield from devices(ranks)
    yield from memory(ranks, composed)
    yield from interfaces(ranks.device.type, ranks.spans_nodes)
    if ranks.world_size == 1:
        yield port(int(os.environ.get("MASTER_PORT", _DEFAULT_PORT)))
    yield folder(run_dir)
    yield disk(composed.run, run_dir)
    if ranks.spans_nodes:
        keep_compiled_code_here()
    yield extension_locks()
    yield shared_memory(ranks)
    yield from limits(composed.hardware.world_size)


def devices(ranks: Ranks) -> Iterator[Check]:
    """The GPUs that PyTorch sees, and what the driver says of them."""
    rows = nvidia_smi("index,name,memory.used,memory.total,ecc.errors.uncorrected.volatile.total,driver_version")
    seen = torch.cuda.device_count()
    if seen == 0 and rows:
        hidden = "CUDA_VISIBLE_DEVICES" in os.environ
        cause = f"CUDA_VISIBLE_DEVICES = '{os.environ['CUDA_VISIBLE_DEVICES']}'" if hidden else f"PyTorch {torch.__version__} with driver {rows[0][5]}"
        fix = "unset it" if hidden else "install the PyTorch of this driver's CUDA (pytorch.org), or a newer driver"
        yield Check("devices", "problem", f"{len(rows)} x {rows[0][1]} here, and PyTorch sees none: {cause}", "it would train on the CPU", fix)
        return
    if seen == 0:
        cores = len(os.sched_getaffinity(0))
        verdict: Literal["ok", "warning"] = "ok" if ranks.local_world_size <= cores else "warning"
        why, fix = ("", "") if verdict == "ok" else ("ranks that share a core wait for each other", f"start {cores} or fewer")
        own = f"{ranks.local_world_size} rank{'s' * (ranks.local_world_size > 1)}"
        yield Check("devices", verdict, f"no GPU; {cores} CPU core{'s' * (cores > 1)} for {own}, over gloo", why, fix)
        return
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    if nccl is None:
        yield Check("devices", "problem", f"PyTorch {torch.__version__} has no NCCL", "GPUs talk over it", "install a build of PyTorch that has it")
    yield Check("devices", "ok", f"{seen} x {torch.cuda.get_device_name(0)}, NCCL {nccl}" + (f", driver {rows[0][5]}" if rows else ""))
    for index, name, used_mib, total_mib, ecc, _ in rows:
        if used_mib.isdigit() and int(used_mib) > _FOREIGN_MIB:
            why = "a plan that just fits would run out of memory, and another process takes from the speed"
            saw = f"GPU {index} ({name}): {used_mib} of {total_mib} MiB are in use"
            yield Check("devices", "warning", saw, why, "nvidia-smi names the processes; leave this GPU out by CUDA_VISIBLE_DEVICES")
        if ecc.isdigit() and int(ecc) > 0:
            why = "its memory gave wrong values since it was last reset: crashes, or a spoiled run"
            yield Check("devices", "problem", f"GPU {index} ({name}): {ecc} uncorrected ECC errors", why, "leave it out and have it reset or replaced")


def memory(ranks: Ranks, composed: Composed) -> Iterator[Check]:
    """Whether a step fits, as ``ds-gpt plan`` foresees it; nothing where the planner has no figures for the run."""
    foreseen = predict(composed)
    if foreseen is None:
        return
    if ranks.device.type == "cuda":
        needed, room, where = foreseen.peak_bytes, torch.cuda.get_device_properties(ranks.device).total_memory, "the GPU"
    else:
        needed, room, where = ranks.local_world_size * foreseen.peak_bytes, psutil.virtual_memory().total, "this machine"
    saw = f"the step of {composed.run.name} needs {needed / GIB:,.3g} GiB by plan, of {room / GIB:,.1f} GiB of {where}"
    if needed > _FULL * room:
        verdict: Literal["warning", "problem"] = "problem" if needed > room else "warning"
        yield Check("memory", verdict, saw, "it would run out of memory, perhaps in the middle of the run", "ds-gpt plan --why says which settings need less")
    else:
        yield Check("memory", "ok", saw)


def nvidia_smi(query: str) -> list[list[str]]:
    """The fields of every GPU; nothing where there is no driver."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[field.strip() for field in line.split(",")] for line in printed.splitlines() if line.strip()]


def interfaces(kind: str, several: bool) -> Iterator[Check]:
    """Whether the network interface that will be used leads to other nodes."""
    variable = "NCCL_SOCKET_IFNAME" if kind == "cuda" else "GLOO_SOCKET_IFNAME"
    addresses = {name: [a.address for a in found if a.family in (socket.AF_INET, socket.AF_INET6)] for name, found in psutil.net_if_addrs().items()}
    up = [name for name, state in psutil.net_if_stats().items() if state.isup and addresses.get(name)]
    outward = [name for name in up if name != "lo"]
    remedy = f"set {variable} to the one that reaches the other nodes: {', '.join(outward) or 'none is up here'}"
    value = os.environ.get(variable)
    if value:
        chosen = _chosen(value, up, exact=kind == "cpu")
        if not chosen:
            yield Check("network", "problem", f"{variable} = '{value}': no such interface is up ({', '.join(up)})", "the ranks would not connect", remedy)
        elif several and not set(chosen) - {"lo"}:
            yield Check("network", "problem", f"{variable} = '{value}' is the loopback", "it does not lead to other nodes", remedy)
        else:
            yield Check("network", "ok", f"{variable} = '{value}': {', '.join(chosen)}")
        return
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = ""
    if not address or address.startswith("127."):
        saw = f"the name of this machine, {platform.node()}, leads to {address or 'no address'}, and {variable} is not set"
        if several and kind == "cpu":
            yield Check("network", "problem", saw, "gloo takes that address, where other nodes cannot reach it", remedy)
        else:
            yield Check("network", "ok", f"{saw}: " + ("fine on one node" if not several else f"NCCL chooses among {', '.join(outward)}"))
    else:
        yield Check("network", "ok", f"{platform.node()} is {address}; up: {', '.join(up)}")


def _chosen(value: str, up: Sequence[str], exact: bool) -> list[str]:
    """Interfaces that a ..._SOCKET_IFNAME chooses. NCCL's are prefixes, ``=`` for whole names, ``^`` for all but these."""
    excluded = value.startswith("^")
    names = value.lstrip("^=").split(",")
    whole = exact or value.lstrip("^").startswith("=")
    matches = [name for name in up if any(name == wanted if whole else name.startswith(wanted) for wanted in names)]
    return [name for name in up if name not in matches] if excluded else matches


def port(number: int) -> Check:
    """Whether ranks could meet at this port of this machine."""
    try:
        require_free_port(number)
    except ConfigError as error:
        problem = error.problems[0]
        return Check("port", "warning", problem.what, problem.why, problem.fix)
    return Check("port", "ok", f"{number} is free")


def existing(run_dir: Path) -> Path:
    """The folder, or the nearest above it that is there: what a run would be made in."""
    return next((path for path in (run_dir, *run_dir.parents) if path.exists()), Path("."))


def folder(run_dir: Path) -> Check:
    """Whether a file can be written, synced and removed where the run will be."""
    where = existing(run_dir)
    probe = where / f".ds_gpt-doctor-{platform.node()}-{os.getpid()}"
    try:
        with probe.open("xb") as file:
            file.write(b"\0" * _PROBE_BYTES)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        saw = f"'{where.absolute()}' cannot be written: {error.strerror}"
        return Check("run folder", "problem", saw, "the run would leave nothing behind", "free space, mend its permissions, or choose another with --run-dir")
    finally:
        if probe.is_file():
            probe.unlink()
    return Check("run folder", "ok", f"'{where.absolute()}' can be written")


def disk(run: RunConfig, run_dir: Path) -> Check:
    """Whether the checkpoints that a run keeps fit beside each other: fp32 weights and two moments, 12 bytes a parameter."""
    unknown = run.model.vocab_size == "auto"
    model = run.model.model_copy(update={"vocab_size": 1}) if unknown else run.model
    one = 12 * parameters(model)
    saves = run.training.steps // run.checkpoints.every if run.checkpoints.every else 1
    kept = saves if run.checkpoints.keep_last is None else min(saves, run.checkpoints.keep_last)
    kept += run.checkpoints.keep_best
    needed = one * (kept + 1)  # the one being written
    where = existing(run_dir)
    free = shutil.disk_usage(where).free
    least = "at least " if unknown else ""  # the embedding's share is known when the text is
    saw = f"{free / GIB:,.1f} GiB free at '{where.absolute()}'; {run.name} keeps {kept} checkpoints and writes one, {least}{needed / GIB:,.3g} GiB"
    if free < needed:
        return Check("disk", "problem", saw, "a run that cannot save stops", "free space, another --run-dir, or a lower checkpoints.keep_last")
    return Check("disk", "ok", saw)


def extension_locks() -> Check:
    """Locks of compilations that nobody finishes. PyTorch waits for one as long as the file is there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")
    ages = {}
    for lock in root.glob("**/lock"):
        try:
            ages[lock] = time.time() - lock.stat().st_mtime
        except OSError:  # released meanwhile
            continue
    if stale := {lock: age for lock, age in ages.items() if age > ABANDONED_S}:
        saw = ", ".join(f"'{lock}' is {age / 60:,.0f} minutes old" for lock, age in stale.items())
        why = "its maker was probably killed; whoever needs this op of DeepSpeed (offload, fused Adam) ends in an error"
        return Check("extension locks", "problem", saw, why, "if no compiler runs, delete it")
    return Check("extension locks", "ok", f"none is stale in '{root}'" + (f"; {len(ages)} held" if ages else ""))


def shared_memory(ranks: Ranks) -> Check:
    """Room in /dev/shm, through which NCCL's ranks of one node may talk."""
    try:
        space = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Check("shared memory", "warning", f"/dev/shm: {error.strerror}", "ranks of one node may talk through it", "mount a tmpfs there")
    saw = f"{space.free / GIB:,.2f} of {space.total / GIB:,.2f} GiB free in /dev/shm"
    if ranks.device.type == "cuda" and space.free < _SHM_BYTES:
        why = "NCCL fails where it does not fit ('unhandled system error')"
        return Check("shared memory", "warning", saw, why, "start the container with --ipc=host or --shm-size=16g, and remove what is left there")
    return Check("shared memory", "ok", saw)


def limits(world_size: int) -> Iterator[Check]:
    """The limits of this process that a large run meets."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 256 + 8 * world_size  # every rank may connect to every other, once a process group
    if files != resource.RLIM_INFINITY and files < needed:
        why = f"{world_size} ranks connect to each other: 'too many open files'"
        yield Check("limits", "warning", f"{files} open files (ulimit -n)", why, f"ulimit -n {max(needed, 65536)} on every node")
    else:
        yield Check("limits", "ok", f"{files} open files")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if _INFINIBAND.exists() and locked != resource.RLIM_INFINITY:
        saw = f"{locked / MIB:,.0f} MiB of locked memory (ulimit -l), and this machine has InfiniBand"
        yield Check("limits", "warning", saw, "NCCL has to lock the memory that it sends from", "ulimit -l unlimited (docker: --ulimit memlock=-1)")
