"""Counts from the config against the real model and against published numbers."""

import itertools
import subprocess
import sys

import pytest

from ds_gpt.config import ModelConfig
from ds_gpt.model.counts import block_parameters, flops_per_token, mfu, parameters, position_parameters

GPT2_124M = ModelConfig(layers=12, width=768, heads=12, context=1024, vocab_size=50257)
GPT_1B = ModelConfig(layers=20, width=2048, heads=16, ffn_width=8192, context=2048, vocab_size=65)


@pytest.mark.parametrize(
    "layers, width, heads, ffn_width, context, vocab_size",
    itertools.product([1, 3], [8, 24], [1, 4], ["auto", 20], [5, 16], [7, 65]),
)
def test_parameters_are_those_of_the_model(layers, width, heads, ffn_width, context, vocab_size):
    from ds_gpt.model.gpt import GPT

    config = ModelConfig(
        layers=layers, width=width, heads=heads, ffn_width=ffn_width, context=context, vocab_size=vocab_size
    )
    model = GPT(config)
    assert parameters(config) == sum(p.numel() for p in model.parameters())
    assert block_parameters(config) == sum(p.numel() for p in model.blocks[0].parameters())
    assert position_parameters(config) == model.embedding.positions.weight.numel()


def test_parameters_of_gpt2_124m_are_the_published_ones():
    assert parameters(GPT2_124M) == 124_439_808


def test_parameters_of_the_1b_model():
    assert parameters(GPT_1B) == pytest.approx(1.011e9, abs=0.5e6)


def test_flops_are_six_for_each_matrix_entry_and_twelve_for_attention():
    # By hand for GPT-2 124M: 6 x (124,439,808 - 1024 x 768) + 12 x 12 x 768 x 1024.
    assert flops_per_token(GPT2_124M) == 6 * 123_653_376 + 113_246_208
    assert flops_per_token(GPT2_124M, context=256) == 6 * 123_653_376 + 113_246_208 // 4


@pytest.mark.parametrize("length", [8, 32])
def test_flops_agree_with_the_matmuls_that_pytorch_counts(length):
    """The convention adds only biases and norms to the matmuls, and PyTorch counts causal attention in full too."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from ds_gpt.model.gpt import GPT

    config = ModelConfig(layers=2, width=64, heads=4, context=32, vocab_size=65)
    model = GPT(config)
    tokens = torch.zeros(1, length, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    biases_and_norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    counted = counter.get_total_flops() / length
    assert flops_per_token(config, context=length) - 6 * biases_and_norms == counted


def test_mfu_is_a_share_of_the_peak():
    assert mfu(tokens_per_s=1000, flops_per_token=6e9, peak_flops=312e12) == pytest.approx(0.01923, rel=1e-3)
    flops = flops_per_token(GPT_1B)
    assert mfu(312e12 / flops, flops, 312e12) == pytest.approx(1.0)


def test_counts_load_without_torch():
    code = "import sys, ds_gpt.model.counts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
