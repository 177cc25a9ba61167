"""Small models of every variant, for the tests of model and generation."""

import torch

from ds_gpt.config import ModelConfig
from ds_gpt.model.gpt import GPT

SMALL = {"layers": 2, "width": 32, "heads": 4, "context": 12, "ffn_width": 48, "vocab_size": 23}
MODERN = {"positions": "rotary", "norm": "rmsnorm", "ffn": "swiglu", "kv_heads": 2, "bias": False, "tied_head": False}
LLAMA = tuple(f"model.{key}={str(value).lower()}" for key, value in MODERN.items())  # the same as --set takes it
CASES = {
    "gpt2": {},
    "rotary": {"positions": "rotary"},
    "rmsnorm": {"norm": "rmsnorm"},
    "swiglu": {"ffn": "swiglu"},
    "kv_heads": {"kv_heads": 2},
    "one kv head": {"kv_heads": 1},
    "no bias": {"bias": False},
    "qk_norm": {"qk_norm": True},
    "untied": {"tied_head": False},
    "window": {"sliding_window": 3},
    "modern": MODERN,
    "modern, all": MODERN | {"qk_norm": True, "sliding_window": 4},
}


def perturbed(**options) -> GPT:
    """A model whose biases and norms are not at their trivial initial values, so that a missing one shows."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(**SMALL | options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
