"""``ds-gpt plan``: what fits, what is fastest, and why, before a GPU is rented."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ds_gpt.commands.arguments import Parser, add_config_arguments
from ds_gpt.commands.failure import print_or_fail
from ds_gpt.config.shipped import DEFAULT_RUN, SHIPPED

if TYPE_CHECKING:
    from ds_gpt.config import ParallelConfig
    from ds_gpt.planner.devices import Device
    from ds_gpt.planner.search import Candidate

_JSONS = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Parse the command line and print; ends the process with a status other than 0 on an error."""
    parser = Parser(prog=prog, description="Predict memory and speed of a run: what fits, what is fastest, and why.", allow_abbrev=False)
    add_config_arguments(parser, deepspeed_config="the fastest that fits of those that ds_gpt ships")
    parser.set_defaults(config=str(DEFAULT_RUN), deepspeed_config="all")
    parser.add_argument("--device", default="a100-40gb", help="the GPU (default: a100-40gb); any other word lists them")
    parser.add_argument("--device-file", metavar="YAML", help="more devices, in the form of ds_gpt/planner/devices.yaml")
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="how many of them (default: 8)")
    for name, what in (("tensor", "that share each matrix"), ("pipeline", "that share the blocks"), ("sequence", "that share each sequence")):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"devices {what} (default: the run's parallel.{name})")
    parser.add_argument("--search", action="store_true", help="also over the devices whose price is known and, unless some are given, over tensor, pipeline and sequence degrees")
    parser.add_argument("--price", type=float, metavar="X", help="USD of one device for an hour (default: the list price, where one is known)")
    parser.add_argument("--why", action="store_true", help="explain each setting that does not fit")
    parser.add_argument("--trace", action="store_true", help="also run the real engine on fake tensors for the recommended setting: exact, takes a while")
    parser.add_argument("--write", metavar="JSON", help="write the DeepSpeed JSON of the recommended setting")
    parser.add_argument("--plot", metavar="PNG", help="draw the memory of the candidates, by kind")
    parser.add_argument("--json", action="store_true", help="print the candidates as a JSON list")
    print_or_fail(lambda: plan(parser.parse_args(arguments)))


def plan(options: argparse.Namespace) -> None:
    """Print the plan.

    Raises:
        ConfigError: bad input of any kind.
    """
    from ds_gpt.config import ConfigError, Problem
    from ds_gpt.planner import degrees, devices, report, search

    if options.devices < 1:
        raise ConfigError(Problem(f"--devices {options.devices} is not a number of GPUs", fix="give 1 or more"))
    if options.price is not None and not 0 <= options.price < float("inf"):
        raise ConfigError(Problem(f"--price {options.price} is not a price", fix="give that of one device for an hour, 0 or more"))
    known = devices.DEVICES | (devices.read_devices(options.device_file) if options.device_file else {})
    device = devices.device_named(options.device, known)
    gpu_only = _JSONS if device.kind == "cuda" else _JSONS[:4]  # on a CPU what is offloaded stays where it was
    paths = [str(SHIPPED / f"{name}.json") for name in gpu_only] if options.deepspeed_config == "all" else [options.deepspeed_config]
    asked = _asked(options, paths[0])
    found = search.candidates(options.config, paths, device, options.devices, options.overrides, [asked])
    if options.search and asked == degrees.ALONE:
        model = found[0].shapes.model
        splits = [split for split in degrees.possible(model, options.devices, device.per_node) if split != degrees.ALONE]
        if splits:
            found = search.ranked([*found, *search.candidates(options.config, paths[1:4] or paths, device, options.devices, options.overrides, splits)])
    best = search.recommended(found)
    if options.trace:
        _check_traceable(best, options)
    if options.write:
        write(Path(options.write), best, device, options)
    if options.plot:
        _plot(report.rows(found)[:24], device, options)
    if options.json:
        print(json.dumps([report.as_json(candidate) for candidate in found], indent=1))
        return
    show(found, device, known, paths, asked, options)
    if options.trace:
        show_trace(best, device, options)


def _check_traceable(best: Candidate, options: argparse.Namespace) -> None:
    from ds_gpt.config import ConfigError, Problem

    if options.json:
        raise ConfigError(Problem("--trace with --json", "the trace is a text, and the JSON is of the candidates alone", "ask for one of them"))
    if best.on_paper or best.shapes.pipeline > 1:
        raise ConfigError(
            Problem(
                f"--trace: {best.degrees} at ZeRO {best.shapes.stage}", "the trace runs ds_gpt's own engine, as one rank of a group that does not exist; "
                "a pipeline's stages wait for each other", "leave the degrees out, or take tensor and sequence alone",
            )
        )  # fmt: skip


def _asked(options: argparse.Namespace, deepspeed_config: str) -> ParallelConfig:
    """The run's degrees, or those of the command line.

    Raises:
        ConfigError: one that is no number of devices.
    """
    from ds_gpt.config import ConfigError, Problem
    from ds_gpt.planner.degrees import stated

    given = {name: size for name in ("tensor", "pipeline", "sequence") if (size := getattr(options, name)) is not None}
    problems = [Problem(f"--{name} {size} is not a number of devices", fix="give 1 or more") for name, size in given.items() if size < 1]
    if problems:
        raise ConfigError(problems)
    return stated(options.config, deepspeed_config, options.overrides).model_copy(update=given)


def show(
    found: list[Candidate], device: Device, known: dict[str, Device], paths: list[str], asked: ParallelConfig, options: argparse.Namespace
) -> None:
    """The best of each kind as a table, the recommendation, what would be cheaper, and what limits the others."""
    from ds_gpt.planner import report, search

    best = search.recommended(found)
    composed = search.composed(options.config, paths[0], device.hardware(1), [*options.overrides, *search.WITHOUT_DEGREES])
    training = composed.run
    steps = training.training.steps
    print(f"{report.short(options.config, SHIPPED.parent)} on {options.devices:,} x {device.name} ({device.memory_bytes / report.GIB:.1f} GiB), {best.shapes.precision}")
    _lines(note for note in composed.notes if note.startswith("vocabulary"))
    print()
    _lines(report.table(found))
    print()
    if best.fits:
        _lines(report.recommendation(found, steps, device.price if options.price is None else options.price, device))
    else:
        _lines(report.nothing_fits(found, device))
    if options.search:
        tokens = float(steps * training.batch.global_batch_size * training.sequences * training.model.context)
        priced = search.cheapest(options.config, paths, known.values(), options.devices, options.overrides, asked)
        print()
        _lines(report.cheapest_devices(priced, tokens))
    if options.why:
        print()
        _lines([report.why(candidate, found, device) for candidate in found if not candidate.fits] or ["every setting fits"])
    if best.fits and not best.on_paper:
        print(f"\n{command(best, device, options)}")


def _lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _settings(candidate: Candidate, options: argparse.Namespace) -> list[str]:
    return [*options.overrides, *candidate.overrides]


def command(candidate: Candidate, device: Device, options: argparse.Namespace) -> str:
    """What starts the run with this setting."""
    from ds_gpt.planner.report import short

    nodes = -(-options.devices // device.per_node)
    start = ["deepspeed", "--num_gpus", str(options.devices), "ds_gpt/train.py"] if nodes == 1 else ["launch/multi_node.sh", "--hostfile", "hostfile", "--num_nodes", str(nodes)]
    if options.write:
        path, settings = options.write, [setting for setting in _settings(candidate, options) if _of_the_run(setting)]
    else:
        path, settings = short(candidate.deepspeed_config, SHIPPED.parent), _settings(candidate, options)
    sets = [argument for setting in settings for argument in ("--set", setting)]
    return shlex.join([*start, "--config", short(options.config, SHIPPED.parent), "--deepspeed_config", path, *sets])


def _of_the_run(setting: str) -> bool:
    """Whether a ``--set`` is of the run YAML."""
    from ds_gpt.config.deepspeed_keys import KNOWN_KEYS
    from ds_gpt.config.run import RunConfig

    top, _, rest = setting.partition("=")[0].strip().partition(".")
    return top in RunConfig.model_fields and not (top in KNOWN_KEYS[""] and rest.partition(".")[0] in KNOWN_KEYS.get(top, ()))


def write(path: Path, candidate: Candidate, device: Device, options: argparse.Namespace) -> None:
    """Write the DeepSpeed JSON of a setting: with the command that is printed it composes to what was planned.

    Raises:
        ConfigError: nothing fits, ds_gpt cannot run it, or the file cannot be written.
    """
    from ds_gpt.config import ConfigError, Problem, load

    if not candidate.fits:
        raise ConfigError(Problem(f"--write {path}: nothing fits", "there is no setting to write", "plan without --write to see what is short"))
    if candidate.on_paper:
        where = f"--write {path}: {candidate.degrees} at ZeRO {candidate.shapes.stage} is on paper only"
        raise ConfigError(Problem(where, "ds_gpt does not train with this combination", "other degrees, or another stage"))
    composed = load(options.config, candidate.deepspeed_config, device.hardware(options.devices), _settings(candidate, options))
    values = {key: value for key, value in composed.stated.items() if value is not None}
    values["train_micro_batch_size_per_gpu"] = candidate.shapes.micro_batch
    try:
        path.write_text(json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(Problem(f"--write {path}: {error.strerror}", fix="give a path that can be written")) from None


def _plot(shown: Sequence[Candidate], device: Device, options: argparse.Namespace) -> None:
    from ds_gpt.config import ConfigError, Problem
    from ds_gpt.planner.plots import plot

    try:
        plot(shown, device, Path(options.plot), f"{Path(options.config).stem} on {options.devices:,} x {device.name}")
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(f"--plot {options.plot}: {error}", fix="give a path that can be written, ending in .png, .svg or .pdf")) from None


def show_trace(candidate: Candidate, device: Device, options: argparse.Namespace) -> None:
    """The real engine's account of the recommended setting."""
    from ds_gpt.engine.trace import Request, trace_elsewhere

    request = Request(options.config, candidate.deepspeed_config, device.hardware(options.devices), tuple(_settings(candidate, options)))
    (traced,) = trace_elsewhere([request])
    print(f"\ntrace of the real engine on fake tensors, rank 0 of {traced.world_size}; MiB allocated when a phase ends, and at most in it")
    for phase in traced.phases:
        print(f"  {phase.name:<14}  {phase.bytes / 2**20:>10,.1f}  {phase.peak_bytes / 2**20:>10,.1f}")
    error = candidate.memory.peak.bytes / traced.peak_bytes - 1
    print(f"peak {traced.peak_bytes / 2**20:,.0f} MiB in {traced.peak_phase}; the analytic figure is {error:+.2%} from it")
    print("  " + ", ".join(f"{kind} {size / 2**20:,.0f}" for kind, size in traced.kinds.items()))
