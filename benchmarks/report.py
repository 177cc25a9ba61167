"""Make the report of a folder of records: ``report.md``, and ``report.html``, one page that holds its pictures too.

Everything in it is computed from the records; nothing is measured or asked of the machine.
"""

from __future__ import annotations

import argparse
import base64
import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import checks, plots, tables
from benchmarks.prediction import predict_record
from benchmarks.results import Record, read
from ds_gpt.config import ConfigError, Problem
from ds_gpt.planner import Prediction

Predict = Callable[[Record], Prediction | None]


@dataclass(frozen=True)
class Section:
    """A piece of the report: a heading, sentences, a table (its first row the headings), a picture."""

    heading: str
    text: str = ""
    table: Sequence[Sequence[str]] = ()
    picture: bytes | None = None
    level: int = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The folder."""
    parser.add_argument("folder", type=Path, help="a folder of records; the report is written into it")


def write(folder: Path, predict: Predict = predict_record) -> None:
    """Write both forms of the report into the folder. Raises ConfigError where it holds no records, or cannot be written to."""
    records = read(folder)
    if not records:
        raise ConfigError(Problem(f"'{folder}' holds no records of a suite", fix="run one first: python -m benchmarks --suite cpu"))
    sections = list(build(records, predict))
    try:
        (folder / "report.md").write_text(markdown(sections), encoding="utf-8")
        (folder / "report.html").write_text(page(sections), encoding="utf-8")
    except OSError as error:
        fix = "python -m benchmarks report FOLDER, once that is mended: the records are there"
        raise ConfigError(Problem(f"the report cannot be written into '{folder}': {error.strerror}", fix=fix)) from None
    print(f"report: {folder / 'report.html'} and report.md")


def build(records: Sequence[Record], predict: Predict = predict_record) -> Iterator[Section]:
    """The sections, in order."""
    suite = records[0]["suite"]
    fine = [record for record in records if record["status"] == "ok"]
    yield Section(f"Benchmarks: suite {suite}", tables.introduction(records), level=1)
    if suite == checks.SUITE:
        yield Section("Checks", checks.ABOUT, checks.table(checks.judge(records, predict)))
    for model, group in tables.by_model(fine).items():
        yield Section(model, tables.findings(group))
        picture = plots.throughput("Throughput by ZeRO stage", tables.throughput_bars(group))
        about = f"{tables.about_peaks(fine)} {tables.ABOUT_CURVE}"
        yield Section("Throughput and peak memory", about, tables.overview(group, fine, predict), picture, 3)
        if goals := tables.goals(group):
            yield Section("Goals", tables.ABOUT_GOALS, goals, level=3)
        if plain := tables.against_plain(group):
            yield Section("Against plain PyTorch", tables.ABOUT_PLAIN, plain, level=3)
        yield from _scaling(group)
        yield from _memory(group)
        rows = [(tables.label(record), tables.phases(record)) for record in group]
        yield Section("Where the time goes", tables.ABOUT_TIME, tables.communication(group), plots.stacked("Time of a step", rows, "time"), 3)
        if overlap := tables.overlap(group):
            yield Section("Communication behind computation", tables.ABOUT_OVERLAP, overlap, level=3)
    failed = [record for record in records if record["status"] != "ok"]
    if failed:
        yield Section("Cases that did not run", "Results too: what does not fit, and what fails.", tables.failures(failed))
    yield Section("Published elsewhere", tables.ABOUT_PUBLISHED, tables.published())


def _scaling(group: Sequence[Record]) -> Iterator[Section]:
    families = tables.families(group)
    if not families:
        return
    bars, lines = tables.ratio_bars(families), tables.scaling_lines(families)
    yield Section("One device against many", tables.ABOUT_SCALING, tables.one_against_many(families), plots.ratios("More ranks, against the fewest", bars), 3)
    yield Section("Scaling efficiency", "", (), plots.scaling("Efficiency against ideal", lines), 3)


def _memory(group: Sequence[Record]) -> Iterator[Section]:
    rows = [(tables.label(record), record["measured"]["memory"]["peak_bytes"]) for record in group if "peak_bytes" in record["measured"]["memory"]]
    if rows:
        yield Section("Memory by kind", tables.ABOUT_MEMORY, tables.memory(group), plots.stacked("Live tensors at their peak", rows, "memory"), 3)


def markdown(sections: Sequence[Section]) -> str:
    """The report as Markdown; its pictures are in the HTML page."""
    lines: list[str] = []
    for section in sections:
        if section.picture and not section.table and not section.text:
            continue
        lines += [f"{'#' * section.level} {section.heading}", ""]
        if section.text:
            lines += [section.text, ""]
        if section.table:
            head, *rows = section.table
            lines += [_row(head), _row(["---", *["---:"] * (len(head) - 1)]), *map(_row, rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1080px; margin: 2em auto; padding: 0 1em; }
h1, h2 { border-bottom: 1px solid #ddd; padding-bottom: .2em; } h3 { margin-top: 2em; }
table { border-collapse: collapse; font-size: 13px; margin: 1em 0; display: block; overflow-x: auto; }
th, td { padding: .3em .7em; border-bottom: 1px solid #e4e4e4; text-align: right; white-space: nowrap; }
th { background: #f5f5f5; } th:first-child, td:first-child { text-align: left; } img { max-width: 100%; }
"""


def page(sections: Sequence[Section]) -> str:
    """The report as one HTML page that loads nothing from anywhere."""
    body: list[str] = []
    for section in sections:
        body.append(f"<h{section.level}>{html.escape(section.heading)}</h{section.level}>")
        body += [f"<p>{html.escape(paragraph)}</p>" for paragraph in section.text.split("\n\n") if paragraph]
        if section.picture:
            body.append(f'<img alt="{html.escape(section.heading)}" src="data:image/png;base64,{base64.b64encode(section.picture).decode()}">')
        if section.table:
            head, *rows = section.table
            body.append("<table><tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>")
            body += ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
            body.append("</table>")
    title = html.escape(sections[0].heading)
    head = f'<head><meta charset="utf-8"><title>{title}</title><style>{_CSS}</style></head>'
    return f'<!doctype html>\n<html lang="en">{head}\n<body>\n' + "\n".join(body) + "\n</body></html>\n"
