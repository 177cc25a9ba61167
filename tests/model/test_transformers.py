"""Tiny random models of Hugging Face transformers, their weights copied in: the same logits, loss and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_gpt.config import ModelConfig
from ds_gpt.model.gpt import GPT

transformers = pytest.importorskip("transformers")

LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY = 3, 32, 4, 16, 23
SIZES = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "context": CONTEXT, "vocab_size": VOCABULARY}
LLAMA = {"positions": "rotary", "norm": "rmsnorm", "norm_eps": 1e-6, "ffn": "swiglu", "ffn_width": 48, "bias": False}
LLAMAS = {
    "llama": ("Llama", {"tied_head": False}, {}),
    "llama, grouped and tied": ("Llama", {"kv_heads": 2}, {}),
    "llama, theta": ("Llama", {"rope_theta": 500_000.0, "kv_heads": 1, "tied_head": False}, {}),
    "qwen3": ("Qwen3", {"qk_norm": True, "kv_heads": 2, "tied_head": False}, {"head_dim": WIDTH // HEADS}),
    "mistral": ("Mistral", {"sliding_window": 5, "kv_heads": 2, "tied_head": False}, {"sliding_window": 5}),
}


def perturb(model: nn.Module) -> None:
    """Biases and norms away from their trivial initial values, so that a missing one shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


def rows_by_group(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Rows of all queries, all keys and all values put in the order of `qkv`: (G, H/G + 2, K)."""
    q, k, v = (tensor.unflatten(0, (-1, WIDTH // HEADS)) for tensor in (q, k, v))
    groups = (q.unflatten(0, (len(k), -1)), k[:, None], v[:, None])
    return torch.cat(groups, dim=1).flatten(end_dim=2)


def from_gpt2(theirs: nn.Module) -> dict[str, torch.Tensor]:
    """Weights of a GPT2LMHeadModel by our names. Their Conv1D stores the transpose of a Linear."""
    stem = theirs.transformer
    ours = {"embedding.tokens.weight": stem.wte.weight, "embedding.positions.weight": stem.wpe.weight}
    modules = {"norm": stem.ln_f}
    for i, h in enumerate(stem.h):
        block = f"blocks.{i}"
        modules |= {f"{block}.attention_norm": h.ln_1, f"{block}.feed_forward_norm": h.ln_2}
        modules |= {f"{block}.attention.out": h.attn.c_proj}
        modules |= {f"{block}.feed_forward.up": h.mlp.c_fc, f"{block}.feed_forward.down": h.mlp.c_proj}
        for kind in ("weight", "bias"):
            ours[f"{block}.attention.qkv.{kind}"] = rows_by_group(*getattr(h.attn.c_attn, kind).t().chunk(3))
    for name, module in modules.items():
        ours |= {f"{name}.weight": module.weight.t(), f"{name}.bias": module.bias}
    return ours


def from_llama(theirs: nn.Module) -> dict[str, torch.Tensor]:
    """Weights of a LlamaForCausalLM or its relatives by our names."""
    stem = theirs.model
    ours = {"embedding.tokens.weight": stem.embed_tokens.weight, "norm.weight": stem.norm.weight}
    ours |= {"head.weight": theirs.lm_head.weight}
    for i, layer in enumerate(stem.layers):
        attention, ffn, block = layer.self_attn, layer.mlp, f"blocks.{i}"
        qkv = (getattr(attention, f"{kind}_proj").weight for kind in "qkv")
        ours[f"{block}.attention.qkv.weight"] = rows_by_group(*qkv)
        ours |= {f"{block}.attention.out.weight": attention.o_proj.weight}
        ours |= {f"{block}.attention_norm.weight": layer.input_layernorm.weight}
        ours |= {f"{block}.feed_forward_norm.weight": layer.post_attention_layernorm.weight}
        for name in ("gate", "up", "down"):
            ours[f"{block}.feed_forward.{name}.weight"] = getattr(ffn, f"{name}_proj").weight
        if hasattr(attention, "q_norm"):
            norms = ("q_norm", "k_norm")
            ours |= {f"{block}.attention.{name}.weight": getattr(attention, name).weight for name in norms}
    return ours


def assert_same_function(model: GPT, theirs: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Logits, loss, and the gradient of every weight."""
    names = [name for name, _ in model.named_parameters()]
    assert set(names) <= set(weights) <= set(model.state_dict())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    tokens = torch.randint(VOCABULARY, (2, CONTEXT + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    mine, reference = model(inputs), theirs(inputs).logits
    torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)
    losses = [F.cross_entropy(logits.flatten(0, 1), targets.flatten()) for logits in (mine, reference)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    gradients = torch.autograd.grad(losses[1], list(theirs.parameters()))
    with torch.no_grad():  # into their places, to be brought into our layout as the weights were
        for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
            parameter.copy_(gradient)
    in_our_layout = from_gpt2(theirs) if hasattr(theirs, "transformer") else from_llama(theirs)
    for name, gradient in zip(names, torch.autograd.grad(losses[0], list(model.parameters())), strict=True):
        torch.testing.assert_close(gradient, in_our_layout[name], rtol=1e-4, atol=1e-6)


def test_equals_gpt2() -> None:
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    ).eval()  # fmt: skip
    perturb(theirs)
    assert_same_function(GPT(ModelConfig(**SIZES)).eval(), theirs, from_gpt2(theirs))


@pytest.mark.parametrize("case", LLAMAS)
def test_equals_llama_and_its_relatives(case: str) -> None:
    family, options, theirs_only = LLAMAS[case]
    config = ModelConfig(**SIZES | LLAMA | options)
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=config.hidden_width, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=config.key_heads, max_position_embeddings=CONTEXT,
            rms_norm_eps=config.norm_eps, tie_word_embeddings=config.tied_head,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta}, **theirs_only,
        )
    ).eval()  # fmt: skip
    perturb(theirs)
    assert_same_function(GPT(config).eval(), theirs, from_llama(theirs))
