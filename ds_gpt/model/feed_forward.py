"""The feed-forward layer: what a block does to each token by itself."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ds_gpt.config import ModelConfig


class FeedForward(nn.Module):
    """Two linear maps about a GELU, in the tanh form that GPT-2 was trained with; or SwiGLU.

    SwiGLU (Shazeer 2020, equation 6) multiplies one map by the SiLU of another. `gate` and `up` are two modules, so
    that a contiguous share of the rows of each, as tensor parallelism takes it, belongs together.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden_width, bias = config.width, config.hidden_width, config.bias
        self.gate = nn.Linear(width, hidden_width, bias=bias) if config.ffn == "swiglu" else None
        self.up = nn.Linear(width, hidden_width, bias=bias)
        self.gelu = nn.GELU(approximate="tanh")
        self.down = nn.Linear(hidden_width, width, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """BTD to BTD."""
        if self.gate is None:
            h_BTF = self.gelu(self.up(x_BTD))
        else:
            h_BTF = F.silu(self.gate(x_BTD)) * self.up(x_BTD)
        return self.down(h_BTF)
