"""Where the time and the memory of a step go, in steps of their own: contexts, in which a bench is stepped.

Each puts what it found into a dictionary when it is left.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.bench import Bench
from benchmarks.collectives import Collectives
from benchmarks.ledger import Ledger

Found = dict[str, Any]
Span = tuple[float, float]

_COMMUNICATION = re.compile(r"gloo:|nccl", re.IGNORECASE)
_ATTENTION_OP = re.compile(r"aten::(_scaled_dot_product_\w+)")
_ATTENTION_KERNEL = re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE)
_KERNEL_NAME_LENGTH = 100


@contextmanager
def time_by_phase(bench: Bench, collectives: Collectives, found: Found) -> Iterator[None]:
    """Seconds a step by phase, communication apart, in steps that wait for the device at each phase's end."""
    seconds: dict[str, float] = defaultdict(float)
    communicating: dict[str, float] = defaultdict(float)
    phase, since, so_far = "", 0.0, 0.0

    def enter(name: str) -> None:
        nonlocal phase, since, so_far
        bench.synchronize()
        now = time.perf_counter()
        if phase:
            communicating[phase] += collectives.seconds - so_far
            seconds[phase] += now - since - (collectives.seconds - so_far)
        if not name:  # ranks begin the next step together, so that none waits for another that was slow before
            with collectives.aside():
                bench.ranks.barrier()
        phase, since, so_far = name, time.perf_counter(), collectives.seconds

    first = len(bench.steps_s)
    bench.ranks.barrier()
    bench.trainee.on_phase = enter
    with collectives.counting():
        yield
    bench.trainee.on_phase = lambda name: None
    wholes, waits = bench.steps_s[first:], bench.data_wait_s[first:]
    steps = len(wholes)
    found["steps"] = steps
    found["step_s"] = sum(wholes) / steps
    found["data_wait_s"] = sum(waits) / steps
    found["phases_s"] = {name: value / steps for name, value in seconds.items()}
    found["communication"] = {name: {key: value / steps for key, value in count.items()} for name, count in collectives.counts.items()}


@contextmanager
def profiled(bench: Bench, found: Found) -> Iterator[None]:
    """What PyTorch's profiler sees: how much communication runs while this rank computes, and which attention ran."""
    first = len(bench.steps_s)
    bench.ranks.barrier()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.ranks.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        yield
        bench.synchronize()
    found.update(seen(profile.events(), len(bench.steps_s) - first))


def seen(events: Iterable[Any], steps: int) -> Found:
    """What a profile of so many steps says.

    On a GPU kernels are told apart: NCCL's, and those that compute. On a CPU gloo's collectives have spans of their own,
    from their issue to their end, and what computes is PyTorch's operators; a rank that only waits runs none.
    """
    events = list(events)
    kernels = [event for event in events if "CUDA" in str(event.device_type) and not getattr(event, "is_user_annotation", False)]
    on_host = [event for event in events if "CPU" in str(event.device_type)]
    working = kernels or on_host
    communicating = [event for event in working if _COMMUNICATION.search(event.name)]
    computing = [event for event in working if not _COMMUNICATION.search(event.name) and (not kernels or not event.name.startswith("Mem"))]
    if not kernels:
        computing = [event for event in computing if event.name.startswith("aten::")]
    spans = union(_span(event) for event in communicating)
    return {
        "communication_s": length(spans) / steps * 1e-6,
        "hidden_s": length(common(spans, union(_span(event) for event in computing))) / steps * 1e-6,
        "attention": sorted({match[1] for event in on_host if (match := _ATTENTION_OP.fullmatch(event.name)) and "backward" not in match[1]}),
        "attention_kernels": sorted({event.name[:_KERNEL_NAME_LENGTH] for event in kernels if _ATTENTION_KERNEL.search(event.name)}),
    }


def _span(event: Any) -> Span:
    return event.time_range.start, event.time_range.end


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time in spans that do not overlap, in order."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def common(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """What two unions share."""
    shared, index = [], 0
    for start, end in first:
        while index < len(second) and second[index][1] <= start:
            index += 1
        at = index
        while at < len(second) and second[at][0] < end:
            shared.append((max(start, second[at][0]), min(end, second[at][1])))
            at += 1
    return shared


def length(spans: Iterable[Span]) -> float:
    """How long spans are together."""
    return sum(end - start for start, end in spans)


@contextmanager
def memory_by_kind(bench: Bench, collectives: Collectives, found: Found) -> Iterator[None]:
    """Bytes of live tensors by kind: at their peak, and when the gradients of a step are complete."""
    ledger = Ledger()
    complete: dict[str, int] = {}
    born = {"forward": "activations", "backward": "activations", "optimizer": "buffers", "bookkeeping": "buffers"}

    def know() -> None:
        for tensor, kind in bench.trainee.tensors():
            ledger.add(tensor, kind)

    def enter(name: str) -> None:
        nonlocal complete
        if not name:
            return
        know()
        ledger.phase, ledger.born = name, born[name]
        if name == "optimizer":  # of the last micro-step in the end
            complete = ledger.held()

    def gradient_there(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            ledger.add(parameter.grad, "gradients")

    hooks = [parameter.register_post_accumulate_grad_hook(gradient_there) for parameter in bench.trainee.model.parameters() if parameter.requires_grad]
    collectives.on_tensors = ledger.communicated
    bench.trainee.on_phase = enter
    ledger.add_everything()
    know()
    ledger.phase = "forward"
    with ledger:
        yield
    know()
    bench.trainee.on_phase, collectives.on_tensors = lambda name: None, None
    for hook in hooks:
        hook.remove()
    peaks = ledger.at_peaks()
    found["peak_bytes"] = max(peaks.values(), key=lambda kinds: sum(kinds.values()))
    found |= {"peak_by_phase_bytes": peaks, "complete_bytes": complete, "between_steps_bytes": ledger.held()}
