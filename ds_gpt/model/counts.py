"""Parameters and FLOPs of a GPT from its config alone. Imports no torch, so planning starts at once."""

from __future__ import annotations

from ds_gpt.config import ModelConfig


def block_parameters(config: ModelConfig) -> int:
    """Parameters of one block: two norms, attention, feed-forward, all with biases."""
    width, hidden_width = config.width, config.hidden_width
    norms = 2 * _layer_norm(width)
    attention = _linear(width, 3 * width) + _linear(width, width)
    feed_forward = _linear(width, hidden_width) + _linear(hidden_width, width)
    return norms + attention + feed_forward


def position_parameters(config: ModelConfig) -> int:
    """Parameters of the learned positions."""
    return config.context * config.width


def parameters(config: ModelConfig) -> int:
    """All parameters, the one that embedding and head share counted once."""
    token_embedding = config.vocabulary * config.width
    blocks = config.layers * block_parameters(config)
    return token_embedding + position_parameters(config) + blocks + _layer_norm(config.width)


def flops_per_token(config: ModelConfig, context: int | None = None) -> int:
    """FLOPs that the model needs to train on one token, forward and backward: 6 N + 12 L D T.

    The convention of PaLM (Chowdhery et al. 2022, appendix B) as nanoGPT applies it. N is every parameter but the
    positions: those are added, not multiplied by, while the token embedding is also the head's matrix. A multiply-add
    is 2 FLOPs, backward costs twice the forward. Attention counts all T x T scores: the causal half is not
    subtracted. Recomputation under activation checkpointing is not counted, so MFU falls where it is on.

    `context` is the sequence length T in tokens; None means the model's own.
    """
    length = config.context if context is None else context
    multiplied = parameters(config) - position_parameters(config)
    return 6 * multiplied + 12 * config.layers * config.width * length


def mfu(tokens_per_s: float, flops_per_token: float, peak_flops: float) -> float:
    """Model FLOPs utilization: the share of the peak that the model's own arithmetic used (PaLM, appendix B).

    `tokens_per_s` and `peak_flops` (FLOPs a second) are both of one device, or both of all of them.
    """
    return tokens_per_s * flops_per_token / peak_flops


def _linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def _layer_norm(width: int) -> int:
    return 2 * width
