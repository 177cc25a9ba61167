"""``ds-gpt eval``: how good a run's model is."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_gpt.commands.arguments import Parser, add_device_argument, torch_device
from ds_gpt.commands.failure import print_or_fail


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Parse the command line and evaluate; ends the process with status 2 on bad input."""
    parser = Parser(prog=prog, description="Measure how good a run's model is.", allow_abbrev=False)
    parser.add_argument(
        "run", metavar="RUN", help="a run folder (its newest intact checkpoint), or the folder of a checkpoint"
    )
    parser.add_argument(
        "--corpus",
        metavar="CORPUS",
        help="text file, glob, prepared folder or known name (default: the run's own, its validation split)",
    )
    parser.add_argument(
        "--sequences",
        metavar="N",
        type=int,
        help="windows to measure on, or as many as there are (default: the run's evaluation.sequences)",
    )
    parser.add_argument(
        "--tasks", metavar="A,B", help="also run these tasks of the lm-evaluation-harness (pip install 'ds_gpt[eval]')"
    )
    parser.add_argument("--tasks-dir", metavar="DIR", help="a folder with tasks of your own for the harness")
    parser.add_argument("--limit", metavar="N", type=int, help="examples of each task (default: all)")
    add_device_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    print_or_fail(lambda: run(parser.parse_args(arguments)))


def run(options: argparse.Namespace) -> None:
    """Load, measure, print. Raises ConfigError."""
    from ds_gpt.checkpoint.saved_model import find_saved_model
    from ds_gpt.config import ConfigError, Problem
    from ds_gpt.trainer.harness import run_tasks
    from ds_gpt.trainer.quality import measure, validation_data

    problems = [
        Problem(f"--{name} {value} is not a number of them", fix="give 1 or more")
        for name, value in (("sequences", options.sequences), ("limit", options.limit))
        if value is not None and value < 1
    ]
    if problems:
        raise ConfigError(problems)
    device = torch_device(options.device)
    saved = find_saved_model(options.run, lambda text: print(text, file=sys.stderr))
    quality = measure(
        saved, validation_data(saved, options.corpus), device, options.sequences or saved.run.evaluation.sequences
    )
    numbers: dict[str, float | None] = {
        "validation loss": quality.loss,
        "perplexity": quality.perplexity,
        "bits per byte": quality.bits_per_byte,
        "accuracy": quality.accuracy,
        "confidence": quality.confidence,
        "calibration error": quality.calibration_error,
    }
    tasks: dict[str, dict[str, Any]] = {}
    if options.tasks:
        folder = Path(options.tasks_dir) if options.tasks_dir else None
        tasks = run_tasks(saved, options.tasks.split(","), device, options.limit, folder)
    corpus = options.corpus or saved.run.data.title
    if options.json:
        content = {"checkpoint": str(saved.checkpoint), "corpus": corpus, "tokens": quality.tokens}
        content |= {name.replace(" ", "_"): value for name, value in numbers.items()}
        print(json.dumps({**content, "tasks": tasks}, indent=2, default=str))
    else:
        print(f"{saved.checkpoint} on {corpus}, {quality.tokens:,} tokens\n\n{_lines(numbers)}")
        for task, measures in tasks.items():
            print(f"\n{task}\n{_lines({name: value for name, value in measures.items() if isinstance(value, float)})}")


def _lines(numbers: Mapping[str, float | None]) -> str:
    width = max(map(len, numbers), default=0)
    return "\n".join(f"{name:<{width}}  {value:.4f}" for name, value in numbers.items() if value is not None)
