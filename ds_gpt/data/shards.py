"""Token shards: a header, the tokens of many documents one after another, and where each document ends.

Layout, all numbers little-endian: 128 bytes of header; the tokens, uint16 or uint32, filled up with zeros to a multiple
of 8 bytes; one uint64 a document, the number of tokens up to and with its last. The header holds a sha256 of all that
follows it, the identity of the tokenizer, and a CRC-32 of itself.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

import numpy as np

from ds_gpt.config import ConfigError, Problem
from ds_gpt.data.replacing import replacing
from ds_gpt.data.tokenizer import token_dtype

_MAGIC = b"ds_gpt tokens 1\n"
_FIELDS = struct.Struct("<16sIQQQ32s32s")  # magic, vocabulary, tokens, documents, bytes of text, tokenizer identity, sha256
_HEADER_BYTES = 128
_READ_BYTES = 1 << 22
_MAPPED = 256  # shards mapped at a time: each map holds a file descriptor, of which a process may have few


@dataclass(frozen=True)
class Shard:
    """A shard on disk, of which the header has been read and nothing else."""

    path: Path
    vocab_size: int
    n_tokens: int
    n_documents: int
    n_text_bytes: int  # of the documents' text in UTF-8
    tokenizer_identity: str  # sha256, hex
    digest: str  # sha256 (hex) of tokens and document ends, as the header states it; `verify` takes it anew

    @classmethod
    def open(cls, path: Path, tokenizer_identity: str | None = None) -> Shard:
        """Read the header, and see that the file is as long as it says. Raises ConfigError naming the file.

        Where `tokenizer_identity` is given, a shard of another tokenizer is refused too.
        """
        try:
            with path.open("rb") as file:
                header = file.read(_HEADER_BYTES)
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise _unfit(path, f"cannot be read: {error.strerror}") from error
        if not header.startswith(_MAGIC):
            raise _unfit(path, "is not a token shard of ds_gpt: it does not begin as one")
        if len(header) < _HEADER_BYTES or zlib.crc32(header[:-4]) != int.from_bytes(header[-4:], "little"):
            raise _unfit(path, "is damaged: its header does not agree with the header's own checksum")
        _, *numbers, identity, digest = _FIELDS.unpack_from(header)
        shard = cls(path, *numbers, identity.hex(), digest.hex())
        if size != shard._size:
            raise _unfit(path, f"is damaged: it has {size:,} bytes, and {shard._size:,} by its header")
        if tokenizer_identity not in (None, shard.tokenizer_identity):
            raise _unfit(path, f"was made by another tokenizer ({shard.tokenizer_identity[:12]}..., not {tokenizer_identity[:12]}...)")
        return shard

    @property
    def _dtype(self) -> np.dtype:
        return token_dtype(self.vocab_size)

    @property
    def _ends_at(self) -> int:
        return _HEADER_BYTES + _padded(self.n_tokens * self._dtype.itemsize)

    @property
    def _size(self) -> int:
        return self._ends_at + 8 * self.n_documents

    def tokens(self) -> np.ndarray:
        """The tokens, [n_tokens], a read-only map."""
        return _map(self.path, self.digest)[_HEADER_BYTES : _HEADER_BYTES + self.n_tokens * self._dtype.itemsize].view(self._dtype)

    def document_ends(self) -> np.ndarray:
        """For each document the number of tokens in the shard up to its end, [n_documents] uint64, a read-only map."""
        return _map(self.path, self.digest)[self._ends_at : self._size].view("<u8")

    def verify(self) -> None:
        """Read everything and compare it with the checksum, some seconds a gigabyte. Raises ConfigError naming the file."""
        content = hashlib.sha256()
        with self.path.open("rb") as file:
            file.seek(_HEADER_BYTES)
            while piece := file.read(_READ_BYTES):
                content.update(piece)
        if content.hexdigest() != self.digest:
            raise _unfit(self.path, "is damaged: its content does not agree with the checksum in its header")


class ShardWriter:
    """A shard being written, document by document, in constant memory."""

    def __init__(self, file: IO[bytes], ends: IO[bytes], vocab_size: int, tokenizer_identity: str, separator: int | None) -> None:
        self._file, self._ends = file, ends
        self._vocab_size, self._identity = vocab_size, tokenizer_identity
        self._dtype = token_dtype(vocab_size)
        self._separator = np.array([] if separator is None else [separator], dtype=self._dtype)
        self._content = hashlib.sha256()
        self.n_tokens = self.n_documents = self.n_text_bytes = 0
        file.write(bytes(_HEADER_BYTES))

    def add(self, ids: np.ndarray, n_text_bytes: int) -> None:
        """Append a document: the separator, then `ids`, which are `n_text_bytes` of text."""
        document = np.concatenate([self._separator, ids.astype(self._dtype, copy=False)])
        self._write(document.tobytes())
        self.n_tokens += len(document)
        self.n_documents += 1
        self.n_text_bytes += n_text_bytes
        self._ends.write(self.n_tokens.to_bytes(8, "little"))

    def finish(self) -> None:
        """Write document ends and header."""
        used = self.n_tokens * self._dtype.itemsize
        self._write(bytes(_padded(used) - used))
        self._ends.seek(0)
        while piece := self._ends.read(_READ_BYTES):
            self._write(piece)
        identity, digest = bytes.fromhex(self._identity), self._content.digest()
        counts = self.n_tokens, self.n_documents, self.n_text_bytes
        fields = _FIELDS.pack(_MAGIC, self._vocab_size, *counts, identity, digest)
        header = fields.ljust(_HEADER_BYTES - 4, b"\0")
        self._file.seek(0)
        self._file.write(header + zlib.crc32(header).to_bytes(4, "little"))

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._content.update(content)


@contextmanager
def writing_shard(path: Path, vocab_size: int, tokenizer_identity: str, separator: int | None) -> Iterator[ShardWriter]:
    """A writer of the shard `path`, which appears under that name if the block ends well, and not at all otherwise."""
    # Document ends stand last but are known as one goes: 8 bytes each, of which there may be millions.
    with replacing(path) as temporary, temporary.open("wb") as file, tempfile.TemporaryFile(dir=path.parent) as ends:
        writer = ShardWriter(file, ends, vocab_size, tokenizer_identity, separator)
        yield writer
        writer.finish()


@lru_cache(maxsize=_MAPPED)
def _map(path: Path, digest: str) -> np.ndarray:  # noqa: ARG001  the digest tells a file from a later one of its name
    """The bytes of a file. A view of it keeps the map alive after it has left this cache."""
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def _unfit(path: Path, what: str) -> ConfigError:
    return ConfigError(
        Problem(
            f"'{path}' {what}",
            "a shard is used only as it was written",
            "prepare the corpus again, or copy this file anew from where it is intact",
        )
    )
