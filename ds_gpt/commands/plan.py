"""``ds-gpt plan``: what fits, what is fastest, and why, before a GPU is rented."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_gpt.commands.arguments import Parser, add_config_arguments
from ds_gpt.commands.failure import run_or_fail
from ds_gpt.config.shipped import DEFAULT_RUN, SHIPPED

if TYPE_CHECKING:
    from ds_gpt.planner.devices import Device
    from ds_gpt.planner.search import Candidate

GIB = 2**30


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Parse the command line and print; ends the process with a status other than 0 on an error."""
    parser = Parser(prog=prog, description="Predict memory and speed of a run: what fits, what is fastest, and why.", allow_abbrev=False)
    add_config_arguments(parser)
    parser.set_defaults(config=str(DEFAULT_RUN), deepspeed_config="all")
    parser.add_argument("--device", default="a100-40gb", help="the GPU (default: a100-40gb)")
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="how many of them (default: 8)")
    parser.add_argument("--price", type=float, metavar="X", help="of one GPU for an hour, for the cost of the run")
    parser.add_argument("--why", action="store_true", help="explain each setting that does not fit")
    parser.add_argument("--trace", action="store_true", help="also run the real engine on fake tensors for the recommended setting: exact, takes a while")
    parser.add_argument("--json", action="store_true", help="print the candidates as a JSON list")
    run_or_fail(lambda: plan(parser.parse_args(arguments)))


def plan(options: argparse.Namespace) -> None:
    """Print the plan.

    Raises:
        ConfigError: bad input of any kind.
    """
    from ds_gpt.config import ConfigError, Problem
    from ds_gpt.planner.devices import device_named
    from ds_gpt.planner.search import candidates, recommended

    if options.devices < 1:
        raise ConfigError(Problem(f"--devices {options.devices} is not a number of GPUs", fix="give 1 or more"))
    if options.price is not None and options.price < 0:
        raise ConfigError(Problem(f"--price {options.price} is negative", fix="give the price of one GPU for an hour"))
    device = device_named(options.device)
    paths = [str(SHIPPED / f"zero{stage}.json") for stage in range(4)] if options.deepspeed_config == "all" else [options.deepspeed_config]
    found = candidates(options.config, paths, device, options.devices, options.overrides)
    if options.json:
        print(json.dumps([as_json(candidate) for candidate in found], indent=1))
        return
    show(found, device, options)
    if options.trace:
        show_trace(recommended(found), device, options)


def as_json(candidate: Candidate) -> dict[str, Any]:
    """One candidate for ``--json``."""
    shapes, memory, speed = candidate.shapes, candidate.memory, candidate.speed
    return {
        "deepspeed_config": candidate.deepspeed_config,
        "set": list(candidate.overrides),
        "zero_stage": shapes.stage,
        "micro_batch": shapes.micro_batch,
        "accumulation": shapes.accumulation,
        "activation_checkpointing": shapes.policy,
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


def show(found: list[Candidate], device: Device, options: argparse.Namespace) -> None:
    """The best of each stage and checkpointing as a table, the recommendation, and what limits it."""
    from ds_gpt.planner.search import recommended

    best = recommended(found)
    shapes = best.shapes
    print(f"{options.config} on {options.devices} x {device.name} ({device.memory_bytes / GIB:.1f} GiB), {shapes.precision}\n")
    print("ZeRO  micro x acc  checkpointing  allocated GiB  peak in           headroom GiB  tokens/s        MFU")
    for candidate in _rows(found):
        print(_row(candidate))
    if not best.fits:
        print(f"\nnothing fits. Nearest, {-best.headroom_bytes / GIB:.1f} GiB short: ZeRO {shapes.stage}, micro-batch {shapes.micro_batch}")
        print(f"most of it: {best.limiting_kind}, {best.memory.peak.kinds[best.limiting_kind] / GIB:.1f} GiB. More devices, or an offload JSON of ds_configs/, would help.")
        return
    speed = best.speed
    steps = _steps(options)
    days = steps * speed.step_s / 86400
    low, high = (f"{bound * 1000:,.0f}" for bound in speed.range_s)
    print(f"\nfastest that fits: ZeRO {shapes.stage}, micro-batch {shapes.micro_batch} x {shapes.accumulation}, checkpointing {shapes.policy or 'off'}")
    print(f"  {speed.step_s * 1000:,.0f} ms a step (between {low} and {high}), {speed.tokens_per_s:,.0f} tokens/s, MFU {speed.mfu:.1%}")
    total = sum(speed.parts.values())
    print("  time: " + ", ".join(f"{kind} {seconds / total:.0%}" for kind, seconds in sorted(speed.parts.items(), key=lambda part: -part[1]) if seconds / total > 0.005))
    cost = f", cost {days * 24 * options.devices * options.price:,.0f}" if options.price is not None else ""
    print(f"  {steps:,} steps: {days:.2f} days{cost}")
    kinds = sorted(best.memory.peak.kinds.items(), key=lambda kind: -kind[1])
    print(f"  memory, fullest in {best.memory.peak.phase}: " + ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in kinds if size > 0.005 * GIB) + " GiB")
    print(f"  with CUDA context, NCCL and fragments: {best.needed_bytes[0] / GIB:.1f} to {best.needed_bytes[1] / GIB:.1f} GiB")
    print(f"\n{command(best, options)}")
    if options.why:
        print()
        for candidate in found:
            if not candidate.fits:
                print(why(candidate, found, device))


def _rows(found: list[Candidate]) -> list[Candidate]:
    """The fastest that fits of each stage and policy, or the smallest where none does."""
    seen: dict[tuple[int, str | None, str], Candidate] = {}
    for candidate in found:  # sorted so that the first is the one
        seen.setdefault((candidate.shapes.stage, candidate.shapes.policy, candidate.deepspeed_config), candidate)
    return list(seen.values())


def _row(candidate: Candidate) -> str:
    shapes, memory, speed = candidate.shapes, candidate.memory, candidate.speed
    micro = f"{shapes.micro_batch} x {shapes.accumulation}"
    fits = f"{speed.tokens_per_s:<14,.0f}  {speed.mfu:.1%}" if candidate.fits else f"does not fit: {candidate.limiting_kind}"
    return (
        f"{shapes.stage:<4}  {micro:<11}  {shapes.policy or 'off':<13}  {memory.peak.bytes / GIB:<13.2f}  {memory.peak.phase:<16}  "
        f"{candidate.headroom_bytes / GIB:<12.1f}  {fits}"
    )


def _steps(options: argparse.Namespace) -> int:
    from ds_gpt.config import load
    from ds_gpt.planner.devices import device_named

    hardware = device_named(options.device).hardware(options.devices)
    path = SHIPPED / "zero1.json" if options.deepspeed_config == "all" else options.deepspeed_config
    composed = load(options.config, path, hardware, [*options.overrides, "batch.micro_batch_size=1"])
    return composed.run.training.steps


def command(candidate: Candidate, options: argparse.Namespace) -> str:
    """What starts the run with this setting."""
    settings = [argument for setting in (*options.overrides, *candidate.overrides) for argument in ("--set", setting)]
    per_node = min(options.devices, 8)
    path = _short(candidate.deepspeed_config)
    return shlex.join(
        ["deepspeed", "--num_gpus", str(per_node), "ds_gpt/train.py", "--config", _short(options.config), "--deepspeed_config", path, *settings]
    )


def _short(path: str) -> str:
    return str(Path(path).relative_to(SHIPPED.parent)) if Path(path).is_relative_to(SHIPPED.parent) else path


def why(candidate: Candidate, found: list[Candidate], device: Device) -> str:
    """Why one setting does not fit, and the smallest change that makes it."""
    shapes, peak = candidate.shapes, candidate.memory.peak
    kind = candidate.limiting_kind
    text = (
        f"ZeRO {shapes.stage}, micro-batch {shapes.micro_batch}, checkpointing {shapes.policy or 'off'}: {kind} {peak.kinds[kind] / GIB:.1f} GiB "
        f"of {device.memory_bytes / GIB:.1f}, {-candidate.headroom_bytes / GIB:.1f} too much"
    )
    for other in found:
        if other.fits and (other.shapes.stage, other.shapes.micro_batch) == (shapes.stage, shapes.micro_batch):
            return f"{text}; {other.shapes.policy} checkpointing brings it to {other.memory.peak.kinds.get(kind, 0) / GIB:.1f}"
    return text


def show_trace(candidate: Candidate, device: Device, options: argparse.Namespace) -> None:
    """The real engine's account of the recommended setting."""
    from ds_gpt.engine.trace import Request, trace_elsewhere

    request = Request(options.config, candidate.deepspeed_config, device.hardware(options.devices), (*options.overrides, *candidate.overrides))
    (traced,) = trace_elsewhere([request])
    print(f"\ntrace of the real engine on fake tensors, rank 0 of {traced.world_size}; MiB allocated when a phase ends, and at most in it")
    for phase in traced.phases:
        print(f"  {phase.name:<14}  {phase.bytes / 2**20:>10,.1f}  {phase.peak_bytes / 2**20:>10,.1f}")
    error = candidate.memory.peak.bytes / traced.peak_bytes - 1
    print(f"peak {traced.peak_bytes / 2**20:,.0f} MiB in {traced.peak_phase}; the analytic figure is {error:+.2%} from it")
    print("  " + ", ".join(f"{kind} {size / 2**20:,.0f}" for kind, size in traced.kinds.items()))
