"""Counts from the config against the real model and against published numbers."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ds_gpt.config import ModelConfig, RunConfig
from ds_gpt.config.stage import LoraConfig
from ds_gpt.model.counts import (
    adapter_parameters,
    block_parameters,
    flops_per_token,
    mfu,
    parameters,
    position_parameters,
    trained_parameters,
    training_flops_per_token,
)

RUNS = Path(__file__).resolve().parents[2] / "ds_configs" / "runs"
GPT2_124M = ModelConfig(layers=12, width=768, heads=12, context=1024, vocab_size=50257)
GPT_1B = ModelConfig(layers=20, width=2048, heads=16, ffn_width=8192, context=2048, vocab_size=65)


OPTIONS = {
    "positions": "rotary", "norm": "rmsnorm", "ffn": "swiglu", "kv_heads": 2, "bias": False, "qk_norm": True,
    "tied_head": False, "sliding_window": 3,
}  # fmt: skip


def shapes():
    """GPT-2's at several sizes, then with each option alone, then with all."""
    for sizes in itertools.product([1, 3], [8, 24], [1, 4], ["auto", 20], [5, 16], [7, 65]):
        yield dict(zip(("layers", "width", "heads", "ffn_width", "context", "vocab_size"), sizes, strict=True))
    small = {"layers": 2, "width": 24, "heads": 4, "context": 16, "vocab_size": 65}
    for options in [*({key: value} for key, value in OPTIONS.items()), OPTIONS, OPTIONS | {"bias": True}]:
        yield small | options


@pytest.mark.parametrize("shape", shapes(), ids=str)
def test_parameters_are_those_of_the_model(shape):
    from ds_gpt.model.gpt import GPT

    config = ModelConfig(**shape)
    model = GPT(config)
    positions = model.embedding.positions
    assert parameters(config) == sum(p.numel() for p in model.parameters())
    assert block_parameters(config) == sum(p.numel() for p in model.blocks[0].parameters())
    assert position_parameters(config) == (0 if positions is None else positions.weight.numel())


def test_parameters_of_gpt2_124m_are_the_published_ones():
    assert parameters(GPT2_124M) == 124_439_808


@pytest.mark.parametrize(("recipe", "published"), [("llama_1b", 1_100_048_384), ("llama_7b", 6_738_415_616)])
def test_parameters_of_the_llamas_are_those_of_their_releases(recipe, published):
    values = yaml.safe_load((RUNS / f"{recipe}.yaml").read_text(encoding="utf-8"))
    assert parameters(ModelConfig(**values["model"])) == published


def test_parameters_of_the_1b_model():
    assert parameters(GPT_1B) == pytest.approx(1.011e9, abs=0.5e6)


def test_flops_are_six_for_each_matrix_entry_and_twelve_for_attention():
    # By hand for GPT-2 124M: 6 x (124,439,808 - 1024 x 768) + 12 x 12 x 768 x 1024.
    assert flops_per_token(GPT2_124M) == 6 * 123_653_376 + 113_246_208
    assert flops_per_token(GPT2_124M, context=256) == 6 * 123_653_376 + 113_246_208 // 4


@pytest.mark.parametrize("options", [{}, OPTIONS | {"sliding_window": None}], ids=["gpt2", "modern"])
@pytest.mark.parametrize("length", [8, 32])
def test_flops_agree_with_the_matmuls_that_pytorch_counts(length, options):
    """The convention adds only biases and norms to the matmuls, and PyTorch counts causal attention in full too."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from ds_gpt.model.gpt import GPT

    config = ModelConfig(**({"layers": 2, "width": 64, "heads": 4, "context": 32, "vocab_size": 65} | options))
    model = GPT(config)
    tokens = torch.zeros(1, length, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    biases_and_norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    counted = counter.get_total_flops() / length
    assert flops_per_token(config, context=length) - 6 * biases_and_norms == counted


@pytest.mark.parametrize("options", [{}, OPTIONS | {"sliding_window": None}], ids=["gpt2", "modern"])
@pytest.mark.parametrize("scalar_head", [False, True])
def test_flops_beside_adapters_agree_with_the_matmuls_that_pytorch_counts(options, scalar_head):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from ds_gpt.model.gpt import GPT
    from ds_gpt.model.lora import apply_lora

    config = ModelConfig(**({"layers": 2, "width": 64, "heads": 4, "context": 32, "vocab_size": 65} | options))
    for lora in (LoraConfig(), LoraConfig(rank=3, targets=("qkv", "blocks.1.*.up", "down"))):
        model = GPT(config)
        frozen = [p.numel() for p in model.parameters() if p.ndim == 1]
        apply_lora(model, lora)
        if scalar_head:
            model.score()
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, 32, dtype=torch.long)).sum().backward()
        counted = training_flops_per_token(config, lora, scalar_head) - (6 if lora.rank is None else 4) * sum(frozen)
        assert counted == counter.get_total_flops() / 32
        trained = [p.numel() for p in model.parameters() if p.requires_grad]
        run = RunConfig(**{**TRAINED, "model": config, "lora": lora, "stage": "reward" if scalar_head else "pretrain"})
        assert trained_parameters(run) == sum(trained)
        assert adapter_parameters(config, lora) == (sum(trained) - 64 * scalar_head if lora.rank else 0)


TRAINED = {"name": "a", "batch": {"global_batch_size": 1}, "optimizer": {"lr": 1.0}, "training": {"steps": 1}}


def test_a_sliding_window_bounds_the_attention_flops():
    config = GPT2_124M.model_copy(update={"sliding_window": 256})
    assert flops_per_token(config) == 6 * 123_653_376 + 113_246_208 // 4
    assert flops_per_token(config, context=128) == flops_per_token(GPT2_124M, context=128)


def test_mfu_is_a_share_of_the_peak():
    assert mfu(tokens_per_s=1000, flops_per_token=6e9, peak_flops=312e12) == pytest.approx(0.01923, rel=1e-3)
    flops = flops_per_token(GPT_1B)
    assert mfu(312e12 / flops, flops, 312e12) == pytest.approx(1.0)


def test_counts_load_without_torch():
    code = "import sys, ds_gpt.model.counts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
