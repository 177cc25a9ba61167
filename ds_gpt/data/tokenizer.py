"""What every tokenizer is: text to ids and back, and a description from which the same tokenizer can be made again."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from ds_gpt.data.replacing import replace_text

REPLACEMENT = "\ufffd"  # what `decode` prints for an id beyond the vocabulary, and for bytes that are no UTF-8


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest type for ids below `vocab_size`. Little-endian by name: it is also the format on disk."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class Tokenizer(ABC):
    """Text to token ids and back. Equal identities mean equal ids for every text."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of distinct ids (V): all ids are below it."""

    @property
    @abstractmethod
    def separator(self) -> int | None:
        """The id that begins every document of a prepared corpus; None where the vocabulary has none."""

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that end a text and are none of it, the separator first: with documents one after another, it does."""
        return () if self.separator is None else (self.separator,)

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, [N] uint16 or uint32, without special tokens. Raises ConfigError on text it has no ids for."""

    @abstractmethod
    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """The text of `ids`. An id outside the vocabulary (a model padded beyond it) prints as U+FFFD."""

    @abstractmethod
    def to_dict(self) -> dict[str, object]:
        """What `save` writes: everything that decides the ids."""

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, as `encode` gives them."""
        return [self.encode(text) for text in texts]

    @cached_property
    def identity(self) -> str:
        """sha256 (hex) of everything that decides the ids."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write JSON, atomically. Raises OSError."""
        replace_text(Path(path), json.dumps(self.to_dict()) + "\n")
