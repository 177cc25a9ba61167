"""Records with named fields, out of JSONL and Parquet files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

from ds_gpt.config import ConfigError, Problem
from ds_gpt.data.toy import TOYS

Record = dict[str, Any]


def records(source: str) -> Iterator[tuple[str, Record]]:
    """(where it stands, record) of every record of `source`: JSONL or Parquet files, or one of `TOYS`; in order.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
    """
    if source in TOYS:
        yield from ((f"{source}, record {number}", record) for number, record in enumerate(TOYS[source](), 1))
        return
    paths = sorted(glob(str(Path(source).expanduser())))
    if not paths:
        raise ConfigError(
            Problem(
                f"data.corpus = '{source}' is no file",
                "its records are what is trained on",
                "give a .jsonl or .parquet file, or a glob",
            )
        )
    for path in paths:
        yield from _of_parquet(path) if path.endswith(".parquet") else _of_lines(path)


def _of_lines(path: str) -> Iterator[tuple[str, Record]]:
    with open(path, encoding="utf-8-sig") as file:  # Windows programs begin a file with a byte order mark
        try:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise ValueError(f"line {number} is no object")
                    yield f"{path}:{number}", record
        except ValueError as error:
            raise _unreadable(path, f"is not JSONL: {error}") from error


def _of_parquet(path: str) -> Iterator[tuple[str, Record]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", record
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(path, f"is not a Parquet file that can be read: {error}") from error


def _unreadable(path: str, what: str) -> ConfigError:
    return ConfigError(Problem(f"'{path}' {what}", "each line, or row, is an example", "mend it, or leave it out"))
