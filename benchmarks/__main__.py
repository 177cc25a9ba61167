"""``python -m benchmarks``: measure, keep records, and make reports of them. ``ds-gpt bench`` is the same."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import (
    checkpoints,
    checks,
    compare,
    compiled,
    convergence,
    generation,
    overhead,
    planner_report,
    readme,
    report,
    suite,
)
from ds_gpt.commands.failure import print_or_fail, run_or_fail

CASES = {
    "checkpoints": checkpoints,
    "compile": compiled,
    "convergence": convergence,
    "generation": generation,
    "overhead": overhead,
}
_SUITE_FIRST = "Run a suite: --suite NAME [--only --skip --dry-run --fresh --price-per-hour --records]; or one of the verbs below."


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what was asked for; ends the process with status 1 on bad input, where a comparison finds a regression or a check fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=f"Measure ds_gpt and keep records of it. {_SUITE_FIRST}")
    suite.add_arguments(parser)
    verbs = parser.add_subparsers(dest="verb")
    for name, case in CASES.items():
        verb = verbs.add_parser(name, help=(case.__doc__ or "").partition("\n")[0])
        verb.add_argument("--records", type=Path, default=readme.RECORDS, help="folder for the record (default: benchmarks/records)")
        case.add_arguments(verb)
    for name, module in (("report", report), ("compare", compare), ("planner", planner_report)):
        module.add_arguments(verbs.add_parser(name, help=(module.__doc__ or "").partition("\n")[0]))
    verbs.add_parser("readme", help=(readme.__doc__ or "").partition("\n")[0])
    options = parser.parse_args(arguments)
    # A shell starts background jobs with SIGINT ignored; and SIGTERM alone would leave a case's ranks behind.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    if options.verb is None and options.suite is None:
        parser.print_help()
        sys.exit(2)
    run_or_fail(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    match options.verb:
        case None:
            folder = suite.run(options)
            if folder:
                report.write(folder)
                sys.exit(checks.say(folder))
        case "report":
            report.write(options.folder)
        case "compare":
            sys.exit(compare.run(options))
        case "planner":
            print_or_fail(lambda: planner_report.run(options))
        case "readme":
            readme.update()
        case name:
            print(f"record written: {CASES[name].measure(options)}")


if __name__ == "__main__":
    main()
