"""What was found, as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_gpt.planner.devices import GIB, Device
from ds_gpt.planner.search import HOST, Candidate, recommended
from ds_gpt.planner.shapes import Shapes
from ds_gpt.planner.task import PRETRAINING

_ROWS = 16


def as_json(candidate: Candidate) -> dict[str, Any]:
    """One candidate."""
    shapes, memory, speed = candidate.shapes, candidate.memory, candidate.speed
    return {
        "deepspeed_config": candidate.deepspeed_config,
        "set": list(candidate.overrides),
        "zero_stage": shapes.stage,
        "offload_optimizer": shapes.offload_optimizer,
        "offload_param": shapes.offload_weights,
        "micro_batch": shapes.micro_batch,
        "accumulation": shapes.accumulation,
        "activation_checkpointing": shapes.policy,
        "tensor": shapes.tensor,
        "pipeline": shapes.pipeline,
        "sequence": shapes.sequence,
        "on_paper": candidate.on_paper,
        "precision": shapes.precision,
        "fits": candidate.fits,
        "peak_bytes": memory.peak.bytes,
        "peak_phase": memory.peak.phase,
        "bytes": memory.peak.kinds,
        "host_bytes": memory.host_bytes,
        "needed_bytes": list(candidate.needed_bytes),
        "headroom_bytes": candidate.headroom_bytes,
        "step_s": speed.step_s,
        "step_s_range": list(speed.range_s),
        "step_s_parts": speed.parts,
        "tokens_per_s": speed.tokens_per_s,
        "mfu": speed.mfu,
    }


def label(candidate: Candidate) -> str:
    """The setting in a few words."""
    shapes = candidate.shapes
    split = f"{candidate.degrees}, " if candidate.degrees.used else ""
    return f"{split}ZeRO {stage(candidate)}, micro-batch {shapes.micro_batch} x {shapes.accumulation}, checkpointing {shapes.policy or 'off'}"


def stage(candidate: Candidate) -> str:
    """ZeRO stage, and whether it offloads."""
    return f"{candidate.shapes.stage}{' + offload' if candidate.shapes.offload_optimizer else ''}"


def rows(found: Sequence[Candidate]) -> list[Candidate]:
    """The fastest that fits of each stage, split and policy, or the smallest where none does."""
    seen: dict[tuple[Any, ...], Candidate] = {}
    for candidate in found:  # sorted so that the first is the one
        seen.setdefault((candidate.deepspeed_config, candidate.degrees, candidate.shapes.policy), candidate)
    return list(seen.values())


def table(found: Sequence[Candidate]) -> Iterator[str]:
    """The best of each kind, fastest first."""
    shown = rows(found)
    split = max([0, *(len(str(candidate.degrees)) + 2 for candidate in shown[:_ROWS])]) if any(candidate.degrees.used for candidate in shown[:_ROWS]) else 0
    heads = f"{'split':<{split}}" if split else ""
    unit, unit_bytes = _size_unit(max(candidate.memory.peak.bytes for candidate in shown[:_ROWS]))
    yield f"{heads}ZeRO         micro x acc  checkpointing  allocated {unit}  peak in           headroom GiB  tokens/s        MFU"
    for candidate in shown[:_ROWS]:
        shapes, memory, speed = candidate.shapes, candidate.memory, candidate.speed
        micro = f"{shapes.micro_batch} x {shapes.accumulation}"
        fits = f"{speed.tokens_per_s:<14,.0f}  {speed.mfu:.1%}" if candidate.fits else f"does not fit: {candidate.limiting_kind}"
        if candidate.on_paper:
            fits += "  on paper"
        yield (
            f"{str(candidate.degrees) if split else '':<{split}}{stage(candidate):<11}  {micro:<11}  {shapes.policy or 'off':<13}  "
            f"{memory.peak.bytes / unit_bytes:<13.2f}  {memory.peak.phase:<16}  {candidate.headroom_bytes / GIB:<12.1f}  {fits}"
        )
    if len(shown) > _ROWS:
        yield f"and {len(shown) - _ROWS} more kinds; --json lists every setting"
    if any(candidate.on_paper for candidate in shown[:_ROWS]):
        yield "on paper: ds_gpt does not train with these degrees at this ZeRO stage"


def nothing_fits(found: Sequence[Candidate], device: Device) -> Iterator[str]:
    """How far from it, and what the least is."""
    best = found[0]
    yield f"nothing fits. Nearest, {-best.headroom_bytes / GIB:,.1f} GiB short: {label(best)}"
    yield f"most of it: {best.limiting_kind}, {best.limiting_bytes / GIB:,.1f} GiB"
    count = sum(parameter.elements for parameter in _whole(best))
    state = 16 * count  # bf16 weights and gradients, fp32 masters and two moments
    together = device.memory_bytes * best.shapes.devices
    if state > together:
        yield (
            f"it cannot be trained on {best.shapes.devices:,} x {device.name}: weights, gradients and optimizer of {count / 1e9:,.1f}B parameters are "
            f"{state / GIB:,.0f} GiB, of {together / GIB:,.0f} that they have together; at least {-(-state // device.memory_bytes):,} are needed"
        )
    else:
        yield "More devices, --search for tensor and pipeline degrees, or a smaller model.context would help"


def _whole(candidate: Candidate) -> Sequence[Any]:
    return replace(candidate.shapes, tensor=1, pipeline=1).parameters()


def recommendation(found: Sequence[Candidate], steps: int, price: float | None, device: Device) -> Iterator[str]:
    """The fastest that fits in detail, and the one behind it. `price`: USD of a device for an hour."""
    best = recommended(found)
    speed, shapes = best.speed, best.shapes
    usual, low, high = (f"{seconds * 1000:,.{0 if seconds > 0.1 else 1}f}" for seconds in (speed.step_s, *speed.range_s))
    fastest = next(candidate for candidate in found if candidate.on_paper == best.on_paper)
    as_good = "" if best is fastest else ", to 2%, and shards least"
    yield f"fastest that fits{as_good}: {label(best)}"
    yield f"  {usual} ms a step (between {low} and {high}), {speed.tokens_per_s:,.0f} tokens/s, MFU {speed.mfu:.1%}"
    total = sum(speed.parts.values())
    yield "  time: " + ", ".join(f"{kind} {seconds / total:.0%}" for kind, seconds in sorted(speed.parts.items(), key=lambda part: -part[1]) if seconds / total > 0.005)
    training_s = steps * speed.step_s
    unit, unit_s = _unit(training_s)
    shortest, longest = (steps * bound / unit_s for bound in speed.range_s)
    usd = training_s / 3600 * shapes.devices * (price or 0.0)
    dollars = f"{usd:,.0f}" if usd >= 100 else f"{usd:.2f}" if usd >= 0.01 or not price else "less than 0.01"
    cost = f", {dollars} USD at {price:g} a device and hour" if price is not None else ""
    yield f"  {steps:,} steps: {training_s / unit_s:.1f} {unit} (between {shortest:.1f} and {longest:.1f}){cost}"
    kinds = sorted(best.memory.peak.kinds.items(), key=lambda kind: -kind[1])
    host = f"; {_sized(best.memory.host_bytes)} of host memory for each device" if best.memory.host_bytes else ""
    unit, unit_bytes = _size_unit(best.memory.peak.bytes)
    yield f"  memory, fullest in {best.memory.peak.phase}: " + ", ".join(f"{kind} {size / unit_bytes:.2f}" for kind, size in kinds if size > 0.005 * unit_bytes) + f" {unit}{host}"
    least, most = (_sized(size) for size in best.needed_bytes)
    if device.kind == "cuda":
        shown = _sized(min(best.shown_bytes, device.memory_bytes))
        yield f"  with context, NCCL and fragments: {least} to {most}; nvidia-smi will show about {shown}, with what the allocator keeps"
    else:
        yield f"  with what the allocator wastes: {least} to {most}"
    if shapes.offload_optimizer:
        yield "  the time of what is offloaded is a guess: no published run checks it"
    if shapes.task != PRETRAINING:
        yield "  the time of adapters, masks and pairs is by the same constants: no published run checks it"
    if best.on_paper:
        yield "  on paper only: ds_gpt does not train with this combination"
    elif found[0].on_paper and found[0].speed.tokens_per_s > 1.02 * speed.tokens_per_s:
        yield f"faster on paper, if ds_gpt could split the model so: {label(found[0])}: {found[0].speed.tokens_per_s:,.0f} tokens/s"
    kind = (best.shapes.stage, best.shapes.policy, best.degrees, best.shapes.offload_optimizer)
    others = (other for other in found if other.fits and (other.shapes.stage, other.shapes.policy, other.degrees, other.shapes.offload_optimizer) != kind)
    behind = next(others, None)
    if behind:
        yield f"runner-up{', on paper' if behind.on_paper else ''}: {label(behind)}: {behind.speed.tokens_per_s:,.0f} tokens/s, {_sized(behind.needed_bytes[1])}"


def _size_unit(size: float) -> tuple[str, int]:
    """In which unit so many bytes read best, and the bytes in one."""
    return ("GiB", GIB) if size >= GIB else ("MiB", 2**20)


def _sized(size: float) -> str:
    unit, unit_bytes = _size_unit(size)
    return f"{size / unit_bytes:,.1f} {unit}"


def _unit(seconds: float) -> tuple[str, float]:
    """In which unit a duration reads best, and the seconds in one."""
    units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
    return next((unit for unit in units if seconds >= unit[1]), units[-1])


def cheapest_devices(found: Sequence[tuple[float, Device, Candidate]], tokens: float) -> Iterator[str]:
    """The run's cost on each device that it fits, cheapest first."""
    if not found:
        yield "cheapest device: none whose price is known would do"
        return
    yield f"cheapest devices that would do, {found[0][2].shapes.devices} of each (list prices, a guide):"
    unit, unit_s = _unit(max(tokens / best.speed.tokens_per_s for _, _, best in found[:5]))
    for per_million, device, best in found[:5]:
        duration = tokens / best.speed.tokens_per_s / unit_s
        yield f"  {device.key:<15} {per_million * tokens / 1e6:>12,.2f} USD  {duration:>8.1f} {unit}  {label(best)}"


def why(candidate: Candidate, found: Sequence[Candidate], device: Device) -> str:
    """Why one setting does not fit, and the smallest change that makes it."""
    kind, size = candidate.limiting_kind, candidate.limiting_bytes
    limit = device.host_bytes if candidate.host_is_short else device.memory_bytes
    text = f"{label(candidate)}: {kind} {size / GIB:.1f} GiB of {limit / GIB:.1f}, {-candidate.headroom_bytes / GIB:.1f} too much"
    shapes = candidate.shapes
    for other in (other for change in _CHANGES for other in found if other.fits and other.degrees == candidate.degrees and change(shapes, other.shapes)):
        most = max(moment.kinds.get(kind, 0) for moment in other.memory.moments)
        less = f"them to {most / GIB:.1f}" if kind != HOST and most < 0.95 * size else f"the peak to {other.memory.peak.bytes / GIB:.1f}"
        return f"{text}; {_change(shapes, other.shapes)} would bring {less}"
    return f"{text}; no setting of {candidate.degrees} fits"


# From the smallest change to the largest: another policy, a smaller micro-batch, another stage, the host's memory.
_CHANGES: tuple[Callable[[Shapes, Shapes], bool], ...] = (
    lambda one, other: (one.stage, one.micro_batch, one.offload_optimizer) == (other.stage, other.micro_batch, other.offload_optimizer),
    lambda one, other: (one.stage, one.policy, one.offload_optimizer) == (other.stage, other.policy, other.offload_optimizer),
    lambda one, other: one.offload_optimizer == other.offload_optimizer,
    lambda one, other: other.offload_optimizer,
)


def _change(one: Shapes, other: Shapes) -> str:
    parts = []
    if other.stage != one.stage:
        parts.append(f"ZeRO {other.stage}")
    if other.offload_optimizer and not one.offload_optimizer:
        parts.append("offload")
    if other.micro_batch != one.micro_batch:
        parts.append(f"micro-batch {other.micro_batch}")
    if other.policy != one.policy:
        parts.append(f"{other.policy} checkpointing" if other.policy else "no checkpointing")
    return ", ".join(parts)


def short(path: str, root: Path) -> str:
    """A shipped file as it is called from the repository."""
    return str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else path
