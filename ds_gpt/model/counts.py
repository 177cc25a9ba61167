"""Parameters and FLOPs of a GPT from its config alone. Imports no torch, so planning starts at once."""

from __future__ import annotations

from ds_gpt.config import ModelConfig
from ds_gpt.config.run import RunConfig
from ds_gpt.config.stage import LoraConfig


def block_parameters(config: ModelConfig) -> int:
    """Parameters of one block: two norms, attention, feed-forward."""
    width, hidden_width = config.width, config.hidden_width
    projected = (config.heads + 2 * config.key_heads) * config.head_width
    attention = _linear(config, width, projected) + _linear(config, width, width)
    into_hidden = (2 if config.ffn == "swiglu" else 1) * _linear(config, width, hidden_width)
    feed_forward = into_hidden + _linear(config, hidden_width, width)
    qk_norms = 2 * config.head_width if config.qk_norm else 0
    return 2 * _norm(config) + attention + qk_norms + feed_forward


def position_parameters(config: ModelConfig) -> int:
    """Parameters of the learned positions; rotary ones have none."""
    return config.context * config.width if config.positions == "learned" else 0


def parameters(config: ModelConfig) -> int:
    """All parameters; one that embedding and head share counts once."""
    matrix = config.vocabulary * config.width
    embedding_and_head = matrix if config.tied_head else 2 * matrix
    blocks = config.layers * block_parameters(config)
    return embedding_and_head + position_parameters(config) + blocks + _norm(config)


def flops_per_token(config: ModelConfig, context: int | None = None) -> int:
    """FLOPs that the model needs to train on one token, forward and backward: 6 N + 12 L D S.

    The convention of PaLM (Chowdhery et al. 2022, appendix B) as nanoGPT applies it. N is every parameter but what
    is looked up or added instead of multiplied by: positions, and the token embedding where it is not also the head's
    matrix. A multiply-add is 2 FLOPs, backward costs twice the forward. S is what a token attends to: all T, the causal
    half not subtracted, or the sliding window where that is less. Heads that share keys compute as many scores as
    others. Recomputation under activation checkpointing is not counted, so MFU falls where it is on.

    `context` is the sequence length T in tokens; None means the model's own.
    """
    return config.layers * block_flops_per_token(config, context) + head_flops_per_token(config)


def block_flops_per_token(config: ModelConfig, context: int | None = None) -> int:
    """The share of `flops_per_token` of one block."""
    length = config.context if context is None else context
    attended = length if config.sliding_window is None else min(length, config.sliding_window)
    return 6 * block_parameters(config) + 12 * config.width * attended


def head_flops_per_token(config: ModelConfig) -> int:
    """The share of `flops_per_token` of the last norm and the head."""
    return 6 * (config.vocabulary * config.width + _norm(config))


def training_flops_per_token(
    config: ModelConfig, lora: LoraConfig = LoraConfig(), scalar_head: bool = False, context: int | None = None
) -> int:
    """`flops_per_token` where not every weight is trained, or the head gives one number a token (a reward model).

    A frozen weight has no gradient to be computed, which is a third of its arithmetic: beside adapters a model costs
    4 N + 6 N' + 12 L D S, N' the parameters of the adapters.
    """
    head = config.vocabulary * config.width
    attention = flops_per_token(config, context) - flops_per_token(config, 0)
    multiplied = flops_per_token(config, 0) // 6 - scalar_head * head
    own_head = scalar_head * config.width  # trained beside adapters, too
    frozen = 2 * multiplied if lora.rank is not None else 0
    return 6 * (multiplied + own_head + adapter_parameters(config, lora)) - frozen + attention


def linear_maps(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each linear map of a block, by its name in the block, in the model's order."""
    width, hidden = config.width, config.hidden_width
    projected = (config.heads + 2 * config.key_heads) * config.head_width
    into = {f"feed_forward.{name}": (width, hidden) for name in (("gate", "up") if config.ffn == "swiglu" else ("up",))}
    attention = {"attention.qkv": (width, projected), "attention.out": (width, width)}
    return {**attention, **into, "feed_forward.down": (hidden, width)}


def adapter_parameters(config: ModelConfig, lora: LoraConfig) -> int:
    """Parameters of all adapters; of a map from n to m numbers rank x (n + m)."""
    if lora.rank is None:
        return 0
    sizes = linear_maps(config)
    names = ((block, name) for block in range(config.layers) for name in sizes)
    return sum(lora.rank * sum(sizes[name]) for block, name in names if lora.adapts(f"blocks.{block}.{name}"))


def trained_parameters(run: RunConfig) -> int:
    """Parameters that a run changes, which are those with gradients and optimizer state."""
    model, scalar_head = run.model, run.stage == "reward"
    if run.lora.rank is not None:
        return adapter_parameters(model, run.lora) + scalar_head * model.width
    head = model.width - (0 if model.tied_head else model.vocabulary * model.width)
    return parameters(model) + scalar_head * head


def mfu(tokens_per_s: float, flops_per_token: float, peak_flops: float) -> float:
    """Model FLOPs utilization: the share of the peak that the model's own arithmetic used (PaLM, appendix B).

    `tokens_per_s` and `peak_flops` (FLOPs a second) are both of one device, or both of all of them.
    """
    return tokens_per_s * flops_per_token / peak_flops


def _linear(config: ModelConfig, inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs * config.bias


def _norm(config: ModelConfig) -> int:
    return config.width * (2 if config.norm == "layernorm" and config.bias else 1)
