"""Text to token ids and back."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ds_gpt.config import ConfigError, Problem
from ds_gpt.data.cache import replacing

_CHUNK = 1 << 20  # characters converted at a time: code points take four bytes each
_REPLACEMENT = 0xFFFD  # what `decode` prints for an id beyond the vocabulary
_LISTED = 8  # unknown characters that an error names one by one


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest type for ids below `vocab_size`. Little-endian by name: it is also the format on disk."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@dataclass(frozen=True)
class CharTokenizer:
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

    def decode(self, ids: np.ndarray | list[int]) -> str:
        """The text of `ids`. An id outside the vocabulary (a model padded beyond it) prints as U+FFFD."""
        points = np.append(_code_points(self.characters), np.uint32(_REPLACEMENT))
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

    @property
    def identity(self) -> str:
        """sha256 (hex) of everything that decides the ids."""
        return _identity(self)

    def save(self, path: str | Path) -> None:
        """Write JSON, atomically. Raises OSError."""
        _save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> CharTokenizer:
        """Read what `save` wrote. Raises ConfigError where `path` is not a character tokenizer."""
        return _load(path, {"char": cls})

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
class SyntheticTokenizer:
    """The tokenizer of a corpus that has no text: the ids are the tokens, and print as numbers."""

    vocab_size: int

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

    def decode(self, ids: np.ndarray | list[int]) -> str:
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

    @property
    def identity(self) -> str:
        """sha256 (hex) of everything that decides the ids."""
        return _identity(self)

    def save(self, path: str | Path) -> None:
        """Write JSON, atomically. Raises OSError."""
        _save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> SyntheticTokenizer:
        """Read what `save` wrote. Raises ConfigError where `path` is not a synthetic tokenizer."""
        return _load(path, {"synthetic": cls})


Tokenizer = CharTokenizer | SyntheticTokenizer
_CLASSES = {"char": CharTokenizer, "synthetic": SyntheticTokenizer}


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer saved at `path`, of the class its "kind" names. Raises ConfigError where there is none."""
    return _load(path, _CLASSES)


def tokenizer_from_dict(fields: object, classes: dict[str, type] = _CLASSES) -> Tokenizer:
    """The tokenizer that `to_dict` described. Raises ValueError on anything else."""
    kind = fields.get("kind") if isinstance(fields, dict) else None
    if not isinstance(kind, str) or kind not in classes:
        raise ValueError(f"'kind' is {kind!r}, not {' or '.join(map(repr, classes))}")
    return classes[kind].from_dict(fields)


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def _identity(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(json.dumps(tokenizer.to_dict(), sort_keys=True).encode()).hexdigest()


def _save(tokenizer: Tokenizer, path: str | Path) -> None:
    with replacing(Path(path)) as temporary:
        temporary.write_text(json.dumps(tokenizer.to_dict()) + "\n", encoding="ascii")


def _load(path: str | Path, classes: dict[str, type]) -> Tokenizer:
    try:
        return tokenizer_from_dict(json.loads(Path(path).read_bytes()), classes)
    except (OSError, ValueError) as error:  # ValueError: not JSON, not UTF-8, not a tokenizer
        raise ConfigError(
            Problem(
                what=f"'{path}' is not a tokenizer that can be read: {error}",
                why="without the tokenizer of its training a model's ids have no meaning",
                fix="restore the file from the run that trained the model, or give another run",
            )
        ) from error
