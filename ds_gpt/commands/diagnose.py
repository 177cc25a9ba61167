"""``ds-gpt diagnose``: what a good engineer would say about a run, from its metrics alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ds_gpt.commands.arguments import Parser
from ds_gpt.commands.failure import print_or_fail

if TYPE_CHECKING:
    from ds_gpt.trainer.diagnosis import Finding
    from ds_gpt.trainer.metrics_history import History


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Parse the command line and diagnose; ends the process with status 2 on bad input."""
    parser = Parser(prog=prog, description="Say what is wrong with a run, finished or running, and draw its curves.", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="a run folder, or a metrics.jsonl alone")
    parser.add_argument("--plot", metavar="FILE", help="where to draw the curves (default: diagnosis.png beside the metrics)")
    parser.add_argument("--json", action="store_true", help="print summary and findings as JSON")
    print_or_fail(lambda: run(parser.parse_args(arguments)))


def run(options: argparse.Namespace) -> None:
    """Read, diagnose, draw, print. Raises ConfigError where there are no metrics."""
    from ds_gpt.config import ConfigError, Problem
    from ds_gpt.trainer.diagnosis import diagnose
    from ds_gpt.trainer.metrics_history import locate, read, summary
    from ds_gpt.trainer.plots import plot

    metrics = locate(Path(options.run))
    history, unreadable = read(metrics)
    findings = diagnose(history)
    image = Path(options.plot) if options.plot else metrics.with_name("diagnosis.png")
    try:
        plot(history, findings, image, title=str(options.run))
        drawn = f"curves in {image}"
    except (OSError, ValueError) as error:  # ValueError: a file type that matplotlib does not know
        if options.plot:
            raise ConfigError(Problem(f"--plot '{image}' cannot be written: {error}", fix="give another folder, or a name that ends in .png")) from None
        drawn = f"no curves: '{image}' cannot be written; choose another with --plot"
    if options.json:
        found = [asdict(finding) for finding in findings]
        content = {"run": str(options.run), **summary(history), "unreadable_lines": unreadable, "findings": found}
        print(json.dumps(content, indent=2, allow_nan=False))
        return
    print(text(str(options.run), history, findings, unreadable))
    print(f"\n{drawn}")


def text(name: str, history: History, findings: Sequence[Finding], unreadable: int) -> str:
    """The diagnosis as a person reads it. The losses are those of the first and the last line, as the console showed them."""
    from ds_gpt.trainer.metrics_history import summary

    known = summary(history)
    total = f" of {known['total_steps']}" if known["total_steps"] else ""
    parts = [f"{name}: step {known['last_step']}{total}"]
    parts += [f"{known['tokens']:,} tokens"] if isinstance(known["tokens"], int) else []
    parts += [f"loss {_shown(known['loss_start'])} -> {_shown(known['loss_end'])}"]
    if known["val_loss_best"] is not None:
        parts += [f"best validation loss {_shown(known['val_loss_best'])} at step {known['val_loss_best_step']}"]
    parts += [f"{known['tokens_per_s']:,.0f} tokens/s"] if known["tokens_per_s"] is not None else []
    lines = [", ".join(parts)]
    lines += [f"went back from step {left} to {again}: resumed from a checkpoint, or rolled back" for left, again in history.returns]
    if unreadable:
        lines.append(f"{unreadable} lines of the metrics cannot be read: cut off by a crash")
    if known["lines"] < 32:
        lines.append(f"only {known['lines']} line{'s are' if known['lines'] > 1 else ' is'} logged: too few to judge most of it (logging.level DEBUG logs each step)")
    if all(finding.severity == "note" for finding in findings):
        lines.append("\nNothing wrong was found." + (" Worth a note:" if findings else ""))
    for number, finding in enumerate(findings, 1):
        lines.append(f"\n{number}. {finding.severity}: {finding.what}\n   do: {finding.remedy}")
    return "\n".join(lines)


def _shown(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.5g}"
