"""Which class of transformers computes what a model of ours computes, and what its config.json says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_gpt.config import ConfigError, ModelConfig, Problem
from ds_gpt.exchange.layouts import Layout, gpt2_layout, llama_layout

_LLAMA = {"positions": {"rotary"}, "norm": {"rmsnorm"}, "ffn": {"swiglu"}}


@dataclass(frozen=True)
class Family:
    """A class of transformers.

    Attributes:
        architecture: the class.
        model_type: its name in config.json.
        needs: values of our options that it can express; options that are not named may have any.
        layout: where its weights lie.
        config: its config.json, without what all have.
    """

    architecture: str
    model_type: str
    needs: Mapping[str, set[Any]]
    layout: Callable[[ModelConfig], Layout]
    config: Callable[[ModelConfig], dict[str, Any]]

    def lacks(self, model: ModelConfig) -> dict[str, Any]:
        """The options of `model`, with their values, that this class has not."""
        values = {
            "positions": model.positions,
            "norm": model.norm,
            "ffn": model.ffn,
            "bias": model.bias,
            "qk_norm": model.qk_norm,
            "sliding_window": model.sliding_window is not None,
            "kv_heads": model.key_heads != model.heads,
        }
        stated = {"sliding_window": model.sliding_window, "kv_heads": model.key_heads}
        return {key: stated.get(key, values[key]) for key, allowed in self.needs.items() if values[key] not in allowed}


def _gpt2_config(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_positions": model.context,
        "n_embd": model.width,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.hidden_width,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.norm_eps,
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": model.dropout,
    }


def _llama_config(model: ModelConfig) -> dict[str, Any]:
    return {
        "max_position_embeddings": model.context,
        "hidden_size": model.width,
        "intermediate_size": model.hidden_width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_heads,
        "head_dim": model.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,  # read by every version of transformers; newer ones write rope_parameters
        "attention_dropout": 0.0,
        "attention_bias": model.bias,
        "mlp_bias": model.bias,
    }


def _mistral_config(model: ModelConfig) -> dict[str, Any]:
    return {**_llama_config(model), "sliding_window": model.sliding_window}


def _qwen3_config(model: ModelConfig) -> dict[str, Any]:
    windowed = model.sliding_window is not None
    layers = ["sliding_attention" if windowed else "full_attention"] * model.layers
    window = {
        "use_sliding_window": windowed,
        "sliding_window": model.sliding_window,
        "max_window_layers": 0 if windowed else model.layers,
    }
    return {**_llama_config(model), **window, "layer_types": layers}


_ONE_BY_ONE = {"kv_heads": {False}, "qk_norm": {False}, "sliding_window": {False}}
FAMILIES = (
    Family(
        "GPT2LMHeadModel",
        "gpt2",
        {"positions": {"learned"}, "norm": {"layernorm"}, "ffn": {"gelu"}, **_ONE_BY_ONE},
        gpt2_layout,
        _gpt2_config,
    ),
    Family(
        "LlamaForCausalLM",
        "llama",
        {**_LLAMA, "qk_norm": {False}, "sliding_window": {False}},
        llama_layout,
        _llama_config,
    ),
    Family(
        "MistralForCausalLM", "mistral", {**_LLAMA, "bias": {False}, "qk_norm": {False}}, llama_layout, _mistral_config
    ),
    Family("Qwen3ForCausalLM", "qwen3", {**_LLAMA, "bias": {False}, "qk_norm": {True}}, llama_layout, _qwen3_config),
)


def family_of(model: ModelConfig) -> Family:
    """The class that computes exactly what `model` does.

    Raises:
        ConfigError: there is none; names the nearest and the options that it lacks.
    """
    lacking = [(family.lacks(model), family) for family in FAMILIES]
    for lacks, family in lacking:
        if not lacks:
            return family
    lacks, nearest = min(lacking, key=lambda entry: len(entry[0]))
    options = ", ".join(f"model.{key} = {value!r}" for key, value in lacks.items())
    raise ConfigError(
        Problem(
            f"no class of transformers computes this model: the nearest, {nearest.architecture}, has no {options}",
            "other tools would load the weights and compute something else",
            "--format safetensors (or torch) exports it in ds_gpt's own layout",
        )
    )


def config_json(model: ModelConfig, family: Family, dtype: str, special: Mapping[str, Any]) -> dict[str, Any]:
    """Content of config.json.

    Args:
        model: the model.
        family: its class.
        dtype: of the weights, by torch's name.
        special: ``bos_token_id``, and ``eos_token_id``, at which a generated text ends (one or a list).
    """
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": model.vocabulary,
        **family.config(model),
        "initializer_range": 0.02,
        "tie_word_embeddings": model.tied_head,
        **special,
        "torch_dtype": dtype,
        "use_cache": True,
    }
