"""``ds-gpt doctor``: what would go wrong with a run on these machines, before it is started."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ds_gpt.commands.arguments import Parser, add_config_arguments
from ds_gpt.commands.failure import print_or_fail

if TYPE_CHECKING:
    from ds_gpt.engine.ranks import Ranks
    from ds_gpt.trainer.preflight import Check


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Parse the command line and check; ends the process: 0 no problem, 1 a problem, 2 bad input."""
    parser = Parser(
        prog=prog,
        description="Check this machine before a run; under torchrun or the deepspeed launcher all ranks together.",
        allow_abbrev=False,
    )
    add_config_arguments(parser)
    parser.add_argument("--run-dir", metavar="DIR", help="where the run will be (default: in runs)")
    parser.add_argument(
        "--resume", metavar="PATH", nargs="?", const="auto", help="as of training: its files are checked where none are given"
    )
    parser.add_argument(
        "--devices", metavar="N", type=int, help="alone: judge this machine for a run of N ranks (default: of one)"
    )
    parser.add_argument(
        "--deadline", metavar="S", type=float, default=60.0, help="seconds that a rank is waited for (default: 60)"
    )
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # from the deepspeed launcher
    print_or_fail(lambda: run(parser.parse_args(arguments)))


def run(options: argparse.Namespace) -> None:
    """Check, print and exit. Raises ConfigError on bad input."""
    from ds_gpt.config import ConfigError, Problem, load
    from ds_gpt.engine.ranks import Ranks
    from ds_gpt.planner.degrees import stated
    from ds_gpt.trainer.preflight_ranks import preflight
    from ds_gpt.trainer.start import configuration

    if not 0 < options.deadline < 86400:
        raise ConfigError(Problem(f"--deadline {options.deadline:g} is not a time to wait", fix="give seconds, up to a day"))
    ranks = Ranks.from_environment()
    check_devices(options.devices, ranks)
    files = configuration(options.config, options.deepspeed_config, options.overrides, options.run_dir, options.resume)
    hardware = ranks.hardware()
    if ranks.world_size == 1:  # alone: the machine, for a rank of the run as planned, or of one copy of the model
        planned = options.devices or stated(str(files[0]), str(files[1]), options.overrides).product
        hardware = replace(hardware, world_size=planned)
    if options.devices and ranks.device.type == "cpu":  # GPUs have memory of their own; these ranks share one
        ranks = replace(ranks, local_world_size=options.devices)
    composed = load(*files, hardware, options.overrides)

    def report(checks: Sequence[Check]) -> None:
        print(as_json(checks) if options.json else text(checks, ranks, options.devices), flush=True)

    failed = preflight(ranks, composed, Path(options.run_dir or "runs"), options.deadline, report)
    sys.stdout.flush()
    os._exit(int(failed))  # not by returning: a collective that failed may have left a thread that waits


def check_devices(devices: int | None, ranks: Ranks) -> None:
    """Refuse a number of ranks that is none, or not the one that a launcher started. Raises ConfigError."""
    from ds_gpt.config import ConfigError, Problem

    if devices is not None and devices < 1:
        raise ConfigError(Problem(f"--devices {devices} is not a number of ranks", fix="give 1 or more"))
    if devices is not None and ranks.world_size not in (1, devices):
        raise ConfigError(Problem(f"--devices {devices}, but a launcher started {ranks.world_size} ranks", "all of them are checked, as they are", "leave it out"))


def text(checks: Sequence[Check], ranks: Ranks, devices: int | None = None) -> str:
    """The checks as a person reads them; `devices`: of how many ranks the run is planned."""
    started = f"{ranks.world_size} rank{'s' * (ranks.world_size > 1)}, {ranks.local_world_size} on this node"
    lines = [f"this machine, for a run of {devices} rank{'s' * (devices > 1)}" if devices and ranks.world_size == 1 else started, ""]
    width = max(len(check.name) for check in checks)
    for check in checks:
        lines.append(f"{check.verdict:<7}  {check.name:<{width}}  {check.saw}")
        indent = " " * (7 + 2 + width + 2)
        lines += [f"{indent}why: {check.why}"] if check.why else []
        lines += [f"{indent}do:  {check.fix}"] if check.fix else []
    problems, warnings = (sum(check.verdict == kind for check in checks) for kind in ("problem", "warning"))
    lines += ["", f"{problems or 'no'} problem{'s' * (problems != 1)}, {warnings or 'no'} warning{'s' * (warnings != 1)}"]
    if ranks.world_size == 1:
        lines.append("this process alone; all ranks together: torchrun --nproc-per-node N -m ds_gpt doctor")
    return "\n".join(lines)


def as_json(checks: Sequence[Check]) -> str:
    """The checks for programs."""
    from dataclasses import asdict

    return json.dumps([asdict(check) for check in checks], indent=2)
