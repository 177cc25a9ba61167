"""Causal multi-head self-attention (Vaswani et al. 2017, section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_gpt.config import ModelConfig
from ds_gpt.model.positions import rotate, rotation

Attend = Callable[..., Tensor]  # as `attend`: q, k, v, dropout, and mask_BTS where not all tokens before are seen


def attend(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, dropout: float, window: int | None = None, mask_BTS: Tensor | None = None
) -> Tensor:
    """Causal attention of T queries over S keys, of which the queries' own are the last: a mixture of values, BHTK.

    Each of the G key/value heads serves H / G consecutive query heads (Ainslie et al. 2023). `dropout` is a
    probability, `window` the number of keys that a query sees, its own included (None: all). Where `mask_BTS` is given,
    an `additive` one, it alone says which keys each query sees.
    """
    length, attended, shared = q_BHTK.shape[-2], k_BGSK.shape[-2], q_BHTK.shape[1] // k_BGSK.shape[1]
    if mask_BTS is None and length == attended and (window is None or window >= length):
        options = {"dropout_p": dropout, "is_causal": True, "enable_gqa": shared > 1}
        return F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK, **options)
    # CUDA's kernels take a mask or shared heads, not both: what cannot be fused would form the scores, T x S a head.
    k_BHSK, v_BHSK = (x.repeat_interleave(shared, dim=1) if shared > 1 else x for x in (k_BGSK, v_BGSK))
    if mask_BTS is None:
        added = mask(length, attended, window, q_BHTK.dtype, q_BHTK.device)
    else:
        added = mask_BTS[:, None]  # the same for all heads
    return F.scaled_dot_product_attention(q_BHTK, k_BHSK, v_BHSK, attn_mask=added, dropout_p=dropout)


def visible(length: int, attended: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys each query sees, TS: those up to its own, at most `window` of them."""
    seen_TS = _rows(_visible_from(length, attended, window, device), attended)
    return seen_TS


@lru_cache(maxsize=2)
@torch.inference_mode(False)
def mask(length: int, attended: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is added to the scores, TS: 0 where a key is visible, else -inf.

    One for all layers, each of which keeps it for the backward pass.
    """
    return _rows(additive(_visible_from(length, attended, window, device), dtype), attended)


def _visible_from(length: int, attended: int, window: int | None, device: torch.device) -> Tensor:
    """Whether a query sees a key, by how far before it the key is: from S - 1, the last query's first, to 1 - T."""
    distance = torch.arange(attended - 1, -length, -1, device=device)
    return (distance >= 0) & (distance < (attended if window is None else window))


def _rows(by_distance: Tensor, attended: int) -> Tensor:
    """TS from what depends on the distance of query and key alone: each query's row is the next one's, moved by a key.

    Nothing else of this size is made on the way: T x S distances in int64 would be four times a mask in bf16.
    """
    return by_distance.unfold(0, attended, 1).flip(0).contiguous()


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores so that a query sees the keys marked in `seen` (bool) alone: there 0, else -inf.

    Attention makes the same of a mask of bools, but in every layer anew, and each keeps its own for the backward pass.
    """
    return torch.full(seen.shape, -torch.inf, dtype=dtype, device=seen.device).masked_fill_(seen, 0)


@torch.no_grad()
def attention_maps(q_BHTK: Tensor, k_BGSK: Tensor, window: int | None = None, mask_BTS: Tensor | None = None) -> Tensor:
    """The weights that `attend` gives each key, before dropout: BHTS, fp32, rows sum to 1, zero above the diagonal.

    Fused kernels never form this matrix, whose memory grows with T squared; it is for looking, not for training.
    """
    k_BHSK = k_BGSK.repeat_interleave(q_BHTK.shape[1] // k_BGSK.shape[1], dim=1)
    scores_BHTS = q_BHTK @ k_BHSK.transpose(-2, -1) / math.sqrt(q_BHTK.shape[-1])
    if mask_BTS is None:
        added = additive(visible(*scores_BHTS.shape[-2:], window, scores_BHTS.device), scores_BHTS.dtype)
    else:
        added = mask_BTS[:, None]
    return (scores_BHTS + added).softmax(dim=-1, dtype=torch.float32)


class CausalSelfAttention(nn.Module):
    """Every token attends to itself and to what came before it.

    `attend` is a seam: sequence parallelism and a key/value cache put their own in place; keys are rotated by then.
    `save_attention` makes `forward` keep its maps in `attention_maps`; it is off by default, because a map that
    outlives its step is memory that never returns.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.width % config.heads == 0, "the config layer refuses a width that the heads do not divide"
        self.head_width = config.head_width
        self.shared = config.heads // config.key_heads
        self.dropout = config.dropout
        self.theta = config.rope_theta if config.positions == "rotary" else None
        self.window = config.sliding_window
        self.qkv = nn.Linear(config.width, (config.heads + 2 * config.key_heads) * config.head_width, bias=config.bias)
        self.q_norm = nn.RMSNorm(config.head_width, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_width, eps=config.norm_eps) if config.qk_norm else None
        self.out = nn.Linear(config.width, config.width, bias=config.bias)
        self.attend: Attend = attend if self.window is None else partial(attend, window=self.window)
        self.save_attention = False
        self.attention_maps: Tensor | None = None

    def forward(self, x_BTD: Tensor, turns: Tensor | None = None, mask_BTS: Tensor | None = None) -> Tensor:
        """BTD to BTD. `turns` are the `rotation` of the tokens' positions, 0 to T - 1 where there is none.

        `mask_BTS`, an `additive` one, says which keys each query sees, where that is not all before it.
        """
        q_BHTK, k_BGSK, v_BGSK = self.project(x_BTD, turns)
        self.attention_maps = attention_maps(q_BHTK, k_BGSK, self.window, mask_BTS) if self.save_attention else None
        apart = {} if mask_BTS is None else {"mask_BTS": mask_BTS}  # not every `attend` takes it
        y_BHTK = self.attend(q_BHTK, k_BGSK, v_BGSK, self.dropout if self.training else 0.0, **apart)
        return self.out(y_BHTK.transpose(1, 2).flatten(start_dim=2))

    def project(self, x_BTD: Tensor, turns: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries BHTK, keys and values BGSK; normalized and rotated where the configuration says so.

        The rows of `qkv` are laid out group by group, (G, H/G + 2, K): a group's queries, its key, its value. Any
        contiguous share of G / n groups is then whole heads, which is how tensor parallelism cuts it. So H and G come
        from the projection, not from the config. Without shared heads this is (H, 3, K); GPT-2's is (3, H, K).
        """
        qkv = self.qkv(x_BTD).unflatten(-1, (-1, self.shared + 2, self.head_width))
        q, k, v = qkv.split((self.shared, 1, 1), dim=-2)  # B, T, G, heads of the group, K
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.theta is not None:
            if turns is None:
                turns = rotation(torch.arange(x_BTD.shape[1], device=x_BTD.device), self.head_width, self.theta)
            q, k = rotate(q, turns), rotate(k, turns)
            if self.q_norm is None:
                v = v.clone()  # nothing else needs `qkv` any more, and a view would keep it all until the backward pass
        q_BHTK, k_BGSK, v_BGSK = (heads.flatten(2, 3).transpose(1, 2) for heads in (q, k, v))
        return q_BHTK, k_BGSK, v_BGSK
