"""Choosing the next token."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_gpt.generation.options import Sampling


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
        penalized_BV = torch.where(
            logits_BV > 0, logits_BV / sampling.repetition_penalty, logits_BV * sampling.repetition_penalty
        )
        logits_BV = torch.where(seen_BV, penalized_BV, logits_BV)
    if sampling.temperature == 0:
        return logits_BV.argmax(dim=-1)
    # Subtracting the largest keeps a tiny temperature from overflowing; below what fp32 holds, it would be a zero.
    temperature = max(sampling.temperature, torch.finfo(torch.float32).tiny)
    scaled_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / temperature
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
    """The index, B, at which the cumulated probabilities of each row pass its number: never one of probability 0."""
    cumulated = probs.cumsum(dim=-1)
    found = torch.searchsorted(cumulated, uniform_B[:, None] * cumulated[:, -1:], right=True)
    return found.squeeze(-1)
