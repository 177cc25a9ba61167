"""What CUDA's kernels keep for the backward pass where a CPU's keep something else, for a trace on CPU tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ds_gpt.config import Composed


def as_on_a_gpu(composed: Composed) -> None:
    """Dropout, attention and RMSNorm keep what the CUDA kernels keep."""
    import ds_gpt.engine.activation_checkpointing as activation_checkpointing

    nn.functional.dropout = _dropout
    nn.functional.scaled_dot_product_attention = _attention
    nn.functional.rms_norm = _rms_norm
    # The selective policy runs attention again where it has dropout.
    activation_checkpointing._attention_dropout = lambda *args: composed.run.model.dropout


_torch_dropout, _torch_attention = nn.functional.dropout, nn.functional.scaled_dot_product_attention


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else _torch_dropout(x, p, training, inplace)


def _attention(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Tensor:
    return _torch_attention(*args, **kwargs)


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor, eps: float) -> Tensor:
    """A CPU has no fused RMSNorm and keeps every step of it; LayerNorm's kernel keeps what CUDA's keeps, and the mean."""
    return nn.functional.layer_norm(x, shape, weight, None, eps)
