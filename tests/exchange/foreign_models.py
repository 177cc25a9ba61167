"""Tiny random models of Hugging Face transformers, saved as their users find them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from ds_gpt.config import Hardware
from ds_gpt.data import CharTokenizer
from ds_gpt.data.tokenizer_json import tokenizer_json
from ds_gpt.exchange.importing import find_foreign_model
from ds_gpt.trainer.imported_run import import_run

LAYERS, WIDTH, HEADS, CONTEXT = 3, 32, 4, 16
TOKENIZER = CharTokenizer.from_text("\n abcdefghijklmnopqrst.,'")
VOCABULARY = TOKENIZER.vocab_size + 3  # padded, as many are
CPU = Hardware("cpu", "CPU", 1, bf16=False)

_LLAMA = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT, "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
}  # fmt: skip
_GPT2 = {"n_positions": CONTEXT, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
_HEADS = {"head_dim": WIDTH // HEADS}
# class, what its configuration states
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", _GPT2),
    "gpt2, untied, narrow": (
        "GPT2",
        {**_GPT2, "tie_word_embeddings": False, "n_inner": 40, "layer_norm_epsilon": 1e-3},
    ),
    "llama": ("Llama", _LLAMA),
    "llama, tied, every bias": (
        "Llama",
        {**_LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3},
    ),
    "llama, heads of their own": ("Llama", {**_LLAMA, "num_key_value_heads": HEADS}),
    "mistral": ("Mistral", {**_LLAMA, "sliding_window": 5}),
    "qwen3": ("Qwen3", {**_LLAMA, **_HEADS}),
    "qwen3, window": (
        "Qwen3",
        {**_LLAMA, **_HEADS, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
}


def make(case: str) -> Any:
    """The model, every parameter away from its trivial initial value, so that a missing one shows."""
    family, options = MODELS[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, **options
    )
    model = getattr(transformers, f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(
        config
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    """As `save_pretrained` leaves it, with a tokenizer.json beside it."""
    model.save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(TOKENIZER)))
    return folder


def imported(folder: Path, run: Path) -> Path:
    """The run that an import makes of a folder."""
    return import_run(find_foreign_model(folder), str(run), CPU)
