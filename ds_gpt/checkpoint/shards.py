"""The files of a checkpoint that hold tensors: one a rank, with the pieces that the rank keeps.

safetensors, because reading such a file runs no code from it and can fetch a part of a tensor.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ds_gpt.data.replacing import sync
from ds_gpt.engine.state import WEIGHT, Columns, Piece

SHARD_PATTERN = "rank_*.safetensors"

# kind:start:parameter, or kind:start[first+count/of]:parameter where the piece is in some columns of the parameter
_KEY = re.compile(r"(?P<kind>[^:]+):(?P<start>\d+)(?:\[(\d+)\+(\d+)/(\d+)\])?:(?P<parameter>.+)")


@dataclass(frozen=True)
class FileRecord:
    """A file as the manifest knows it."""

    name: str
    size_bytes: int
    sha256: str


def shard_name(rank: int) -> str:
    """File name of a rank's pieces."""
    return f"rank_{rank:05d}.safetensors"


def snapshot(pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """Host copies of what this rank is to write, so that training may go on meanwhile.

    Of the ranks that keep the same piece one writes it; which one, the parameter's name says.
    """
    tensors = {}
    for piece in pieces:
        if piece.second or zlib.crc32(piece.parameter.encode()) % piece.copies != piece.copy:
            continue
        for kind, tensor in piece.tensors.items():
            key = piece_key(piece.parameter, kind, piece.start, piece.columns)
            tensors[key] = tensor.detach().to("cpu", copy=True)
    return tensors


def write_shard(folder: Path, rank: int, tensors: dict[str, Tensor]) -> FileRecord:
    """Write a rank's file and see it onto the disk. Raises OSError where the disk refuses."""
    path = folder / shard_name(rank)
    try:
        save_file(tensors, path)
    except Exception as error:  # safetensors wraps the operating system's error in one of its own
        raise OSError(f"'{path}' could not be written: {error}") from error
    with suppress(OSError):  # a disk that knows no modes
        path.chmod(folder.stat().st_mode & 0o666)  # safetensors leaves 0600, whatever the umask: colleagues could not read it
    sync(path)
    return record(path)


def record(path: Path) -> FileRecord:
    """Size and checksum of a file."""
    with path.open("rb") as file:
        return FileRecord(path.name, path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


_Entry = tuple[int, int, object, str]  # first element, one past the last, open file, key


class ShardReader:
    """Reads any elements of any parameter out of the files of all ranks, whatever wrote them.

    Only what is asked for is read: no rank ever holds more than the piece it is filling, or, where that is of a matrix
    whose columns lie elsewhere in the files, the rows that it is in.
    """

    def __init__(self, folder: Path) -> None:
        self._files = ExitStack()
        # (parameter, kind) to the columns that were together to what there is of them
        self._index: dict[tuple[str, str], dict[Columns | None, list[_Entry]]] = defaultdict(lambda: defaultdict(list))
        for path in sorted(folder.glob(SHARD_PATTERN)):
            file = self._files.enter_context(safe_open(path, framework="pt"))
            for key in file.keys():
                parameter, kind, start, columns = _parse(key)
                (numel,) = file.get_slice(key).get_shape()
                self._index[parameter, kind][columns].append((start, start + numel, file, key))
        for shares in self._index.values():
            for entries in shares.values():
                entries.sort(key=lambda entry: entry[0])

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def parameters(self) -> list[str]:
        """Names of the parameters whose weights are here."""
        return sorted(parameter for parameter, kind in self._index if kind == WEIGHT)

    def numel(self, parameter: str) -> int:
        """Elements of a parameter; 0 where it is not known."""
        shares = self._index.get((parameter, WEIGHT), {})
        ends = ((columns, max(last for _, last, _, _ in entries)) for columns, entries in shares.items())
        return max((last if columns is None else last // columns.count * columns.of for columns, last in ends), default=0)

    def read(self, parameter: str, kind: str, start: int, numel: int, columns: Columns | None = None) -> Tensor | None:
        """`numel` elements of a flattened parameter from `start`, fp32; None where the optimizer had no such state.

        With `columns`, the elements are those of these columns alone, flattened.

        Raises:
            ValueError: elements are missing, or the parameter is not known.
        """
        shares = self._index.get((parameter, kind))
        if shares is None:
            if kind == WEIGHT:
                raise ValueError(f"there is no parameter '{parameter}'")
            return None
        if columns in shares:
            return self._read(parameter, kind, start, numel, columns)
        of = columns.of if columns else next(share.of for share in shares if share)
        width = columns.count if columns else of
        first = start // width
        rows = self._rows(parameter, kind, first, -(-(start + numel) // width) - first, of)
        wanted = rows[:, columns.first : columns.first + columns.count] if columns else rows
        return wanted.flatten()[start - first * width :][:numel]

    def _rows(self, parameter: str, kind: str, first: int, count: int, width: int) -> Tensor:
        """Whole rows of a matrix, (count, width), whichever columns were together."""
        shares = self._index[parameter, kind]
        if None in shares:
            return self._read(parameter, kind, first * width, count * width, None).view(count, width)
        together = sorted(columns for columns in shares if columns)
        if [columns.first for columns in together] + [width] != [0] + [columns.first + columns.count for columns in together]:
            raise ValueError(f"{kind} of '{parameter}' lacks columns: of {width}, there are {together}")
        parts = [
            self._read(parameter, kind, first * columns.count, count * columns.count, columns).view(count, -1)
            for columns in together
        ]
        return torch.cat(parts, dim=1)

    def _read(self, parameter: str, kind: str, start: int, numel: int, columns: Columns | None) -> Tensor:
        """Elements of columns that were together."""
        entries = self._index[parameter, kind][columns]
        result, filled, end = torch.empty(numel), start, start + numel
        for first, last, file, key in entries:
            if first > filled or filled == end:
                break
            if last > filled:
                stop = min(last, end)
                result[filled - start : stop - start] = file.get_slice(key)[filled - first : stop - first]  # type: ignore[attr-defined]
                filled = stop
        if filled < end:
            raise ValueError(f"{kind} of '{parameter}' lacks elements {filled} to {end - 1}")
        return result


def piece_key(parameter: str, kind: str, start: int, columns: Columns | None = None) -> str:
    """Name of a piece in a rank's file."""
    of_columns = f"[{columns.first}+{columns.count}/{columns.of}]" if columns else ""
    return f"{kind}:{start}{of_columns}:{parameter}"


def _parse(key: str) -> tuple[str, str, int, Columns | None]:
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"'{key}' names no piece of a parameter")
    kind, start, first, count, of, parameter = match.groups()
    return parameter, kind, int(start), Columns(int(first), int(count), int(of)) if first else None
