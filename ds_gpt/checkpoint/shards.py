"""The files of a checkpoint that hold tensors: one a rank, with the pieces that the rank keeps.

safetensors, because reading such a file runs no code from it and can fetch a part of a tensor.
"""

from __future__ import annotations

import hashlib
import os
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

from ds_gpt.engine.state import WEIGHT, Piece

SHARD_PATTERN = "rank_*.safetensors"


@dataclass(frozen=True)
class FileRecord:
    """A file as the manifest knows it."""

    name: str
    size_bytes: int
    sha256: str


def shard_name(rank: int) -> str:
    """File name of a rank's pieces."""
    return f"rank_{rank:05d}.safetensors"


def snapshot(pieces: Iterable[Piece], rank: int) -> dict[str, Tensor]:
    """Host copies of what this rank is to write, so that training may go on meanwhile.

    Ranks that keep the same pieces take turns with them.
    """
    tensors = {}
    for index, piece in enumerate(pieces):
        if not piece.keepers or piece.keepers[index % len(piece.keepers)] != rank:
            continue
        for kind, tensor in piece.tensors.items():
            tensors[piece_key(piece.parameter, kind, piece.start)] = tensor.detach().to("cpu", copy=True)
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


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ShardReader:
    """Reads any elements of any parameter out of the files of all ranks, whatever wrote them.

    Only what is asked for is read: no rank ever holds more than the piece it is filling.
    """

    def __init__(self, folder: Path) -> None:
        self._files = ExitStack()
        # (parameter, kind) to (first element, one past the last, open file, key)
        self._index: dict[tuple[str, str], list[tuple[int, int, object, str]]] = defaultdict(list)
        for path in sorted(folder.glob(SHARD_PATTERN)):
            file = self._files.enter_context(safe_open(path, framework="pt"))
            for key in file.keys():
                parameter, kind, start = _parse(key)
                (numel,) = file.get_slice(key).get_shape()
                self._index[parameter, kind].append((start, start + numel, file, key))
        for found in self._index.values():
            found.sort(key=lambda entry: entry[0])

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
        entries = self._index.get((parameter, WEIGHT))
        return max(last for _, last, _, _ in entries) if entries else 0

    def read(self, parameter: str, kind: str, start: int, numel: int) -> Tensor | None:
        """`numel` elements of a flattened parameter from `start`, fp32; None where the optimizer had no such state.

        Raises:
            ValueError: elements are missing, or the parameter is not known.
        """
        entries = self._index.get((parameter, kind))
        if entries is None:
            if kind == WEIGHT:
                raise ValueError(f"there is no parameter '{parameter}'")
            return None
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


def piece_key(parameter: str, kind: str, start: int) -> str:
    """Name of a piece in a rank's file."""
    return f"{kind}:{start}:{parameter}"


def _parse(key: str) -> tuple[str, str, int]:
    kind, start, parameter = key.split(":", 2)
    return parameter, kind, int(start)
