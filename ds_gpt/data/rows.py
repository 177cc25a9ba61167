"""A fixed number of sequences, each whole by itself: examples, conversations, pairs. They stand in for a `Split`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_gpt.config import ConfigError, Problem
from ds_gpt.data.permutation import permute, random_bits
from ds_gpt.data.sampler import Sampler

IGNORED = -100  # a target that counts for nothing: PyTorch's own number
_ORDER = 6  # a stream of random numbers


@dataclass(frozen=True)
class Rows:
    """Rows of several arrays.

    Attributes:
        arrays: what a batch is made of, inputs and targets first; the first dimension of each is the row.
        counted: how much each row adds to what a step counts (targets, or pairs), [rows].
        flat: how many of the leading dimensions of inputs and targets make the batch: 1, or 2 for pairs.
    """

    arrays: tuple[np.ndarray, ...]
    counted: np.ndarray
    flat: int = 1

    def __len__(self) -> int:
        """Tokens of all rows, padding included."""
        return self.arrays[0].size

    @property
    def item_tokens(self) -> int:
        """Tokens of one row, padding included; of a pair, of both sequences."""
        return len(self) // len(self.counted)

    def sampler(self, context: int, global_batch_size: int, seed: int) -> RowSampler:
        """What says which rows a step reads."""
        return RowSampler(len(self), context, global_batch_size, seed, len(self.counted))

    def evaluation_windows(self, context: int, sequences: int) -> np.ndarray:
        """The rows on which the validation loss is taken, [at most `sequences`] int64, spread evenly."""
        count = min(sequences, len(self.counted))
        return np.arange(count, dtype=np.int64) * (len(self.counted) - 1) // max(1, count - 1)

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The first `length` tokens of rows, [len(starts), length] int64."""
        return self.arrays[0].reshape(-1, self.arrays[0].shape[-1])[starts, :length].astype(np.int64)

    def batch(self, rows: np.ndarray, step: int) -> list[np.ndarray]:
        """What the objective takes of these rows, the same at every step."""
        found = [array[rows] for array in self.arrays]
        return [
            array.reshape(-1, array.shape[-1]) if place < 2 and self.flat == 2 else array
            for place, array in enumerate(found)
        ]

    def count(self, rows: np.ndarray) -> int:
        """What a step of these rows counts."""
        return int(self.counted[rows].sum())


@dataclass(frozen=True)
class RowSampler(Sampler):
    """Each row once an epoch, in an order of its own."""

    n_tokens: int
    context: int
    global_batch_size: int
    seed: int
    rows: int

    def starts(self, numbers: np.ndarray) -> np.ndarray:
        """The rows that stand at `numbers` in the order of training, [N] int64 both."""
        epoch, index = np.divmod(numbers, self.rows)
        return permute(index, self.rows, random_bits(self.seed, _ORDER, epoch))


@dataclass(frozen=True)
class Example:
    """The tokens of one example, and which of them are the answer's; [N] both."""

    ids: np.ndarray
    answer: np.ndarray

    @property
    def length(self) -> int:
        """Places that it takes in a row: its last token is a target only."""
        return len(self.ids) - 1


def packed(examples: Sequence[Example], context: int, packing: bool) -> Rows:
    """Rows of `context` tokens for supervised fine-tuning: inputs, targets, documents and positions, each
    [rows, context].

    Only an answer's tokens are targets. Every example is a document whose positions begin at 0, and so is the padding.
    """
    lengths = [example.length for example in examples]
    bins = best_fit(lengths, context) if packing else [[index] for index in range(len(examples))]
    inputs, positions = (np.zeros((len(bins), context), dtype=np.int64) for _ in range(2))
    documents = np.full((len(bins), context), -1, dtype=np.int64)
    targets = np.full((len(bins), context), IGNORED, dtype=np.int64)
    for row, members in enumerate(bins):
        first = 0
        for number, index in enumerate(members):
            example, place = examples[index], slice(first, first + lengths[index])
            inputs[row, place] = example.ids[:-1]
            targets[row, place] = np.where(example.answer[1:], example.ids[1:], IGNORED)
            documents[row, place] = number
            positions[row, place] = np.arange(lengths[index])
            first = place.stop
    return Rows((inputs, targets, documents, positions), (targets != IGNORED).sum(axis=1))


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Which of `lengths` share a row of `room`: the longest first, each into the fullest row with room for it.

    Best-fit decreasing (Johnson 1973) needs at most 11/9 of the fewest rows, and one more. None may exceed `room`.
    """
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    free = 0  # bit n: some row has room for n
    for index in np.argsort([-length for length in lengths], kind="stable").tolist():
        if fitting := free >> lengths[index]:
            left = lengths[index] + (fitting & -fitting).bit_length() - 1
            row = by_room[left].pop()
            free ^= 0 if by_room[left] else 1 << left
        else:
            left, row = room, len(rows)
            rows.append([])
        rows[row].append(index)
        left -= lengths[index]
        by_room.setdefault(left, []).append(row)
        free |= 1 << left
    return rows


def paired(pairs: Sequence[tuple[Example, Example]], whole: bool) -> Rows:
    """Rows of pairs, the preferred answer first: inputs and targets [pairs, 2, longest].

    `whole`: for a reward model, which reads every token and has one target, at the last. Otherwise the targets are
    those of the answers, and there is room for reference log-probabilities, [pairs, 2].
    """
    longest = max(example.length for pair in pairs for example in pair) + whole
    inputs = np.zeros((len(pairs), 2, longest), dtype=np.int64)
    targets = np.full((len(pairs), 2, longest), IGNORED, dtype=np.int64)
    for row, pair in enumerate(pairs):
        for side, example in enumerate(pair):
            if whole:
                inputs[row, side, : len(example.ids)] = example.ids
                targets[row, side, len(example.ids) - 1] = example.ids[-1]
            else:
                inputs[row, side, : example.length] = example.ids[:-1]
                targets[row, side, : example.length] = np.where(example.answer[1:], example.ids[1:], IGNORED)
    arrays = (inputs, targets) if whole else (inputs, targets, np.zeros((len(pairs), 2), dtype=np.float32))
    return Rows(arrays, np.ones(len(pairs), dtype=np.int64), flat=2)


def divided(count: int, val_fraction: float, seed: int, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Which of `count` are trained on and which are validated on, drawn by `seed`. Raises ConfigError for too few."""
    if count < 2:
        raise ConfigError(
            Problem(
                f"data.corpus has {count} usable {what}",
                "one is validated on, the others are trained on",
                "give more of them",
            )
        )
    order = np.random.default_rng([seed, _ORDER]).permutation(count)
    held_out = min(count - 1, max(1, round(count * val_fraction)))
    return np.sort(order[held_out:]), np.sort(order[:held_out])
