"""Causal multi-head self-attention (Vaswani et al. 2017, section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_gpt.config import ModelConfig

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def attend(q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, dropout: float) -> Tensor:
    """Causal attention of T queries over S = T keys: a mixture of values, BHTK. `dropout` is a probability."""
    return F.scaled_dot_product_attention(q_BHTK, k_BHSK, v_BHSK, dropout_p=dropout, is_causal=True)


@torch.no_grad()
def attention_maps(q_BHTK: Tensor, k_BHSK: Tensor) -> Tensor:
    """The weights that `attend` gives each key, before dropout: BHTS, fp32, rows sum to 1, zero above the diagonal.

    Fused kernels never form this matrix, whose memory grows with T squared; it is for looking, not for training.
    """
    scores_BHTS = q_BHTK @ k_BHSK.transpose(-2, -1) / math.sqrt(q_BHTK.shape[-1])
    future_TS = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool, device=scores_BHTS.device).triu(diagonal=1)
    return scores_BHTS.masked_fill(future_TS, -torch.inf).softmax(dim=-1, dtype=torch.float32)


class CausalSelfAttention(nn.Module):
    """Every token attends to itself and to what came before it.

    `attend` is a seam: sequence parallelism puts its own in place. `save_attention` makes `forward` keep its maps
    in `attention_maps`; it is off by default, because a map that outlives its step is memory that never returns.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.width % config.heads == 0, "the config layer refuses a width that the heads do not divide"
        self.head_width = config.head_width
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.attend: Attend = attend
        self.save_attention = False
        self.attention_maps: Tensor | None = None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """BTD to BTD."""
        q_BHTK, k_BHSK, v_BHSK = self.project(x_BTD)
        self.attention_maps = attention_maps(q_BHTK, k_BHSK) if self.save_attention else None
        y_BHTK = self.attend(q_BHTK, k_BHSK, v_BHSK, self.dropout if self.training else 0.0)
        return self.out(y_BHTK.transpose(1, 2).flatten(start_dim=2))

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each BHTK.

        The rows of `qkv` are laid out head by head, (H, 3, K), not GPT-2's (3, H, K): any contiguous share of them is
        then whole heads, which is how tensor parallelism cuts it. So H comes from the projection, not from the config.
        """
        qkv = self.qkv(x_BTD).unflatten(-1, (-1, 3, self.head_width))
        q_BTHK, k_BSHK, v_BSHK = qkv.unbind(dim=-2)
        return q_BTHK.transpose(1, 2), k_BSHK.transpose(1, 2), v_BSHK.transpose(1, 2)
