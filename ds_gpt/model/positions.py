"""Rotary positions (Su et al. 2021, RoFormer): a token's place turns its queries and keys, and is added to nothing."""

from __future__ import annotations

import torch
from torch import Tensor


def rotation(positions: Tensor, head_width: int, theta: float) -> Tensor:
    """Cosines and sines, stacked: (2, T, K), or (2, B, T, K) where `positions` (T or BT) differ by sequence; fp32.

    Channels k and k + K/2 are a pair, which turns by position x theta^(-2k/K) (equation 15, paired as Llama does it).
    Computed anew rather than kept in a buffer: a model that is cast to bf16 would have its buffers cast too, and 8
    bits tell no two positions beyond 256 apart.
    """
    exponents = torch.arange(0, head_width, 2, dtype=torch.float32, device=positions.device) / head_width
    angles = positions[..., None].float() * theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(heads: Tensor, turns: Tensor) -> Tensor:
    """Turn each pair of channels of every head by its position's angles.

    So the score of a query at t and a key at s depends on t - s and not on either alone (equation 16). `heads` are
    (B, T, G, heads of the group, K); `turns` is a `rotation`.
    """
    cos, sin = turns.to(heads.dtype)[..., None, None, :]
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin
