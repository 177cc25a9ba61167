"""Which windows of the tokens a step reads. Arithmetic on (seed, step): no state, and the same for every world size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ds_gpt.config import ConfigError, Problem
from ds_gpt.data.permutation import permute, random_bits

# Independent streams of random numbers: two for each epoch, one for each block of a mixture, and a seed for each corpus.
_ORDER, _OFFSET, _MIX, _CORPUS = 0, 1, 4, 5  # the synthetic corpus has 2 and 3
_LARGEST_BLOCK = 1 << 16
_SHARE_ERROR = 1e-3  # of a corpus's weight


class Sampler(ABC):
    """Which windows of `n_tokens` tokens an optimizer step reads: a function of the step, the same for every world size."""

    n_tokens: int
    context: int
    global_batch_size: int  # sequences per optimizer step, over all ranks and micro-steps

    @abstractmethod
    def starts(self, numbers: np.ndarray) -> np.ndarray:
        """Starts of the windows that stand at `numbers` in the order of training, [N] int64 both. O(N) for any numbers."""

    def windows(self, step: int) -> np.ndarray:
        """Starts of the windows of optimizer step `step` (from 0), [global_batch_size] int64.

        May cross into the next epoch. O(global_batch_size) time and memory for any step.
        """
        assert step >= 0
        first = step * self.global_batch_size
        return self.starts(np.arange(first, first + self.global_batch_size))

    def rank_windows(self, step: int, rank: int, ranks: int, micro_batch_size: int) -> list[np.ndarray]:
        """What data-parallel `rank` of `ranks` reads of `windows(step)`: one [micro_batch_size] per micro-step.

        Over all ranks and micro-steps this is `windows(step)`, in order. Raises ConfigError where it does not divide.
        """
        assert 0 <= rank < ranks
        if self.global_batch_size % (micro_batch_size * ranks):
            raise ConfigError(
                Problem(
                    what=f"batch.global_batch_size = {self.global_batch_size} is not a multiple of "
                    f"batch.micro_batch_size x data ranks = {micro_batch_size} x {ranks} = {micro_batch_size * ranks}",
                    why="every rank runs the same whole number of micro-steps in each optimizer step",
                    fix="change batch.global_batch_size, batch.micro_batch_size or the number of ranks",
                )
            )
        return list(self.windows(step).reshape(-1, ranks, micro_batch_size)[:, rank])


@dataclass(frozen=True)
class WindowSampler(Sampler):
    """The training windows of one corpus.

    A window is `context` + 1 tokens (inputs, and targets one further). An epoch cuts the text at stride `context`,
    so that no token is a target twice, and visits each window once, in its own order. Each epoch starts its cut at
    its own offset, so that the model meets the same text with other boundaries. Raises ConfigError where the text is
    shorter than one window.
    """

    n_tokens: int
    context: int
    global_batch_size: int  # sequences per optimizer step, over all ranks and micro-steps
    seed: int

    def __post_init__(self) -> None:
        assert self.context > 0 and self.global_batch_size > 0
        _require_a_window(self.n_tokens, self.context, "training")

    @property
    def windows_per_epoch(self) -> int:
        """Windows in one epoch: as many as fit wherever among `context` places the cut starts, but at least one."""
        return max(1, (self.n_tokens - self.context) // self.context)

    @property
    def _slack(self) -> int:
        """Tokens that an epoch leaves out, before its first window and after its last.

        The cut may start anywhere in it, not only at the first `context` places: the last tokens would never be read.
        """
        return self.n_tokens - 1 - self.windows_per_epoch * self.context

    def starts(self, numbers: np.ndarray) -> np.ndarray:
        """Starts of the windows that stand at `numbers` in the order of training, [N] int64 both."""
        epoch, index = np.divmod(numbers, self.windows_per_epoch)
        window = permute(index, self.windows_per_epoch, random_bits(self.seed, _ORDER, epoch))
        offset = random_bits(self.seed, _OFFSET, epoch) % np.uint64(self._slack + 1)
        return offset.astype(np.int64) + window * self.context


@dataclass(frozen=True)
class MixtureSampler(Sampler):
    """The training windows of several corpora, whose tokens lie one after the other: of each its weight's share.

    The order of training is cut into blocks in which every corpus has its exact share of places, shuffled anew in each
    block. So how many windows of a corpus came before a place is arithmetic too, and each corpus is read in the order
    of a `WindowSampler` of its own, no window skipped or read twice in one of its epochs. Raises ConfigError where a
    corpus is shorter than one window, or has no share that can be met.
    """

    lengths: tuple[int, ...]  # tokens of each corpus
    weights: tuple[float, ...]
    context: int
    global_batch_size: int
    seed: int

    def __post_init__(self) -> None:
        assert len(self.lengths) == len(self.weights) > 1
        _ = self._corpora, self.block

    @property
    def n_tokens(self) -> int:  # type: ignore[override]
        """Tokens of all corpora."""
        return sum(self.lengths)

    @cached_property
    def _corpora(self) -> tuple[WindowSampler, ...]:
        seeds = [int(random_bits(self.seed, _CORPUS, number)[0]) for number in range(len(self.lengths))]
        return tuple(WindowSampler(length, self.context, 1, seed) for length, seed in zip(self.lengths, seeds, strict=True))

    @cached_property
    def block(self) -> np.ndarray:
        """Windows of each corpus in a block, [corpora]: the shortest block that meets every share to 1 in 1,000."""
        shares = np.array(self.weights) / sum(self.weights)
        exact_NC = np.arange(1, _LARGEST_BLOCK + 1)[:, None] * shares
        counts_NC = np.rint(exact_NC).astype(np.int64)
        right_N = (np.abs(counts_NC - exact_NC) <= _SHARE_ERROR * exact_NC).all(axis=1)
        right_N &= counts_NC.sum(axis=1) == np.arange(1, _LARGEST_BLOCK + 1)
        if right_N.any():
            return counts_NC[right_N.argmax()]
        counts = mixture_counts(self.weights, _LARGEST_BLOCK)
        least = int(counts.argmin())
        if not counts[least]:
            raise ConfigError(
                Problem(
                    f"data.corpus: a weight of {self.weights[least]} among {sum(self.weights)} is less than 1 window in {_LARGEST_BLOCK}",
                    "such a corpus would hardly be read",
                    "raise its weight, or leave it out",
                )
            )
        return counts

    def starts(self, numbers: np.ndarray) -> np.ndarray:
        """Starts of the windows that stand at `numbers` in the order of training, [N] int64 both."""
        counts, size = self.block, int(self.block.sum())
        block, place = np.divmod(numbers, size)
        place = permute(place, size, random_bits(self.seed, _MIX, block))
        ends = np.cumsum(counts)
        corpus = np.searchsorted(ends, place, side="right")
        read = block * counts[corpus] + place - (ends - counts)[corpus]  # windows of that corpus before this one
        first_token = np.cumsum((0, *self.lengths[:-1]))
        found = np.empty(len(numbers), dtype=np.int64)
        for number, sampler in enumerate(self._corpora):
            mine = corpus == number
            found[mine] = first_token[number] + sampler.starts(read[mine])
        return found


def mixture_counts(weights: Sequence[float], total: int) -> np.ndarray:
    """`total` divided in proportion to `weights`, [corpora] int64: rounded down, the rest to the largest remainders."""
    exact = np.array(weights) / sum(weights) * total
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts


def evaluation_windows(n_tokens: int, context: int, sequences: int) -> np.ndarray:
    """Starts of the windows on which the validation loss is taken, [at most `sequences`] int64.

    A fixed set, spread evenly from the first token to the last; no token is a target twice. Raises ConfigError where
    the validation split is shorter than one window.
    """
    assert sequences > 0
    _require_a_window(n_tokens, context, "validation")
    last_start = n_tokens - 1 - context
    count = min(sequences, (n_tokens - 1) // context)
    return np.arange(count, dtype=np.int64) * last_start // max(1, count - 1)


def rank_share(offsets: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    """The windows that `rank` evaluates, [ceil(N / ranks)] int64, padded with -1.

    Equally long on every rank: a rank with fewer forwards than the others would leave them waiting in a collective.
    """
    assert 0 <= rank < ranks
    padding = np.full(-len(offsets) % ranks, -1, dtype=np.int64)
    return np.concatenate([offsets, padding])[rank::ranks]


def _require_a_window(n_tokens: int, context: int, split: str) -> None:
    if n_tokens < context + 1:
        raise ConfigError(
            Problem(
                what=f"the {split} split has {n_tokens} tokens, fewer than model.context + 1 = {context + 1}",
                why="a sequence is model.context tokens and the one that follows them",
                fix="reduce model.context, give a longer data.corpus, or change the share of the validation split: "
                "data.val_fraction, or --val-fraction of ds-gpt prepare",
            )
        )
