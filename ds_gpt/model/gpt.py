"""A decoder-only transformer: GPT-2's architecture and initialization (Radford et al. 2019), later ideas as options."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ds_gpt.config import ModelConfig
from ds_gpt.model.attention import CausalSelfAttention, additive, visible
from ds_gpt.model.feed_forward import FeedForward
from ds_gpt.model.positions import rotation

INIT_STD = 0.02

RunBlock = Callable[..., Tensor]
Loss = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]


def run_block(block: nn.Module, x_BTD: Tensor, *shared: Tensor | None) -> Tensor:
    """Call `block`, and nothing else. `shared` is what all blocks read beside the stream."""
    return block(x_BTD, *shared)


def norm_of(config: ModelConfig) -> nn.Module:
    """LayerNorm (Ba et al. 2016), or RMSNorm (Zhang and Sennrich 2019), which neither centres nor shifts."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)


class Embedding(nn.Module):
    """What each token is, plus where it stands if positions are learned."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width) if config.positions == "learned" else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens_BT: Tensor, positions: Tensor | None = None) -> Tensor:
        """BT to BTD. `positions` are T or BT, 0 to T - 1 where there are none.

        Raises ValueError where T is more than the positions that were learned.
        """
        x_BTD = self.tokens(tokens_BT)
        if self.positions is None:
            return self.dropout(x_BTD)
        length, context = tokens_BT.shape[1], self.positions.num_embeddings
        if length > context:
            raise ValueError(
                f"{length} tokens were given to a model with {context} learned positions (model.context): "
                f"pass at most {context}, or train with a longer context"
            )
        if positions is None:
            positions = torch.arange(length, device=tokens_BT.device)
        # Through the module, not its weight: ZeRO-3 gathers a parameter when the module that owns it is called.
        return self.dropout(x_BTD + self.positions(positions))


class Block(nn.Module):
    """Attention, then feed-forward; each reads a normalized residual stream and adds to it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = norm_of(config)
        self.attention = CausalSelfAttention(config)
        self.feed_forward_norm = norm_of(config)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, turns: Tensor | None = None, mask_BTS: Tensor | None = None) -> Tensor:
        """BTD to BTD; `turns` and `mask_BTS` as in `CausalSelfAttention`."""
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), turns, mask_BTS))
        return x_BTD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BTD)))


class Head(nn.Linear):
    """The last linear map: from the normalized stream to logits, or straight to what never forms them all.

    That is a loss, or the logits of the last tokens. It is called in here, where ZeRO-3 has gathered the weight.
    """

    def forward(self, x_BTD: Tensor, loss: Loss | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """BTD to logits, BTV; or what `loss` makes of x_BTD and the weight, VD."""
        return super().forward(x_BTD) if loss is None else loss(x_BTD, self.weight)


class GPT(nn.Module):
    """Tokens to logits.

    Three seams keep it free of DeepSpeed: `run_block` (activation checkpointing replaces it), `as_layers`
    (the pipeline reads it), and each attention's `attend` (sequence parallelism replaces it).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = norm_of(config)
        self.head = Head(config.width, config.vocabulary, bias=False)
        # Where it is tied, two modules share one parameter. Using `embedding.tokens.weight` in a matmul here instead
        # would read an empty tensor under ZeRO-3, which gathers for the module that is called.
        if config.tied_head:
            self.head.weight = self.embedding.tokens.weight
        self.run_block: RunBlock = run_block
        self.initialize()

    def forward(
        self,
        tokens_BT: Tensor,
        positions: Tensor | None = None,
        loss: Loss | None = None,
        documents_BT: Tensor | None = None,
        prefix_B: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """BT token ids to logits, BTV; or to what `loss` makes of the last hidden states and the head's weight.

        `positions` (int64, T or BT) say where the tokens stand, 0 to T - 1 where there are none: a shard of a sequence
        begins later, and so do tokens that follow cached ones. Raises ValueError where T is more than the learned ones.
        `documents_BT` (int64): a token sees only those before it that have its number. Without, it sees all. They are of
        the whole sequence, as attention sees it, where `tokens_BT` are a shard.
        `prefix_B` (int64): so many tokens of each sequence, its first, are seen by all others, also by those before.
        """
        x_BTD = self.embedding(tokens_BT, positions)
        shared = self.shared(x_BTD, positions, documents_BT, prefix_B)
        for block in self.blocks:
            x_BTD = self.run_block(block, x_BTD, *shared)
        return self.head(self.norm(x_BTD), loss)

    def shared(
        self, x_BTD: Tensor, positions: Tensor | None, documents_BT: Tensor | None = None, prefix_B: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """What all blocks read beside the stream, made once for all of them: the rotation of rotary positions, and
        which keys each query sees where that is not all before it."""
        turns, length = None, x_BTD.shape[1]
        if self.config.positions == "rotary":
            if positions is None:
                positions = torch.arange(length, device=x_BTD.device)
            turns = rotation(positions, self.config.head_width, self.config.rope_theta).to(x_BTD.dtype)
        if documents_BT is None and prefix_B is None:
            return () if turns is None else (turns,)
        attended = length if documents_BT is None else documents_BT.shape[1]
        seen_BTS = visible(attended, attended, self.config.sliding_window, x_BTD.device)[None]
        if prefix_B is not None:
            seen_BTS = seen_BTS | (torch.arange(attended, device=x_BTD.device) < prefix_B[:, None])[:, None]
        if documents_BT is not None:
            same_BTS = documents_BT[:, :, None] == documents_BT[:, None, :]
            seen_BTS = same_BTS.logical_and_(seen_BTS)
        return turns, additive(seen_BTS, x_BTD.dtype)

    def as_layers(self) -> list[nn.Module]:
        """The modules that `forward` chains, in order: embedding, blocks, final norm, head.

        Where the head is tied, the first and the last share a parameter, `embedding.tokens.weight`. A block called
        with the stream alone takes its tokens to stand at 0 to T - 1.
        """
        return [self.embedding, *self.blocks, self.norm, self.head]

    def initialize(self) -> None:
        """Draw the weights as GPT-2 does: N(0, 0.02), biases zero.

        The projections that add to the residual stream are narrower by sqrt(2 x layers), the number of additions,
        so that its variance does not grow with depth. `apply`, because under ZeRO-3's `zero.Init` it is what
        gathers each module's parameters; walking `named_parameters` would draw into empty tensors.
        """
        self.apply(partial(draw, std=INIT_STD))
        residual_std = INIT_STD / math.sqrt(2 * self.config.layers)
        for block in self.blocks:
            block.attention.out.apply(partial(draw, std=residual_std))
            block.feed_forward.down.apply(partial(draw, std=residual_std))

    def score(self) -> None:
        """Let the head give one number a token instead of logits: the model becomes a reward model."""
        weight = self.head.weight
        self.head = Head(self.config.width, 1, bias=False, dtype=weight.dtype, device=weight.device)
        self.head.apply(partial(draw, std=INIT_STD))

    @property
    def save_attention(self) -> bool:
        """Whether every block keeps the attention maps of its last forward. Turning it off drops them at once."""
        return any(block.attention.save_attention for block in self.blocks)

    @save_attention.setter
    def save_attention(self, on: bool) -> None:
        for block in self.blocks:
            block.attention.save_attention = on
            block.attention.attention_maps = None

    @property
    def attention_maps(self) -> list[Tensor]:
        """The maps kept by the last forward, BHTS each, one a block; empty unless `save_attention` was on."""
        return [block.attention.attention_maps for block in self.blocks if block.attention.attention_maps is not None]


def draw(module: nn.Module, std: float) -> None:
    """Weights of a linear map or an embedding from N(0, std), biases zero; other modules stay as they are."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=std)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
