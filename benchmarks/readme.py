"""Bring the README's tables up to date with the records and the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from benchmarks import planner_report, tables
from benchmarks.records import REPOSITORY, read_all
from benchmarks.results import peak_bytes, read
from ds_gpt.__main__ import VERBS
from ds_gpt.config.parallel import COMBINATIONS, ParallelConfig

RECORDS = REPOSITORY / "benchmarks" / "records"
README = REPOSITORY / "README.md"
PACKAGES = ("config", "model", "data", "learning", "generation", "planner", "engine", "checkpoint", "exchange", "trainer", "commands")


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
    if "checkpoints" in records:
        rows += _checkpoint_rows(records["checkpoints"]["measured"])
    if "compile" in records:
        gains = " / ".join(f"{found['speed_up']:.2f}" for found in records["compile"]["measured"].values())
        rows.append(("processor time of an eager step over that of a compiled one, 0.8M parameters, GPT-2 / Llama", gains, "1.00", "compile"))
    if "generation" in records:
        cases = records["generation"]["measured"]["cases"]
        what = f"tokens/s of decoding {cases[0]['new_tokens']} tokens with the cache, as a multiple of the loop without: {' / '.join(case['model'] for case in cases)}"
        rows.append((what, " / ".join(f"{case['ratio_of_medians']:.1f}" for case in cases), "1.0", "generation"))
    lines = ["| measured | here | reference | record |", "|---|---|---|---|"]
    lines += [f"| {what} | {here} | {reference} | `benchmarks/records/{case}.json` |" for what, here, reference, case in rows]
    return "\n".join(lines) + "\n"


def suite_table(folder: Path = RECORDS / "cpu") -> str:
    """The suite's model in every configuration, one against two ranks, as a Markdown table."""
    rows = [["configuration", "tokens/s, 1 rank", "2 ranks", "CPU ms a step, 1 rank", "2 ranks", "peak MiB a rank, 1 rank", "2 ranks"]]
    found = tables.families([record for record in read(folder) if record["status"] == "ok"]) if folder.is_dir() else {}
    for records in found.values():
        measured = [record["measured"] for record in records]
        cells = [f"{each['tokens_per_s']:,.0f}" for each in measured] + [f"{each['cpu_step_s'] * 1e3:,.0f}" for each in measured]
        rows.append([tables.label(records[0]).rpartition(", ")[0], *cells, *(f"{peak_bytes(each) / 2**20:,.1f}" for each in measured)])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]) + "\n"


def _checkpoint_rows(measured: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    fp32 = [case for case in measured["cases"] if case["precision"] == "fp32"]
    size = f"{measured['parameters'] / 1e6:.1f}M parameters, {measured['ranks']} ranks, ZeRO {' / '.join(str(case['stage']) for case in fp32)}"

    def by_stage(key: str, digits: int) -> str:
        return " / ".join(f"{case[key]:.{digits}f}" for case in fp32)

    return [
        (f"seconds a save behind training holds it up: {size}", by_stage("background_stall_s_median", 2), f"{by_stage('foreground_stall_s_median', 2)} (in the foreground)", "checkpoints"),
        ("seconds to check and load that checkpoint", by_stage("resume_s", 2), "", "checkpoints"),
        ("bytes of a checkpoint per parameter", by_stage("bytes_per_parameter", 2), "12 (fp32 weight and two moments)", "checkpoints"),
    ]


def code_map() -> str:
    """The packages with the first sentence of their docstrings, as a Markdown table."""
    lines = ["| package | |", "|---|---|"]
    for package in PACKAGES:
        docstring = ast.get_docstring(ast.parse((REPOSITORY / "ds_gpt" / package / "__init__.py").read_text())) or ""
        lines.append(f"| `ds_gpt/{package}` | {' '.join(docstring.split(chr(10) * 2)[0].split())} |")
    return "\n".join(lines) + "\n"


def verbs() -> str:
    """What ``ds-gpt --help`` lists, as a Markdown table."""
    lines = ["| `ds-gpt` | |", "|---|---|", *(f"| `{verb}` | {what} |" for verb, what in VERBS.items())]
    return "\n".join(lines) + "\n"


def combinations() -> str:
    """Which parallel degrees go together, and with which ZeRO stages, as a Markdown table."""
    lines = ["| degrees above 1 | ZeRO stages |", "|---|---|"]
    for names, stages in sorted(COMBINATIONS.items(), key=lambda row: len(row[0])):
        used = " x ".join(name for name in ParallelConfig.model_fields if name in names)
        lines.append(f"| {used or 'none: data parallel alone'} | {', '.join(map(str, stages))} |")
    return "\n".join(lines) + "\n"


def filled(text: str, records_folder: Path = RECORDS) -> str:
    """README text with what stands between its markers renewed."""
    contents = {
        "records": table(records_folder),
        "suite": suite_table(records_folder / "cpu"),
        "map": code_map(),
        "verbs": verbs(),
        "planner": planner_report.table(),
        "combinations": combinations(),
    }
    for name, content in contents.items():
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", lambda marks: marks[1] + content + marks[2], text, flags=re.DOTALL)
    return text


def update() -> None:
    """Rewrite README.md."""
    README.write_text(filled(README.read_text()))
