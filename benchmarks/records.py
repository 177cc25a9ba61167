"""A record: what was measured, by which command, on what. One JSON file each; reports are made from these alone."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ds_gpt.config import ConfigError, Problem
from ds_gpt.data.replacing import replace_text
from ds_gpt.trainer.run_folder import git_commit

REPOSITORY = Path(__file__).resolve().parents[1]
_PACKAGES = ("ds_gpt", "torch", "deepspeed", "numpy")


def write(folder: Path, case: str, command: Sequence[str], device: str, seed: int, measured: dict[str, Any]) -> Path:
    """Write a record and return its path.

    Args:
        folder: where records are kept.
        case: name of the case; also of the file.
        command: what repeats the measurement, run from the repository's root.
        device: what it ran on.
        seed: the run's seed.
        measured: the numbers, with units in their names.
    """
    record = {"case": case, "command": shlex.join(command), **surroundings(), "device": device, "seed": seed, "measured": measured}
    path = folder / f"{case}.json"
    save(path, record)
    return path


def surroundings() -> dict[str, Any]:
    """When, from which code, with what and on which machine something is measured."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "versions": versions(),
        "host": {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")},
    }


def versions(more: Sequence[str] = ()) -> dict[str, str]:
    """Of Python and of the packages that decide what is measured, and of `more` of them."""
    return {"python": platform.python_version()} | {package: version(package) for package in (*_PACKAGES, *more)}


def save(path: Path, record: dict[str, Any]) -> None:
    """Write a record whole or not at all: an interrupted suite goes on from what is there.

    Raises:
        ConfigError: it cannot be written; what was there before still is.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, _compact(json.dumps(record, indent=2)) + "\n")
    except OSError as error:
        raise ConfigError(Problem(f"the record '{path}' cannot be written: {error.strerror}", "records before it are kept", "mend that, then run the same again")) from None


def require_writable(folder: Path) -> None:
    """Raise ConfigError where records cannot be written into the folder: before the first is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(Problem(f"records cannot be written into '{folder}': {error.strerror}", fix="choose another folder with --records")) from None


def _compact(text: str) -> str:
    """Put lists of numbers on one line each: a record of a hundred step times is read by people too."""
    return re.sub(r"\[\s+([-+0-9.eE,\s]+?)\s+\]", lambda match: "[" + re.sub(r"\s+", " ", match[1]) + "]", text)


def read(path: Path) -> dict[str, Any]:
    """One record. Raises ConfigError where the file is none, say half of one, or with the marks of a merge."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = str(error)
    else:
        if isinstance(record, dict):
            return record
        reason = f"a {type(record).__name__}"
    raise ConfigError(Problem(f"'{path}' is no record: {reason}", "nothing is left out in silence", "restore it, or delete it and measure again"))


def read_all(folder: Path) -> dict[str, dict[str, Any]]:
    """All records of a folder, by case."""
    records = [read(path) for path in sorted(folder.glob("*.json"))]
    return {record["case"]: record for record in records}


def cpu_name() -> str:
    """Model name of the CPU, as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
