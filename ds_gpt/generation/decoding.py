"""Decoding: one token after another."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ds_gpt.generation.sampling import sample_next


@torch.no_grad()
def generate(
    forward: Callable[[Tensor], Tensor],
    prompt_BT: Tensor,
    new_tokens: int,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The prompt followed by `new_tokens` sampled ones: B, T + new_tokens.

    `forward` turns tokens_BT into logits_BTV: a model, or an engine, in evaluation mode. It is called exactly
    `new_tokens` times whatever comes out, because under ZeRO-3 every rank must gather the parameters
    together: there is no early exit. Beyond `context` tokens the window slides: the model sees the last ones.
    `temperature`, `top_k` and `generator` are those of `sample_next`. Raises ValueError for an empty prompt.
    """
    if prompt_BT.shape[1] == 0:
        raise ValueError("the prompt is empty: give at least one token to continue from")
    tokens_BT = prompt_BT
    for _ in range(new_tokens):
        logits_BTV = forward(tokens_BT[:, -context:])
        next_B = sample_next(logits_BTV[:, -1], temperature, top_k, generator)
        tokens_BT = torch.cat((tokens_BT, next_B[:, None]), dim=1)
    return tokens_BT
