"""Masked tokens and corrupted spans: windows of text made into something to restore. Drawn anew at every step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_gpt.config.stage import ObjectiveConfig
from ds_gpt.data.rows import IGNORED
from ds_gpt.data.sampler import Sampler
from ds_gpt.data.split import Split

_MASKED, _REPLACED = 0.8, 0.1  # of the chosen tokens; the others stay as they are (Devlin et al. 2019, section 3.1)
_STREAM = 7  # of random numbers


@dataclass(frozen=True)
class Corrupted:
    """A `Split` whose windows are corrupted when they are read.

    Attributes:
        split: the text.
        objective: how.
        context: tokens of a sequence.
        tokens: distinct ids of the text; the mask, or the sentinels, come after them.
        seed: with the step and the window it settles what is drawn.
    """

    split: Split
    objective: ObjectiveConfig
    context: int
    tokens: int
    seed: int

    def __len__(self) -> int:
        """Tokens of the text."""
        return len(self.split)

    def sampler(self, context: int, global_batch_size: int, seed: int) -> Sampler:
        """As `Split.sampler`."""
        return self.split.sampler(context, global_batch_size, seed)

    def evaluation_windows(self, context: int, sequences: int) -> np.ndarray:
        """As `Split.evaluation_windows`."""
        return self.split.evaluation_windows(context, sequences)

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """As `Split.read`."""
        return self.split.read(starts, length)

    def batch(self, starts: np.ndarray, step: int) -> list[np.ndarray]:
        """Inputs and targets, [len(starts), context], and how many tokens at the start of each all others see."""
        corrupt = _mask if self.objective.name == "masked" else _corrupt_spans
        windows = self.split.read(starts, self.context)
        made = [
            corrupt(self, window, self._generator(step, int(start)))
            for window, start in zip(windows, starts, strict=True)
        ]
        return [np.stack(arrays) for arrays in zip(*made, strict=True)]

    def count(self, starts: np.ndarray) -> int:
        """Targets of these windows: as many in each, so that all weigh alike."""
        if self.objective.name == "masked":
            return len(starts) * masked_tokens(self.context, self.objective.rate)
        _, corrupted, spans = span_sizes(self.context, self.objective)
        return len(starts) * (corrupted + spans + 1)

    def _generator(self, step: int, start: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, _STREAM, step, start])


def added_tokens(objective: ObjectiveConfig, context: int) -> int:
    """Ids that an objective needs beyond those of the text: a mask, or a sentinel for each span and one for the end."""
    if objective.name == "next_token":
        return 0
    return 1 if objective.name == "masked" else span_sizes(context, objective)[2] + 1


def masked_tokens(context: int, rate: float) -> int:
    """How many tokens of each sequence are predicted; one at least."""
    return max(1, round(rate * context))


def _mask(
    corrupted: Corrupted, window: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """BERT's: of the chosen tokens 80% become the mask, 10% any token, 10% stay. Each sees the whole sequence."""
    chosen = generator.choice(len(window), masked_tokens(len(window), corrupted.objective.rate), replace=False)
    targets = np.full(len(window), IGNORED, dtype=np.int64)
    targets[chosen] = window[chosen]
    fate = generator.random(len(chosen))
    inputs = window.copy()
    inputs[chosen[fate < _MASKED]] = corrupted.tokens
    replaced = chosen[(fate >= _MASKED) & (fate < _MASKED + _REPLACED)]
    inputs[replaced] = generator.integers(0, corrupted.tokens, len(replaced))
    return inputs, targets, np.int64(len(window))  # type: ignore[return-value]


def span_sizes(context: int, objective: ObjectiveConfig) -> tuple[int, int, int]:
    """Tokens of text, tokens among them in corrupted spans, and spans, of a sequence of `context` inputs.

    The text without its spans and the spans themselves, with a sentinel for each in both and one at the end, are
    context + 1 tokens or a few less: the most text that fits.
    """
    for text in range(context, 1, -1):
        corrupted = min(text - 1, max(1, round(objective.rate * text)))
        spans = min(text - corrupted, max(1, round(corrupted / objective.mean_span)))
        if text + 2 * spans + 1 <= context + 1:
            return text, corrupted, spans
    raise AssertionError(f"a context of {context} has no room for a span")


def _corrupt_spans(
    corrupted: Corrupted, window: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """T5's (Raffel et al. 2020, section 3.1.4) in one sequence: text with sentinels, then what each stands for.

    Kept and corrupted stretches alternate, kept first, their lengths drawn as T5 does. The text with sentinels is a
    prefix that sees itself whole; what follows is predicted from left to right.
    """
    text, noise, spans = span_sizes(len(window), corrupted.objective)
    kept_lengths, noise_lengths = (_parts(total, spans, generator) for total in (text - noise, noise))
    prefix: list[np.ndarray] = []
    answer: list[np.ndarray] = []
    place = 0
    for number, (kept, lost) in enumerate(zip(kept_lengths, noise_lengths, strict=True)):
        sentinel = [corrupted.tokens + number]
        prefix += [window[place : place + kept], np.array(sentinel)]
        answer += [np.array(sentinel), window[place + kept : place + kept + lost]]
        place += kept + lost
    sequence = np.concatenate([*prefix, *answer, [corrupted.tokens + spans]])
    before = sum(map(len, prefix))
    inputs = np.zeros(len(window), dtype=np.int64)
    targets = np.full(len(window), IGNORED, dtype=np.int64)
    inputs[: len(sequence) - 1] = sequence[:-1]
    targets[before - 1 : len(sequence) - 1] = sequence[before:]
    return inputs, targets, np.int64(before)  # type: ignore[return-value]


def _parts(total: int, parts: int, generator: np.random.Generator) -> np.ndarray:
    """`total` in so many parts of at least 1, all divisions equally likely."""
    cuts = np.sort(generator.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))
