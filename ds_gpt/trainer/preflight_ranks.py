"""All ranks together before a run: who answers, what differs between them, and whether they can talk fast enough."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from ds_gpt import __version__
from ds_gpt.config import Composed, ConfigError, ParallelConfig
from ds_gpt.engine.grid import said_apart
from ds_gpt.engine.meeting import Meeting, Reduction, all_reduce
from ds_gpt.engine.ranks import Ranks
from ds_gpt.planner.clock import Constants
from ds_gpt.planner.devices import DEVICES
from ds_gpt.trainer.preflight import MIB, Check, existing, of_error, of_this_node
from ds_gpt.trainer.run_folder import git_commit
from ds_gpt.trainer.start import appears

_SKEW_S = 1.0  # times of files and log lines are compared between nodes
_SLOW = 0.5  # of what the planner expects of the link
# What must be the same on every rank, and what comes of it where it is not.
_SAME = {
    "torch": "they may not understand each other, or not compute the same",
    "deepspeed": "they would call other collectives, and wait for each other for ever",
    "ds_gpt": "they would call other collectives, and wait for each other for ever",
    "commit": "they run different code",
    "nccl": "different versions of NCCL do not connect",
    "python": "each brings its own text as data.corpus = python_docs",
    "numpy": "the order of the data is computed with it",
}


def preflight(
    ranks: Ranks, composed: Composed, run_dir: Path, deadline_s: float, report: Callable[[Sequence[Check]], None]
) -> bool:
    """Make every check; every rank must call it. Nothing is waited for longer than a few deadlines.

    Args:
        ranks: this process among the others.
        composed: what is to be trained.
        run_dir: where.
        deadline_s: how long a rank is waited for.
        report: told what was found: on rank 0, and on the first rank of a node that cannot reach rank 0.

    Returns:
        Whether any rank found a problem; the same on every rank.
    """
    with _bounded("checking this machine", ranks, 2 * deadline_s):  # by then rank 0 has named this rank
        own = list(of_this_node(ranks, composed, run_dir)) if ranks.local_rank == 0 else []
        known = facts(ranks)
    try:
        # A TCPStore waits for ever, whatever its timeout, where a stranger holds the port and does not speak.
        with _bounded("meeting the other ranks", ranks, 2 * deadline_s):
            meeting = Meeting(ranks, deadline_s) if ranks.world_size > 1 else None
    except ConfigError as error:
        own, meeting = [*own, *of_error("port", error)], None
    except torch.distributed.DistError as error:
        own, meeting = [*own, _no_first_rank(deadline_s, str(error).partition("\n")[0])], None
    if meeting is None:
        if ranks.local_rank == 0:
            report(own)
        return _failed(own)
    meeting.tell("report", {"facts": known, "checks": [asdict(check) for check in own]})
    return _lead(meeting, composed.run.parallel, run_dir, report) if ranks.is_first else _follow(meeting, own, report)


def _lead(
    meeting: Meeting, parallel: ParallelConfig, run_dir: Path, report: Callable[[Sequence[Check]], None]
) -> bool:
    """Rank 0's part: ask, compare, report, and tell the verdict."""
    reports = meeting.hear_all("report")
    silent = sorted(set(range(meeting.ranks.world_size)) - set(reports))
    known = {rank: note["facts"] for rank, note in reports.items()}
    checks = [*_merged(reports), *differences(known)]
    clocks = {facts["node"]: rank for rank, facts in sorted(known.items(), reverse=True) if facts["node"] != platform.node()}
    meeting.tell("go", {"on": not silent, "clocks": list(clocks.values())})
    if silent:
        checks.append(_silent(silent, meeting.deadline_s, "before the ranks met"))
    else:
        checks += [nodes(known, parallel), *_clocks(meeting, clocks), *_shared(meeting, run_dir, known), *_all_reduce(meeting, known)]
    report(checks)
    meeting.tell("verdict", _failed(checks))
    others = set(range(meeting.ranks.world_size)) - {0}
    meeting.hear_all("bye", others)  # the store ends with this rank, and one that was late may still come
    return _failed(checks)


def _follow(meeting: Meeting, own: Sequence[Check], report: Callable[[Sequence[Check]], None]) -> bool:
    """Every other rank's part, in the same order."""
    patience_s = 2 * meeting.deadline_s  # rank 0 waits for the others meanwhile
    go = meeting.hear("go", 0, patience_s)
    if go is None:
        if meeting.ranks.local_rank == 0:
            report([*own, _no_first_rank(patience_s, "the rendezvous answered, the rank did not")])
        return True
    if go["on"]:
        if meeting.ranks.rank in go["clocks"] and meeting.hear(f"clock of {meeting.ranks.rank}", 0, patience_s):
            meeting.tell("clock", time.time())
        probe = meeting.hear("probe", 0, patience_s)
        meeting.tell("sees", probe is None or appears(Path(probe), meeting.deadline_s / 2))
        meeting.tell("ready", True)
        if meeting.hear("start", 0, patience_s):
            meeting.tell("reduced", _reduce(meeting)[1])
    verdict = meeting.hear("verdict", 0, 2 * patience_s)
    meeting.tell("bye", True)
    return verdict is not False


def facts(ranks: Ranks) -> dict[str, Any]:
    """What ranks compare."""
    cuda = ranks.device.type == "cuda"
    return {
        "node": platform.node(),
        "device": torch.cuda.get_device_name(ranks.device) if cuda else "CPU",
        "torch": torch.__version__,
        "deepspeed": version("deepspeed"),
        "ds_gpt": __version__,
        "commit": git_commit(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "python": platform.python_version(),
        "numpy": version("numpy"),
    }


def nodes(known: Mapping[int, Mapping[str, Any]], parallel: ParallelConfig) -> Check:
    """Which nodes there are, and whether those ranks that talk most lie together."""
    of_ranks = [known[rank]["node"] for rank in range(len(known))]
    names = list(dict.fromkeys(of_ranks))
    counts = [of_ranks.count(name) for name in names]
    each = f", {_counted(counts[0])} each" if len(set(counts)) == 1 and len(names) > 1 else ""
    listed = ", ".join(name if each else f"{name} with {_counted(count)}" for name, count in zip(names, counts, strict=True))
    saw = f"{len(names)}: {listed}{each}"
    if text := said_apart(parallel, of_ranks):
        fix = f"make the ranks of each node a multiple of parallel.tensor x parallel.sequence = {parallel.tensor * parallel.sequence}"
        return Check("nodes", "warning", f"{saw}; {text}", "a network is many times slower than the links within a node", fix)
    return Check("nodes", "ok", saw)


def _counted(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"


def differences(known: Mapping[int, Mapping[str, Any]]) -> Iterator[Check]:
    """What is not the same everywhere, by rank."""
    same = True
    for key in ("device", *_SAME):
        found: dict[Any, list[int]] = defaultdict(list)
        for rank, values in known.items():
            found[values[key]].append(rank)
        if len(found) == 1:
            continue
        same = False
        saw = f"{key}: " + "; ".join(f"{value} on {_named(ranks, known)}" for value, ranks in found.items())
        if key == "device":
            yield Check("versions", "warning", saw, "every step takes as long as on the slowest", "use devices of one kind")
        else:
            yield Check("versions", "problem", saw, _SAME[key], "give every node the same environment and checkout")
    if same:
        first = known[0]
        yield Check("versions", "ok", ", ".join(f"{key} {first[key]}" for key in _SAME if first[key]) + ": the same on all ranks")


def _merged(reports: Mapping[int, Mapping[str, Any]]) -> Iterator[Check]:
    """The nodes' own checks; where several found the same it is said once, and who found it where not all did."""
    found: dict[Check, list[str]] = defaultdict(list)
    for _, note in sorted(reports.items()):
        for check in note["checks"]:
            found[Check(**check)].append(note["facts"]["node"])
    all_nodes = {note["facts"]["node"] for note in reports.values()}
    for check, nodes in found.items():
        where = "" if set(nodes) == all_nodes else f"{', '.join(nodes)}: "
        yield Check(check.name, check.verdict, where + check.saw, check.why, check.fix)


def _clocks(meeting: Meeting, nodes: Mapping[str, int]) -> Iterator[Check]:
    """How far the nodes' clocks are from rank 0's, by question and answer (Cristian 1989)."""
    offsets = {}
    for node, rank in nodes.items():
        asked = time.time()
        meeting.tell(f"clock of {rank}", True)
        answered, now = meeting.hear("clock", rank), time.time()
        if answered is not None:
            offsets[node] = (answered - (asked + now) / 2, (now - asked) / 2)
    apart = {node: (offset, error) for node, (offset, error) in offsets.items() if abs(offset) - error > _SKEW_S}
    if apart:
        saw = ", ".join(f"{node} is {abs(offset):.1f} s {'ahead' if offset > 0 else 'behind'}" for node, (offset, _) in apart.items())
        why = "times of files and of log lines lie: the newest run, what ninja has to build anew"
        yield Check("clock", "warning", f"{saw} of {platform.node()}", why, "synchronise the clocks: timedatectl set-ntp true")
    elif offsets:
        worst = max(abs(offset) + error for offset, error in offsets.values())
        yield Check("clock", "ok", f"all nodes are within {worst * 1e3:,.0f} ms of {platform.node()}")


def _shared(meeting: Meeting, run_dir: Path, known: Mapping[int, Mapping[str, Any]]) -> Iterator[Check]:
    """Whether a file that rank 0 makes where the run will be is seen by all."""
    where = existing(run_dir)
    probe = where / f".ds_gpt-doctor-{uuid4().hex}"
    try:
        probe.touch()
    except OSError:  # the node's own check says so
        meeting.tell("probe", None)
        return
    try:
        meeting.tell("probe", str(probe))
        seen = meeting.hear_all("sees", set(known) - {0})
    finally:
        probe.unlink(missing_ok=True)
    blind = sorted({known[rank]["node"] for rank, sees in seen.items() if not sees})
    if blind:
        saw = f"a file that rank 0 made in '{where.absolute()}' is not there on {', '.join(blind)}"
        why = "every rank writes its part of a checkpoint into the run's folder: none could be saved, or read"
        fix = "start in a folder that all nodes share, or give one of those as --run-dir"
        yield Check("shared folder", "problem", saw, why, fix)
    else:
        yield Check("shared folder", "ok", f"all ranks see what rank 0 writes in '{where.absolute()}'")


def _all_reduce(meeting: Meeting, known: Mapping[int, Mapping[str, Any]]) -> Iterator[Check]:
    """Sum tensors over all ranks, and say how fast."""
    ready = meeting.hear_all("ready", set(known) - {0})
    silent = sorted(set(known) - {0} - set(ready))
    meeting.tell("start", not silent)
    if silent:
        yield _silent(silent, meeting.deadline_s, "before the all-reduce")
        return
    found, error = _reduce(meeting)
    errors = dict.fromkeys(known, f"no word within {meeting.deadline_s:g} s more")
    errors |= {0: error} | meeting.hear_all("reduced", set(known) - {0})
    if failed := {rank: text for rank, text in errors.items() if text}:
        saw = "; ".join(f"{_named([rank], known)}: {text}" for rank, text in failed.items())
        fix = "set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME, open the firewall between the nodes, read NCCL_DEBUG=INFO"
        yield Check("all-reduce", "problem", saw, "the ranks met but their tensors do not come through", fix)
    else:
        yield _rate(meeting.ranks, found, known)


def _reduce(meeting: Meeting) -> tuple[list[Reduction], str]:
    """What was measured, or why it failed. In a thread: a collective that hangs cannot be ended, only left behind."""
    ended: list[tuple[list[Reduction], str]] = []

    def reduce() -> None:
        try:
            found = all_reduce(meeting)
        except RuntimeError as error:
            ended.append(([], str(error).partition("\n")[0] or type(error).__name__))
        else:
            ended.append((found, "" if all(each.right for each in found) else "the sum is wrong"))

    thread = threading.Thread(target=reduce, daemon=True)
    thread.start()
    thread.join(3 * meeting.deadline_s)
    return ended[0] if ended else ([], f"nothing for {3 * meeting.deadline_s:g} s, given up")


def _rate(ranks: Ranks, found: Sequence[Reduction], known: Mapping[int, Mapping[str, Any]]) -> Check:
    nodes = len({facts["node"] for facts in known.values()})
    sizes = ", ".join(f"{_size(each.size_bytes)} in {each.seconds * 1e3:,.2f} ms" for each in found)
    best = max(each.bus_bytes_per_s for each in found)
    saw = f"{sizes}; bus bandwidth up to {best / 1e9:,.2f} GB/s"
    device = next((device for device in DEVICES.values() if device.name == known[0]["device"]), None)
    if device is None:  # a CPU, or a GPU whose links are not in the planner's table
        return Check("all-reduce", "ok", saw)
    link = device.link if nodes == 1 else min(device.link, device.network * ranks.local_world_size)
    expected = Constants().link * link
    saw += f"; the planner counts on {expected / 1e9:,.0f} GB/s for {device.name} on {nodes} node{'s' * (nodes > 1)}"
    if best < _SLOW * expected:
        why = "reducing gradients would take longer than ds-gpt plan foresees"
        fix = "nvidia-smi topo -m shows whether NVLink is used; between nodes NCCL_DEBUG=INFO names the network"
        return Check("all-reduce", "warning", saw, why, fix)
    return Check("all-reduce", "ok", saw)


def _silent(ranks: Sequence[int], deadline_s: float, when: str) -> Check:
    saw = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} did not answer within {deadline_s:g} s, {when}"
    fix = "look for its process and its node: still importing from a slow disk (--deadline), dead, or without a way to rank 0"
    return Check("ranks", "problem", saw, "all others would wait for it", fix)


def _no_first_rank(waited_s: float, error: str) -> Check:
    saw = f"{platform.node()} waited {waited_s:g} s for rank 0{_rendezvous()}: {error}"
    fix = "check that its node runs, that MASTER_ADDR leads to it, and that no firewall stands before the port"
    return Check("ranks", "problem", saw, "the ranks meet there", fix)


def _rendezvous() -> str:
    """Where ranks of several nodes meet, as their launcher told them."""
    address = os.environ.get("MASTER_ADDR")
    return f" (MASTER_ADDR and MASTER_PORT: {address}:{os.environ.get('MASTER_PORT', '')})" if address else ""


def _named(ranks: Sequence[int], known: Mapping[int, Mapping[str, Any]]) -> str:
    nodes = sorted({known[rank]["node"] for rank in ranks})
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} ({', '.join(nodes)})"


def _size(size_bytes: int) -> str:
    return f"{size_bytes // MIB} MiB" if size_bytes >= MIB else f"{size_bytes // 1024} KiB"


def _failed(checks: Sequence[Check]) -> bool:
    return any(check.verdict == "problem" for check in checks)


@contextmanager
def _bounded(doing: str, ranks: Ranks, seconds: float) -> Iterator[None]:
    """End this process with status 1 where what is inside hangs: a dead network disk, a driver, NCCL."""

    def give_up() -> None:
        where = f"rank {ranks.rank} on {platform.node()}"
        print(f"ds_gpt: {where}: {doing}: nothing for {seconds:g} s, given up{_rendezvous()}", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
