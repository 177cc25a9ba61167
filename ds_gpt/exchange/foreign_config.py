"""From a foreign config.json to our model config: exactly the same function, or a refusal that says why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ds_gpt.config import ConfigError, ModelConfig, Problem
from ds_gpt.config.parse import shape_problems
from ds_gpt.exchange.families import FAMILIES
from ds_gpt.exchange.layouts import Layout, own_layout

OWN = "ds_gpt"  # the model_type of what `export --format safetensors` writes

# What a key means that a config.json leaves out: the defaults of the class in transformers.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "activation_function": "gelu_new"},
    "llama": {"rms_norm_eps": 1e-6, "hidden_act": "silu"},
    "mistral": {"rms_norm_eps": 1e-6, "hidden_act": "silu", "sliding_window": 4096, "num_key_value_heads": 8},
    "qwen3": {
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "sliding_window": 4096,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_window_layers": 28,
    },
}
_MOST_LAYERS, _MOST = 10_000, 1 << 30  # of anything else that config.json counts
_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh")


def read_config(config: Mapping[str, Any]) -> tuple[ModelConfig, Layout]:
    """The model that a config.json describes, and where its weights lie.

    Raises:
        ConfigError: not a model that ours can be; every reason.
    """
    kind = config.get("model_type")
    known = {family.model_type: family.layout for family in FAMILIES} | {OWN: own_layout}
    if not isinstance(kind, str) or kind not in known:
        raise ConfigError(
            Problem(
                f"config.json: model_type = {kind!r} cannot be imported",
                "its model computes something that ours does not",
                f"import one of {', '.join(known)}",
            )
        )
    filled = {**_DEFAULTS.get(kind, {}), **config}
    try:
        if kind == OWN:
            model, problems = ModelConfig.model_validate(config["model"]), []
            if model.vocab_size == "auto":
                raise ValueError("model.vocab_size is 'auto', and no corpus is there to settle it")
        else:
            model, problems = (_gpt2 if kind == "gpt2" else _llama)(filled)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:  # whatever wrong types come to
        missing = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        if isinstance(error, ValidationError):
            missing = "; ".join(f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors())
        raise ConfigError(
            Problem(
                f"config.json cannot be read as a {kind}: {missing}",
                fix="restore it from where the model was published",
            )
        ) from None
    if config.get("quantization_config"):
        problems = [*problems, *_unequal(config, "quantization_config", None)]
    if problems := [*problems, *shape_problems(model), *_size_problems(model)]:
        raise ConfigError(problems)
    return model, known[kind](model)


def _size_problems(model: ModelConfig) -> list[Problem]:
    """A shape that no file has weights for: looking at its tensors one by one would never end, or overflow."""
    sizes = {"layers": model.layers, "width": model.width, "feed-forward": model.hidden_width}
    sizes |= {"vocabulary": model.vocabulary, "context": model.context}
    return [
        Problem(
            f"config.json: {name} = {size}",
            f"no model has more than {limit:,}",
            "restore it from where the model was published",
        )
        for name, size in sizes.items()
        if size > (limit := _MOST_LAYERS if name == "layers" else _MOST)
    ]


def _gpt2(config: Mapping[str, Any]) -> tuple[ModelConfig, list[Problem]]:
    problems = _unequal(config, "activation_function", *_GELU_TANH)
    for key, value in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        problems += _unequal({key: value, **config}, key, value)
    dropouts = {config.get(key, 0.1) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    model = ModelConfig(
        layers=config["n_layer"],
        width=config["n_embd"],
        heads=config["n_head"],
        context=config["n_positions"],
        ffn_width=config.get("n_inner") or 4 * config["n_embd"],
        vocab_size=config["vocab_size"],
        dropout=float(dropouts.pop()) if len(dropouts) == 1 else 0.0,
        norm_eps=config["layer_norm_epsilon"],
        tied_head=config["tie_word_embeddings"],
    )
    return model, problems


def _llama(config: Mapping[str, Any]) -> tuple[ModelConfig, list[Problem]]:
    kind, heads = config["model_type"], config["num_attention_heads"]
    # Newer files have rope_parameters, older ones rope_theta and, for what is not the default, rope_scaling.
    stated = [part for key in ("rope_parameters", "rope_scaling") if (part := config.get(key))]
    rope = {"rope_theta": config.get("rope_theta", 10_000.0)}
    problems = _unequal(config, "hidden_act", "silu", "swish")
    for part in ({"partial_rotary_factor": config.get("partial_rotary_factor")}, *stated):
        rope |= {"rope_theta": part["rope_theta"]} if "rope_theta" in part else {}
        for key, allowed in (("rope_type", "default"), ("type", "default"), ("partial_rotary_factor", 1.0)):
            problems += _unequal({key: allowed, **part}, key, allowed, None)
        if by_layer := {key: value for key, value in part.items() if isinstance(value, dict)}:
            problems += _unequal({"rope_parameters": by_layer}, "rope_parameters", {})
    head_width = config.get("head_dim") or config["hidden_size"] // heads
    problems += _unequal({"head_dim": head_width}, "head_dim", config["hidden_size"] // heads)
    biases = {name: bool(config.get(name, False)) for name in ("attention_bias", "mlp_bias")}
    if kind != "llama":  # their classes have no such biases, but for Qwen3's attention
        problems += [problem for name in biases for problem in _unequal(biases, name, False)]
    elif len(set(biases.values())) > 1:
        problems += _unequal(biases, "mlp_bias", biases["attention_bias"])
    window, windows_differ = _window(config)
    problems += windows_differ
    model = ModelConfig(
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        heads=heads,
        context=config["max_position_embeddings"],
        ffn_width=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        positions="rotary",
        rope_theta=float(rope["rope_theta"]),
        norm="rmsnorm",
        norm_eps=config["rms_norm_eps"],
        ffn="swiglu",
        kv_heads=config.get("num_key_value_heads") or heads,
        bias=biases["attention_bias"],
        qk_norm=kind == "qwen3",
        sliding_window=window,
        tied_head=config.get("tie_word_embeddings", False),
    )
    return model, problems


def _window(config: Mapping[str, Any]) -> tuple[int | None, list[Problem]]:
    """Tokens that one attends to; a problem where it is not the same in every layer."""
    if config["model_type"] == "llama":
        return None, []
    if config["model_type"] == "mistral":
        return config["sliding_window"], []
    layers, first = config["num_hidden_layers"], config["max_window_layers"]
    assumed = ["full_attention"] * (first > 0) + ["sliding_attention"] * (layers > first)
    kinds = set(config.get("layer_types") or assumed)
    if not config.get("use_sliding_window", False) or kinds == {"full_attention"}:
        return None, []
    return config["sliding_window"], _unequal({"layer_types": sorted(kinds)}, "layer_types", ["sliding_attention"])


def _unequal(config: Mapping[str, Any], key: str, *allowed: Any) -> list[Problem]:
    """A problem where a key has none of the values that our model can be."""
    if config[key] in allowed:
        return []
    return [
        Problem(
            f"config.json: {key} = {config[key]!r} cannot be imported",
            f"ours computes {' or '.join(map(repr, allowed))} only",
            "import another model",
        )
    ]
