"""What is trained on, or validated on: tokens that lie in many arrays and belong to one or several corpora."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ds_gpt.data.sampler import MixtureSampler, Sampler, WindowSampler, evaluation_windows, mixture_counts
from ds_gpt.data.shards import Shard


@dataclass(frozen=True)
class Split:
    """The tokens of one or several corpora, read as if they lay one after the other.

    Attributes:
        corpora: for each corpus its parts, in order: an array, [n] of integers, or a shard, mapped when it is read.
        weights: for each corpus its share of the windows.
    """

    corpora: tuple[tuple[np.ndarray | Shard, ...], ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, tokens: np.ndarray) -> Split:
        """One corpus in one array."""
        return cls(((tokens,),), (1.0,))

    @cached_property
    def _parts(self) -> tuple[np.ndarray | Shard, ...]:
        return tuple(part for corpus in self.corpora for part in corpus if _length(part))

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([_length(part) for part in self._parts], dtype=np.int64)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each corpus."""
        return tuple(sum(map(_length, corpus)) for corpus in self.corpora)

    def __len__(self) -> int:
        """Tokens of all corpora."""
        return sum(self.lengths)

    @property
    def has_documents(self) -> bool:
        """Whether it is known where documents end: in shards it is."""
        return all(isinstance(part, Shard) for part in self._parts)

    def sampler(self, context: int, global_batch_size: int, seed: int) -> Sampler:
        """What says which windows a step reads. Raises ConfigError where a corpus is shorter than one window."""
        if len(self.corpora) == 1:
            return WindowSampler(len(self), context, global_batch_size, seed)
        return MixtureSampler(self.lengths, self.weights, context, global_batch_size, seed)

    def evaluation_windows(self, context: int, sequences: int) -> np.ndarray:
        """Starts of the windows on which the validation loss is taken, [at most `sequences`, but one a corpus] int64.

        Of each corpus its weight's share, so that the mean over them is the mixture's. Raises ConfigError as `sampler`.
        """
        starts, counts = np.cumsum((0, *self.lengths[:-1])), mixture_counts(self.weights, sequences)
        found = zip(starts, self.lengths, counts, strict=True)
        return np.concatenate([start + evaluation_windows(length, context, max(1, count)) for start, length, count in found])

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Windows of `length` tokens, [len(starts), length] int64. A window may cross from one part to the next."""
        windows = np.empty((len(starts), length), dtype=np.int64)
        for window, start in zip(windows, starts.tolist(), strict=True):
            for filled, part, first, count in self._pieces(start, length):
                window[filled : filled + count] = _tokens(part)[first : first + count]
        return windows

    def documents(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Which document of its window each token belongs to, [len(starts), length] int64, counted from 0."""
        windows = np.zeros((len(starts), length), dtype=np.int64)
        for window, start in zip(windows, starts.tolist(), strict=True):
            for filled, part, first, count in self._pieces(start, length):
                assert isinstance(part, Shard), "only shards know where documents end"
                ends = part.document_ends()
                low, high = np.searchsorted(ends, np.array([first, first + count - 1], dtype=np.uint64), side="right")
                after = ends[low:high].astype(np.int64) - first + filled  # the places in the window where a document begins
                window[after] += 1
                if filled:  # documents do not cross from one shard to the next
                    window[filled] += 1
        return np.cumsum(windows, axis=1)

    def _pieces(self, start: int, length: int):  # noqa: ANN202
        """The parts that a window lies in: (place in the window, part, place in the part, number of tokens)."""
        filled, number = 0, int(np.searchsorted(self._ends, start, side="right"))
        while filled < length:
            part = self._parts[number]
            first = start + filled - (int(self._ends[number]) - _length(part))
            count = min(length - filled, _length(part) - first)
            yield filled, part, first, count
            filled, number = filled + count, number + 1


def _length(part: np.ndarray | Shard) -> int:
    return part.n_tokens if isinstance(part, Shard) else len(part)


def _tokens(part: np.ndarray | Shard) -> np.ndarray:
    return part.tokens() if isinstance(part, Shard) else part


def joined(splits: Sequence[Split], weights: Sequence[float]) -> Split:
    """A mixture of splits of one corpus each."""
    return Split(tuple(corpus for split in splits for corpus in split.corpora), tuple(weights))
