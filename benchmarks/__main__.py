"""``python -m benchmarks CASE``: measure, keep a record, and bring the README's tables up to date."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import checkpoints, convergence, overhead, readme

CASES = {"checkpoints": checkpoints, "convergence": convergence, "overhead": overhead}


def main() -> None:
    """Run the case that was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure ds_gpt and keep records of it.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, case in CASES.items():
        verb = verbs.add_parser(name, help=(case.__doc__ or "").partition("\n")[0])
        verb.add_argument("--records", type=Path, default=readme.RECORDS, help="folder for the record (default: benchmarks/records)")
        case.add_arguments(verb)
    verbs.add_parser("readme", help=(readme.__doc__ or "").partition("\n")[0])
    options = parser.parse_args()
    if options.verb == "readme":
        readme.update()
    else:
        print(f"record written: {CASES[options.verb].measure(options)}")


if __name__ == "__main__":
    main()
