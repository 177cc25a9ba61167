"""The documents in text, JSONL and Parquet files and in data sets of Hugging Face, cut into spans for processes to share.

Every span is read as a stream: memory does not grow with its size.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from ds_gpt.config import ConfigError, Problem

HUGGING_FACE = "hf:"
SPAN_BYTES = 1 << 25
_TEXT_BYTES = 1 << 16  # a text file longer than this is cut at line ends into documents of this length
_LONGEST_LINE = 1 << 30
_ROWS = 256  # of a Parquet file, read at a time
_LINES = (".jsonl", ".ndjson")
_COMPRESSED = (".gz", ".zst")

Advance = Callable[[int], None]  # told how many bytes of a source were read


@dataclass(frozen=True)
class Span:
    """Bytes `first` to `last` of a file, its row groups from `first` up to `last`, or part `first` of a data set."""

    source: str  # a path, or hf:NAME
    first: int
    last: int
    n_bytes: int  # of the source; 0 where that is not known


@dataclass(frozen=True)
class Reading:
    """How sources are read: which field of a record is the text, and which part of a data set of Hugging Face."""

    field: str = "text"
    separator: str | None = None  # what stands between the documents of a text file; None: a file is one, cut if it is long
    hf_config: str | None = None
    hf_split: str = "train"


def spans(sources: Sequence[str], reading: Reading, span_bytes: int = SPAN_BYTES) -> list[Span]:
    """What lies in `sources`, paths of files and hf:NAME, in order. Reads no text. Raises ConfigError.

    A file whose lines can be found from anywhere in it is cut after every `span_bytes`, a Parquet file between row
    groups; a compressed file, a text with separators, and a part of a data set are whole.
    """
    found: list[Span] = []
    for source in sources:
        if source.startswith(HUGGING_FACE):
            found += [Span(source, number, number + 1, 0) for number in range(_data_set(source, reading).num_shards)]
        elif source.endswith(".parquet"):
            found += _row_groups(source, reading, span_bytes)
        else:
            size = os.path.getsize(source)
            whole = source.endswith(_COMPRESSED) or (reading.separator is not None and not _has_lines(source))
            step = size if whole else span_bytes
            cuts = [(first, min(first + step, size)) for first in range(0, size, step or 1)]
            found += [Span(source, first, last, last - first) for first, last in cuts]
    return found


def documents(span: Span, reading: Reading, advance: Advance = lambda n_bytes: None) -> Iterator[str]:
    """The documents of a span, in order, blank ones left out. Raises ConfigError naming what cannot be read."""
    if span.source.startswith(HUGGING_FACE):
        found = _of_data_set(span, reading)
    elif span.source.endswith(".parquet"):
        found = _of_parquet(span, reading, advance)
    elif _has_lines(span.source):
        found = _of_lines(span, reading, advance)
    elif reading.separator is None:
        found = _of_text(span, advance)
    else:
        found = _separated(_of_text(span, advance), reading.separator)
    try:
        yield from (text for text in found if text and not text.isspace())
    except OSError as error:  # also where a compressed file is damaged
        raise _unreadable(span.source, f"cannot be read: {error}") from error


def _has_lines(source: str) -> bool:
    """Whether each line is a record of its own, whatever the compression."""
    path = Path(source)
    return (path.stem if path.suffix in _COMPRESSED else path.name).endswith(_LINES)


def _uncompressed(raw: IO[bytes], source: str) -> Any:
    if not source.endswith(_COMPRESSED):
        return raw
    import pyarrow

    # Not Python's gzip and zstandard: the latter takes a file that was cut short for a whole one.
    name = "gzip" if source.endswith(".gz") else "zstd"
    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), name), 1 << 20)


class _Stream:
    """The bytes of a span as its text needs them: uncompressed, from the first line that begins in it to the last."""

    def __init__(self, raw: IO[bytes], span: Span, longest_line: int, advance: Advance) -> None:
        self._raw, self._advance = raw, advance
        self.file = _uncompressed(raw, span.source)
        self._compressed = self.file is not raw
        self.place, self._last = 0, span.last
        if not self._compressed:
            self.place, self._last = (_line_start(raw, place, longest_line) for place in (span.first, span.last))
            raw.seek(self.place)
        self._told = self.place

    @property
    def left(self) -> int:
        """Bytes left, or as many as anybody may ask for where that is not known."""
        return _LONGEST_LINE if self._compressed else self._last - self.place

    def took(self, content: bytes) -> bytes:
        """Count what was read."""
        self.place += len(content)
        now = self._raw.tell() if self._compressed else self.place
        self._advance(now - self._told)
        self._told = now
        return content


def _line_start(file: IO[bytes], place: int, longest_line: int) -> int:
    """Where the first line begins at or after `place`; with longer lines, where the first character does."""
    if place == 0:
        return 0
    file.seek(place - 1)
    line = file.readline(longest_line)
    if len(line) < longest_line or line.endswith(b"\n"):
        return place - 1 + len(line)
    return place + next((i for i, byte in enumerate(line[1:5]) if byte & 0xC0 != 0x80), 0)


def _of_text(span: Span, advance: Advance) -> Iterator[str]:
    with open(span.source, "rb") as raw:
        stream = _Stream(raw, span, _TEXT_BYTES, advance)
        kept = b""
        while stream.left and (content := stream.file.read(min(_TEXT_BYTES, stream.left))):
            content = kept + content
            if len(content) - len(kept) == _TEXT_BYTES < stream.left:
                content += stream.file.readline(min(_TEXT_BYTES, stream.left - _TEXT_BYTES))
            stream.took(content[len(kept) :])
            # In a line without end, a character may be cut in two: its first bytes wait for the others.
            whole = len(content) - (_begun(content) if stream.left else 0)
            yield _decoded(content[:whole], span.source, stream.place - len(content))
            kept = content[whole:]
        if kept:
            yield _decoded(kept, span.source, stream.place - len(kept))


def _separated(texts: Iterator[str], separator: str) -> Iterator[str]:
    """A text that comes in pieces, parted at every `separator`; memory grows with the longest document."""
    kept: list[str] = []  # of the document that has not ended
    tail = ""  # what follows them: the last characters, in which a separator may have begun
    for text in texts:
        first, *others = (tail + text).split(separator)
        if others:
            yield "".join(kept) + first
            yield from others[:-1]
            kept = []
        rest = others[-1] if others else first
        settled = max(0, len(rest) - len(separator) + 1)
        kept.append(rest[:settled])
        tail = rest[settled:]
    yield "".join(kept) + tail


def _begun(content: bytes) -> int:
    """Length of the character that `content` ends in the midst of, 0 if it does not."""
    for length in range(1, min(4, len(content) + 1)):
        byte = content[-length]
        if byte & 0xC0 == 0xC0:
            return length if length < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else 0
        if byte < 0x80:
            return 0
    return 0


def _decoded(content: bytes, source: str, place: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = f"is not UTF-8: byte {content[error.start]:#04x} at offset {place + error.start}"
        raise _unreadable(source, wrong, "convert it, for example: iconv -f LATIN1 -t UTF-8 OLD > NEW") from error


def _of_lines(span: Span, reading: Reading, advance: Advance) -> Iterator[str]:
    with open(span.source, "rb") as raw:
        stream = _Stream(raw, span, _LONGEST_LINE, advance)
        while stream.left > 0 and (line := stream.took(stream.file.readline(_LONGEST_LINE))):
            place = stream.place - len(line)
            if len(line) == _LONGEST_LINE:
                raise _unreadable(span.source, f"has a line longer than {_LONGEST_LINE:,} bytes at byte {place}")
            if not line.isspace():
                yield _record(line, span.source, place, reading)


def _record(line: bytes, source: str, place: int, reading: Reading) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise _unreadable(source, f"is not JSONL at byte {place}: {error}") from error
    has = f"it has {', '.join(map(repr, record))}" if isinstance(record, dict) else "it is no object"
    return _text(record.get(reading.field) if isinstance(record, dict) else None, source, f"at byte {place}: {has}", reading)


def _text(value: object, source: str, where: str, reading: Reading) -> str:
    """The text of a record. Lone surrogates, which only JSON's escapes can bring, become U+FFFD: they have no UTF-8."""
    if not isinstance(value, str):
        raise _unreadable(source, f"has a record without text in '{reading.field}' {where}", "name the field by --field")
    return value if value.isascii() else value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _row_groups(source: str, reading: Reading, span_bytes: int) -> Iterator[Span]:
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.ParquetFile(source).metadata
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(source, f"is not a Parquet file: {error}") from error
    names = metadata.schema.to_arrow_schema().names
    if reading.field not in names:
        raise _unreadable(source, f"has no column '{reading.field}': it has {', '.join(map(repr, names))}", "name the field by --field")
    first = n_bytes = 0
    for number in range(metadata.num_row_groups):
        n_bytes += metadata.row_group(number).total_byte_size
        if n_bytes >= span_bytes or number == metadata.num_row_groups - 1:
            yield Span(source, first, number + 1, n_bytes)
            first, n_bytes = number + 1, 0


def _of_parquet(span: Span, reading: Reading, advance: Advance) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(span.source) as file:
            for number in range(span.first, span.last):
                rows, n_bytes = (getattr(file.metadata.row_group(number), name) for name in ("num_rows", "total_byte_size"))
                for batch in file.iter_batches(_ROWS, row_groups=[number], columns=[reading.field]):
                    for value in batch.column(0).to_pylist():
                        yield _text(value, span.source, f"in row group {number}", reading)
                    advance(n_bytes * batch.num_rows // rows)
    except pyarrow.ArrowException as error:
        raise _unreadable(span.source, f"is a damaged Parquet file: {error}") from error


@lru_cache(maxsize=4)
def _data_set(source: str, reading: Reading) -> Any:
    name = source.removeprefix(HUGGING_FACE)
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            Problem(f"'{source}' needs the package datasets", "it is an optional extra", "pip install 'ds_gpt[hf]'")
        ) from None
    try:
        return datasets.load_dataset(name, reading.hf_config, split=reading.hf_split, streaming=True)
    except Exception as error:  # whatever the data set's own reader and the network raise
        raise _unreadable(source, f"cannot be opened: {error}", "check name, --hf-config and --hf-split, and the network") from error


def _of_data_set(span: Span, reading: Reading) -> Iterator[str]:
    whole = _data_set(span.source, reading)
    for record in whole.shard(num_shards=whole.num_shards, index=span.first):
        yield _text(record.get(reading.field), span.source, f"in part {span.first}: it has {', '.join(map(repr, record))}", reading)


def _unreadable(source: str, what: str, fix: str = "mend it, or leave it out") -> ConfigError:
    return ConfigError(Problem(f"'{source}' {what}", "every document of the corpus is read", fix))
