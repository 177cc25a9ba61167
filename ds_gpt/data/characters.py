"""Tokenizers that need no library: characters, and the numbers of the synthetic corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ds_gpt.config import ConfigError, Problem
from ds_gpt.data.tokenizer import REPLACEMENT, Tokenizer, token_dtype

_CHUNK = 1 << 20  # characters converted at a time: code points take four bytes each
_LISTED = 8  # unknown characters that an error names one by one
BETWEEN_DOCUMENTS = "\n"  # no character is reserved for it; a line end is the least surprising


@dataclass(frozen=True)
class CharTokenizer(Tokenizer):
    """One token per character; the ids follow the order of the code points."""

    characters: str  # sorted and distinct; lone surrogates allowed

    @classmethod
    def from_text(cls, text: str) -> CharTokenizer:
        """The tokenizer that knows exactly the characters of `text`."""
        return cls("".join(sorted(set(text))))

    @property
    def vocab_size(self) -> int:
        """Number of distinct ids (V)."""
        return len(self.characters)

    @property
    def separator(self) -> int | None:
        """The line feed, where it is a known character."""
        position = self.characters.find(BETWEEN_DOCUMENTS)
        return position if position >= 0 else None

    @property
    def ends(self) -> tuple[int, ...]:
        """None: a line feed may stand in the midst of a text."""
        return ()

    @cached_property
    def _id_of_point(self) -> np.ndarray:
        points = _code_points(self.characters)
        # One entry past the last known point stays -1: `take` clips every higher point to it.
        table = np.full(int(points.max(initial=0)) + 2, -1, dtype=np.int32)
        table[points] = np.arange(points.size, dtype=np.int32)
        return table

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, [len(text)], uint16 or uint32. Raises ConfigError naming the characters it does not know."""
        ids = np.empty(len(text), dtype=token_dtype(self.vocab_size))
        for start in range(0, len(text), _CHUNK):
            found = self._id_of_point.take(_code_points(text[start : start + _CHUNK]), mode="clip")
            if found.min() < 0:
                raise self._unknown(text)
            ids[start : start + _CHUNK] = found
        return ids

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """The text of `ids`. An id outside the vocabulary (a model padded beyond it) prints as U+FFFD."""
        points = np.append(_code_points(self.characters), np.uint32(ord(REPLACEMENT)))
        ids = np.asarray(ids, dtype=np.int64).ravel()
        known = np.where((ids >= 0) & (ids < self.vocab_size), ids, self.vocab_size)
        return points[known].astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")

    def to_dict(self) -> dict[str, object]:
        """What `save` writes. A list, because JSON joins two neighbouring lone surrogates into one character."""
        return {"kind": "char", "characters": list(self.characters)}

    @classmethod
    def from_dict(cls, fields: dict[str, object]) -> CharTokenizer:
        """The inverse of `to_dict`. Raises ValueError on anything else."""
        characters = fields.get("characters")
        if not isinstance(characters, list) or not all(isinstance(c, str) and len(c) == 1 for c in characters):
            raise ValueError("'characters' is not a list of single characters")
        if characters != sorted(set(characters)):
            raise ValueError("'characters' is not sorted and distinct")
        return cls("".join(characters))

    def _unknown(self, text: str) -> ConfigError:
        counts = Counter(text)
        unknown = sorted(counts.keys() - set(self.characters))
        named = ", ".join(f"{c!r} (U+{ord(c):04X}) x {counts[c]}" for c in unknown[:_LISTED])
        more = f" and {len(unknown) - _LISTED} more" if len(unknown) > _LISTED else ""
        return ConfigError(
            Problem(
                what=f"the text has {len(unknown)} distinct characters that the tokenizer does not know: {named}{more}",
                why=f"the vocabulary is the {self.vocab_size} distinct characters of the training corpus",
                fix="replace or remove them, or train on a corpus that contains them",
            )
        )


@dataclass(frozen=True)
class SyntheticTokenizer(Tokenizer):
    """The tokenizer of a corpus that has no text: the ids are the tokens, and print as numbers."""

    size: int

    @property
    def vocab_size(self) -> int:
        """Number of distinct ids (V)."""
        return self.size

    @property
    def separator(self) -> int | None:
        """None: the corpus has no documents."""
        return None

    def encode(self, text: str) -> np.ndarray:
        """Ids of numbers separated by spaces, [count]. Raises ConfigError on anything but numbers below V."""
        words = text.split()
        bad = [word for word in words if not (word.isascii() and word.isdigit() and int(word) < self.vocab_size)]
        if bad:
            raise ConfigError(
                Problem(
                    what=f"{bad[0]!r} is not a token of the synthetic corpus ({len(bad)} such words)",
                    why=f"its tokens are the numbers 0 to {self.vocab_size - 1}",
                    fix="write numbers separated by spaces, for example '0 1 2'",
                )
            )
        return np.array([int(word) for word in words], dtype=token_dtype(self.vocab_size))

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """The ids as numbers separated by spaces."""
        return " ".join(str(int(i)) for i in np.asarray(ids, dtype=np.int64).ravel())

    def to_dict(self) -> dict[str, object]:
        """What `save` writes."""
        return {"kind": "synthetic", "vocab_size": self.vocab_size}

    @classmethod
    def from_dict(cls, fields: dict[str, object]) -> SyntheticTokenizer:
        """The inverse of `to_dict`. Raises ValueError on anything else."""
        vocab_size = fields.get("vocab_size")
        if type(vocab_size) is not int or vocab_size < 1:
            raise ValueError(f"'vocab_size' is {vocab_size!r}, not a positive integer")
        return cls(vocab_size)


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
