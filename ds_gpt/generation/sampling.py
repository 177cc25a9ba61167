"""Choosing the next token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_gpt.config import ConfigError, Problem


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits; the fields act in this order.

    Attributes:
        repetition_penalty: logits of tokens that occurred before are divided by it where positive, else multiplied
            (Keskar et al. 2019, section 4.1, with the sign taken care of); 1 changes nothing.
        temperature: divides the logits; 0 is greedy.
        top_k: only the k likeliest tokens (Fan et al. 2018); None: all.
        top_p: only the likeliest tokens that together have this probability (Holtzman et al. 2020); None: all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Raises ConfigError with all that is impossible."""
        problems = []
        if not (0 <= self.temperature < math.inf):
            problems.append(Problem(f"temperature {self.temperature:g} is not a number from 0 on", "it divides the logits", "0 is greedy, 1 the model's own distribution"))
        if self.top_k is not None and self.top_k < 1:
            problems.append(Problem(f"top-k {self.top_k} keeps no token", fix="give 1 or more, or leave it out to keep all"))
        if self.top_p is not None and not 0 < self.top_p <= 1:
            problems.append(Problem(f"top-p {self.top_p:g} is no probability", fix="give more than 0 and at most 1, or leave it out to keep all tokens"))
        if not 0 < self.repetition_penalty < math.inf:
            problems.append(Problem(f"repetition penalty {self.repetition_penalty:g} is not positive", "it divides logits", "1 changes nothing, 1.1 to 1.3 is usual"))
        if problems:
            raise ConfigError(problems)


def sample_next(logits_BV: Tensor, sampling: Sampling, uniform_B: Tensor, seen_BV: Tensor | None = None) -> Tensor:
    """One token id for each row of logits, B (int64): a pure function of its arguments.

    Args:
        logits_BV: of any floating type.
        sampling: how to choose.
        uniform_B: a number from [0, 1) for each row, float64: where in the cumulated distribution its token lies.
        seen_BV: whether a token occurred before, bool; for the repetition penalty.
    """
    logits_BV = logits_BV.float()
    if seen_BV is not None:
        penalized_BV = torch.where(logits_BV > 0, logits_BV / sampling.repetition_penalty, logits_BV * sampling.repetition_penalty)
        logits_BV = torch.where(seen_BV, penalized_BV, logits_BV)
    if sampling.temperature == 0:
        return logits_BV.argmax(dim=-1)
    # Subtracting the largest keeps a tiny temperature from overflowing.
    scaled_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is None and sampling.top_p is None:
        return _at(scaled_BV.double().softmax(dim=-1), uniform_B)
    kept = scaled_BV.shape[-1] if sampling.top_k is None else min(sampling.top_k, scaled_BV.shape[-1])
    top_logits, top_tokens = scaled_BV.topk(kept, dim=-1)  # sorted: the likeliest first
    probs = top_logits.double().softmax(dim=-1)
    if sampling.top_p is not None:
        before = probs.cumsum(dim=-1) - probs  # what the likelier ones have; 0 for the likeliest, which always stays
        probs = probs.masked_fill(before >= sampling.top_p, 0.0)
    return top_tokens.gather(dim=-1, index=_at(probs, uniform_B)[:, None]).squeeze(-1)


def _at(probs: Tensor, uniform_B: Tensor) -> Tensor:
    """The index, B, at which the cumulated probabilities of each row pass its number. One of probability 0 is never it."""
    cumulated = probs.cumsum(dim=-1)
    found = torch.searchsorted(cumulated, uniform_B[:, None] * cumulated[:, -1:], right=True)
    return found.squeeze(-1)
