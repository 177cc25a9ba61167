"""Decoding: one token after another, of many sequences at once, each token computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ds_gpt.config import ConfigError, Problem
from ds_gpt.generation.options import Sampling
from ds_gpt.generation.sampling import sample_next
from ds_gpt.model.cache import KeyValueCache
from ds_gpt.model.gpt import GPT

Forward = Callable[..., Tensor]


def slide_tokens(context: int) -> int:
    """How many of the oldest tokens a full window drops at once."""
    return max(1, context // 4)


@dataclass(eq=False)
class _Row:
    """A sequence that is being continued.

    Attributes:
        index: its number among the prompts.
        tokens: prompt and continuation.
        start: index of the first token in the window.
        generator: its own random numbers.
    """

    index: int
    tokens: list[int]
    start: int
    generator: torch.Generator


class Decoder:
    """Continues prompts of any lengths together; what a row gets does not depend on its neighbours.

    The model sees a window: the last `context` tokens of the prompt, and what follows. Whenever the window is full it
    drops its oldest quarter, and what remains is computed anew, because it now stands elsewhere, or (rotary positions
    do not mind that) has keys that still know of what was dropped. So each token is what a full forward pass over its
    window would give, and a window costs one such pass for every `slide_tokens(context)` tokens.

    Args:
        model: in evaluation mode.
        prompts: token ids, one or more each.
        new_tokens: at most so many are added to each.
        sampling: how tokens are chosen.
        seeds: of each row's random numbers: the same number gives the same text in any batch.
        vocab_size: ids from here on are never chosen: a model may be padded beyond its tokenizer. None: all may be.
        forward: calls the model; an engine that wraps it, where there is one. Under ZeRO-3 every rank must decode the
            same prompts, since all gather the parameters together.
    """

    def __init__(
        self,
        model: GPT,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        sampling: Sampling,
        seeds: Sequence[int],
        vocab_size: int | None = None,
        forward: Forward | None = None,
    ) -> None:
        assert all(len(prompt) for prompt in prompts), "a prompt without tokens is refused before it comes here"
        self._model, self._context = model, model.config.context
        self._sampling, self._vocab_size, self._forward = (
            sampling,
            vocab_size or model.config.vocabulary,
            forward or model,
        )
        self._device = next(model.parameters()).device
        self._rows = [
            _Row(
                index, list(map(int, prompt)), max(0, len(prompt) - self._context), torch.Generator().manual_seed(seed)
            )
            for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        longest = max((len(row.tokens) - row.start for row in self._rows), default=0)
        self._cache = KeyValueCache(model, len(self._rows), min(self._context, longest + new_tokens))
        self._seen_BV = self._occurring() if sampling.repetition_penalty != 1 else None
        self._left = new_tokens
        self._filled = False
        self.slides = 0

    @property
    def running(self) -> bool:
        """Whether there is a token left to add."""
        return bool(self._rows) and self._left > 0

    def step(self) -> dict[int, int]:
        """Add one token to every sequence that is not finished. Returns it under the prompt's number.

        Raises:
            ConfigError: the model computes no finite logits.
        """
        # Inference mode costs a fifth less on small models, but what wraps a model may keep tensors for training.
        with torch.inference_mode() if self._forward is self._model else torch.no_grad():
            return self._step()

    def _step(self) -> dict[int, int]:
        logits_BV = self._extend() if self._filled else self._fill(self._rows, upto=None)
        self._filled = True
        if not torch.isfinite(logits_BV := logits_BV[:, : self._vocab_size]).all():
            raise ConfigError(
                Problem(
                    "the model computes logits that are not finite: there is no next token",
                    "its weights are not finite or too large: the training diverged before this checkpoint",
                    "give an earlier checkpoint (RUN/checkpoints/step_NNNNNNN); ds-gpt diagnose RUN says what happened",
                )
            )
        uniform_B = torch.cat([torch.rand(1, generator=row.generator, dtype=torch.float64) for row in self._rows])
        next_B = sample_next(logits_BV, self._sampling, uniform_B.to(self._device), self._seen_BV)
        if self._seen_BV is not None:
            self._seen_BV.scatter_(1, next_B[:, None], True)
        chosen = next_B.tolist()
        for row, token in zip(self._rows, chosen, strict=True):
            row.tokens.append(token)
        self._left -= 1
        return {row.index: token for row, token in zip(self._rows, chosen, strict=True)}

    def finish(self, indices: set[int]) -> None:
        """Add nothing more to these sequences; the others cost less from here on."""
        kept = [place for place, row in enumerate(self._rows) if row.index not in indices]
        if len(kept) < len(self._rows):
            self._rows = [self._rows[place] for place in kept]
            places = torch.tensor(kept, dtype=torch.int64, device=self._device)
            self._cache.keep(places)
            if self._seen_BV is not None:
                self._seen_BV = self._seen_BV[places]

    def _fill(self, rows: list[_Row], upto: int | None) -> Tensor:
        """Compute the windows of some rows, up to the token `upto`: the logits of the last token of each, BV."""
        windows = [row.tokens[row.start : upto] for row in rows]
        lengths, places = [len(window) for window in windows], [self._rows.index(row) for row in rows]
        tokens_BT = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
        for place, window in enumerate(windows):
            tokens_BT[place, : len(window)] = torch.tensor(window)
        with self._cache.filling(torch.tensor(places, device=self._device)):
            return self._logits(tokens_BT.to(self._device), None, lengths)

    def _extend(self) -> Tensor:
        """Compute the newest token of each row; first make room where a window is full. Returns BV."""
        full = [row for row in self._rows if len(row.tokens) - row.start > self._context]
        for row in full:
            row.start += slide_tokens(self._context)
        if full and self._context > 1:
            self._fill(full, upto=-1)
        self.slides += len(full)
        tokens_BT = torch.tensor([[row.tokens[-1]] for row in self._rows], device=self._device)
        places = [len(row.tokens) - 1 - row.start for row in self._rows]
        with self._cache.extending(places, self._device) as positions_BT:
            return self._logits(tokens_BT, positions_BT, [1] * len(places))

    def _logits(self, tokens_BT: Tensor, positions_BT: Tensor | None, lengths: list[int]) -> Tensor:
        """Logits of the last token of each row, BV: the model never forms those of the others."""

        def at_last(x_BTD: Tensor, weight_VD: Tensor) -> Tensor:
            if min(lengths) == x_BTD.shape[1]:
                return F.linear(x_BTD[:, -1], weight_VD)
            last_B = torch.tensor(lengths, device=self._device) - 1
            return F.linear(x_BTD[torch.arange(len(last_B), device=self._device), last_B], weight_VD)

        return self._forward(tokens_BT, positions_BT, loss=at_last)

    def _occurring(self) -> Tensor:
        seen_BV = torch.zeros(len(self._rows), self._vocab_size, dtype=torch.bool)
        for place, row in enumerate(self._rows):
            seen_BV[place, row.tokens] = True
        return seen_BV.to(self._device)


def row_seeds(seed: int, count: int, first: int = 0) -> list[int]:
    """Seeds of the random numbers of sequences `first` to `first` + `count` - 1, unrelated to one another."""
    return [
        int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> 1)
        for number in range(first, first + count)
    ]


def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    vocab_size: int | None = None,
    forward: Forward | None = None,
) -> list[list[int]]:
    """Each prompt's continuation by `new_tokens` tokens; the arguments are those of `Decoder`."""
    decoder = Decoder(model, prompts, new_tokens, sampling, row_seeds(seed, len(prompts)), vocab_size, forward)
    continued: list[list[int]] = [[] for _ in prompts]
    while decoder.running:
        for index, token in decoder.step().items():
            continued[index].append(token)
    return continued
