"""Ranks compare notes before they form a process group, and then try one: for checks, where anything may be broken.

Notes go through the rendezvous' key-value store. It works between ranks whose versions of PyTorch or NCCL differ, it
cannot hang, and it tells who is missing; a process group does none of these.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ds_gpt.engine.ranks import Ranks

_NO_TIME = timedelta(milliseconds=10)
_SIZES = {"cpu": (64 * 2**10, 2**20, 16 * 2**20), "cuda": (2**20, 16 * 2**20, 256 * 2**20)}  # bytes
_ROUNDS = 5


class Meeting:
    """The ranks' notes to each other, by topic.

    Args:
        ranks: this process among the others.
        deadline_s: how long one is waited for.

    Raises:
        ConfigError: the rendezvous port is taken.
        torch.distributed.DistError: nobody answers there within the deadline.
    """

    def __init__(self, ranks: Ranks, deadline_s: float) -> None:
        self.ranks, self.deadline_s = ranks, deadline_s
        self.store = ranks.store(timedelta(seconds=deadline_s))

    def tell(self, topic: str, value: Any) -> None:
        """Leave a note that JSON can hold; once a topic and rank."""
        self.store.set(f"{topic}/{self.ranks.rank}", json.dumps(value))

    def hear(self, topic: str, rank: int, within_s: float | None = None) -> Any:
        """That rank's note; None where it left none within the time (default: the deadline) or the store is gone."""
        key = f"{topic}/{rank}"
        try:
            self.store.wait([key], timedelta(seconds=self.deadline_s if within_s is None else within_s) or _NO_TIME)
            return json.loads(self.store.get(key))
        except RuntimeError:  # DistStoreError of a TCPStore, "Wait timeout" of a FileStore
            return None

    def hear_all(self, topic: str, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """The notes of those of `ranks` (default: all) that left one by the deadline."""
        end = time.monotonic() + self.deadline_s
        asked = range(self.ranks.world_size) if ranks is None else sorted(ranks)
        notes = {rank: self.hear(topic, rank, max(0.0, end - time.monotonic())) for rank in asked}
        return {rank: note for rank, note in notes.items() if note is not None}


@dataclass(frozen=True)
class Reduction:
    """All-reduces of one size.

    Attributes:
        size_bytes: of the tensor on each rank.
        seconds: the median of a few, on this rank.
        bus_bytes_per_s: 2 (n - 1) / n x size / time: what each link carries in a ring, as nccl-tests reports it
            (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), to compare with a link's own bandwidth.
        right: whether the sum was right.
    """

    size_bytes: int
    seconds: float
    bus_bytes_per_s: float
    right: bool


def all_reduce(meeting: Meeting) -> list[Reduction]:
    """Form a process group of all ranks, sum tensors of a few sizes, and leave it; every rank must call it.

    Raises:
        RuntimeError: the group could not be formed, or a sum took longer than the deadline.
    """
    ranks = meeting.ranks
    kind = ranks.device.type
    if kind == "cuda":
        torch.cuda.set_device(ranks.device)
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # else what hangs is ended by abort(), and nobody can say where
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=dist.PrefixStore("all_reduce", meeting.store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timedelta(seconds=meeting.deadline_s),
    )
    found = [_reduction(ranks, size) for size in _SIZES[kind]]
    dist.destroy_process_group()
    return found


def _reduction(ranks: Ranks, size_bytes: int) -> Reduction:
    n = ranks.world_size
    times, right = [], True
    for _ in range(_ROUNDS + 1):  # one more, since the first connects
        tensor = torch.full((size_bytes // 4,), ranks.rank + 1.0, device=ranks.device)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        right &= bool((tensor == n * (n + 1) / 2).all())
    seconds = statistics.median(times[1:])
    return Reduction(size_bytes, seconds, 2 * (n - 1) / n * size_bytes / seconds, right)
