"""Bring the README's tables up to date with the records."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.records import REPOSITORY, read_all

RECORDS = REPOSITORY / "benchmarks" / "records"
README = REPOSITORY / "README.md"
_MARKED = re.compile(r"(<!-- records -->\n).*?(<!-- /records -->)", re.DOTALL)


def table(records_folder: Path = RECORDS) -> str:
    """The records as a Markdown table."""
    records = read_all(records_folder)
    rows = []
    if "convergence" in records:
        measured = records["convergence"]["measured"]
        what = "validation loss, 2,000 steps of a 4-layer, width-128 character model on tinyshakespeare"
        rows.append((what, f"{measured['val_loss']:.3f}", f"{measured['published_val_loss']} (published, nanoGPT)", "convergence"))
    if "overhead" in records:
        measured = records["overhead"]["measured"]
        what = "tokens/s of the trainer, one rank, ZeRO-0, as a share of a bare PyTorch loop"
        rows.append((what, f"{measured['ratio_of_medians']:.2f}", "1.00", "overhead"))
    lines = ["| measured | here | reference | record |", "|---|---|---|---|"]
    lines += [f"| {what} | {here} | {reference} | `benchmarks/records/{case}.json` |" for what, here, reference, case in rows]
    return "\n".join(lines) + "\n"


def filled(text: str, records_folder: Path = RECORDS) -> str:
    """README text with the table between its markers renewed."""
    return _MARKED.sub(lambda marks: marks[1] + table(records_folder) + marks[2], text)


def update() -> None:
    """Rewrite README.md."""
    README.write_text(filled(README.read_text()))
