"""Choosing the next token."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_next(
    logits_BV: Tensor, temperature: float = 1.0, top_k: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """One token id for each row of logits, B (int64).

    `temperature` divides the logits; 0 is greedy. `top_k` keeps the k likeliest tokens (Fan et al. 2018); None,
    or more than V, keeps all. `generator` must be on the device of the logits.
    Raises ValueError where `temperature` < 0 or `top_k` < 1.
    """
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; it must be 0 (greedy) or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be 1 or more, or None for all tokens")
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    vocabulary = logits_BV.shape[-1]
    kept = vocabulary if top_k is None else min(top_k, vocabulary)
    # Sorted, so the likeliest comes first; subtracting it keeps a tiny temperature from overflowing.
    top_logits, top_tokens = logits_BV.float().topk(kept, dim=-1)
    probs = ((top_logits - top_logits[:, :1]) / temperature).softmax(dim=-1)
    choice = torch.multinomial(probs, num_samples=1, generator=generator)
    return top_tokens.gather(dim=-1, index=choice).squeeze(-1)
