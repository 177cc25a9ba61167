"""Which windows of the tokens a step reads. Arithmetic on (seed, step): no state, and the same for every world size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_gpt.config import ConfigError, Problem
from ds_gpt.data.permutation import permute, random_bits

_ORDER, _OFFSET = 0, 1  # two independent streams of random numbers for each epoch


@dataclass(frozen=True)
class WindowSampler:
    """The training windows of every optimizer step.

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

    def windows(self, step: int) -> np.ndarray:
        """Starts of the windows of optimizer step `step` (from 0), [global_batch_size] int64.

        May cross into the next epoch. O(global_batch_size) time and memory for any step.
        """
        assert step >= 0
        first = step * self.global_batch_size
        epoch, index = np.divmod(np.arange(first, first + self.global_batch_size), self.windows_per_epoch)
        window = permute(index, self.windows_per_epoch, random_bits(self.seed, _ORDER, epoch))
        offset = random_bits(self.seed, _OFFSET, epoch) % np.uint64(self._slack + 1)
        return offset.astype(np.int64) + window * self.context

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
                fix="reduce model.context, give a longer data.corpus, or change data.val_fraction, "
                "which divides it between training and validation",
            )
        )
