"""A model that others trained, or that was exported, as the checkpoint of a run; only from safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_gpt.checkpoint.folder import commit, prepare_partial
from ds_gpt.checkpoint.run_state import RunState
from ds_gpt.checkpoint.shards import piece_key, record, shard_name
from ds_gpt.config import ConfigError, ModelConfig, Problem
from ds_gpt.data import Tokenizer, load_tokenizer
from ds_gpt.data.tokenizer_json import own_tokenizer
from ds_gpt.engine.state import WEIGHT
from ds_gpt.exchange.foreign_config import read_config
from ds_gpt.exchange.layouts import Layout, foreign_shapes, parameter_shapes
from ds_gpt.exchange.tensor_files import TensorFolder, write_tensors

ORIGIN = "imported.json"  # in the folder of an imported run: where its model is from
_FLOATS = {"F32", "F16", "BF16", "F64"}
_GPT2_STEM = "transformer."  # GPT-2 was published without it
# Buffers that some files keep and no model needs.
_NO_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_HEAD = "lm_head.weight"  # where it is tied, some files write it a second time
_LISTED = 8  # tensors that a problem names one by one


@dataclass(frozen=True)
class ForeignModel:
    """A model in a folder, seen to be one that ours can be; no weights are in memory.

    Attributes:
        folder: where it lies.
        model: its shape in our terms.
        tokenizer: its tokenizer.
        config: content of its config.json.
        layout: where its weights lie.
    """

    folder: Path
    model: ModelConfig
    tokenizer: Tokenizer
    config: dict[str, Any]
    layout: Layout


def find_foreign_model(folder: Path, tokenizer: Path | None = None) -> ForeignModel:
    """Read the folder's config.json and tokenizer.json.

    Args:
        folder: as transformers, or `ds-gpt export`, saves a model.
        tokenizer: a tokenizer.json to use instead of the folder's own.

    Raises:
        ConfigError: there is no such folder, or its model computes something that ours cannot.
    """
    config_path, tokenizer_path = folder / "config.json", tokenizer or folder / "tokenizer.json"
    if not config_path.is_file():
        raise ConfigError(
            Problem(
                f"'{folder}' has no config.json" if folder.is_dir() else f"'{folder}' is not a folder",
                "it says what the weights mean",
                "give a folder with config.json, tokenizer.json and *.safetensors (hf download NAME --local-dir DIR)",
            )
        )
    try:
        config = json.loads(config_path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            Problem(f"'{config_path}' cannot be read: {error}", fix="restore it from where the model was published")
        ) from None
    model, layout = read_config(config)
    if not tokenizer_path.is_file():
        raise ConfigError(
            Problem(
                f"'{tokenizer_path}' does not exist",
                "without the tokenizer of its training a model's ids have no meaning",
                "give one with --tokenizer; or make it: AutoTokenizer.from_pretrained(PATH).save_pretrained(PATH)",
            )
        )
    found = own_tokenizer(load_tokenizer(tokenizer_path))
    if found.vocab_size > model.vocabulary:
        raise ConfigError(
            Problem(
                f"the tokenizer '{tokenizer_path}' has {found.vocab_size} ids, the model {model.vocabulary}",
                "an id past the vocabulary has no embedding",
                "give the model's own tokenizer with --tokenizer",
            )
        )
    return ForeignModel(folder, model, found, config, layout)


def write_checkpoint(foreign: ForeignModel, checkpoints: Path, facts: dict[str, Any]) -> Path:
    """Write the weights as a checkpoint at step 0, fp32, without optimizer state; one tensor in memory at a time.

    Args:
        foreign: the model.
        checkpoints: folder of the run's checkpoints.
        facts: what the checkpoint is to remember of its run.

    Raises:
        ConfigError: the weights are missing, damaged, or not those that config.json describes.
    """
    shapes = parameter_shapes(foreign.model)
    with TensorFolder(foreign.folder) as tensors:
        named = _checked_names(foreign, tensors)
        _check_tied(foreign, tensors, named)
        keys = {
            piece_key(rule.ours, WEIGHT, 0): (torch.Size(shapes[rule.ours]).numel(),) for rule in foreign.layout.rules
        }
        partial = prepare_partial(checkpoints, 0)
        shard = partial / shard_name(0)
        write_tensors(shard, keys, torch.float32, _parameters(foreign.layout, tensors, named))
    state = {
        **asdict(RunState()),
        "val_loss": None,
        "probe_loss": None,
        "facts": facts,
        "optimizer_steps": 0,
        "loss_scaler": {},
    }
    return commit(partial, 0, state, [record(shard)])


def _parameters(layout: Layout, tensors: TensorFolder, named: dict[str, str]) -> Iterator[Tensor]:
    for rule in layout.rules:
        yield rule.inward(*(tensors.read(named[name]).float() for name in rule.theirs)).flatten()


def _checked_names(foreign: ForeignModel, tensors: TensorFolder) -> dict[str, str]:
    """Each tensor of the layout by its name in the files.

    Raises ConfigError: what is missing, superfluous, or has another shape or type.
    """
    expected = dict(foreign_shapes(foreign.layout, parameter_shapes(foreign.model)))
    stemless = not any(name.startswith(_GPT2_STEM) for name in tensors.names)
    named = {name: name.removeprefix(_GPT2_STEM) if stemless else name for name in expected}
    missing = sorted(name for name, stored in named.items() if stored not in tensors.names)
    unknown = sorted(
        name for name in tensors.names - set(named.values()) if not name.endswith(_NO_WEIGHTS) and name != _HEAD
    )
    present = {name: stored for name, stored in named.items() if stored in tensors.names}
    reshaped = [
        f"{name} {tensors.shape(stored)} instead of {expected[name]}"
        for name, stored in present.items()
        if tensors.shape(stored) != expected[name]
    ]
    retyped = [
        f"{name} {tensors.dtype(stored)}" for name, stored in present.items() if tensors.dtype(stored) not in _FLOATS
    ]
    problems = [
        Problem(
            f"{len(found)} tensors {what}: {', '.join(found[:_LISTED])}{', ...' if len(found) > _LISTED else ''}",
            why,
            fix,
        )
        for what, found, why, fix in (
            (
                "are missing",
                missing,
                "the model would compute with what was never trained",
                "copy the folder anew from where it was published",
            ),
            (
                "belong to no part of the model that config.json describes",
                unknown,
                "what they do would be left out",
                "import another model",
            ),
            (
                "have other shapes than config.json says",
                reshaped,
                "they are those of another model",
                "restore config.json or the weights",
            ),
            (
                "are no floating-point numbers",
                retyped,
                "quantized weights are not what was trained",
                "take the model before it was quantized",
            ),
        )
        if found
    ]
    if problems:
        raise ConfigError(problems)
    return named


def _check_tied(foreign: ForeignModel, tensors: TensorFolder, named: dict[str, str]) -> None:
    """A head that stands beside an embedding to which config.json ties it must be equal to it. Raises ConfigError."""
    embedding = next(named[rule.theirs[0]] for rule in foreign.layout.rules if rule.ours == "embedding.tokens.weight")
    if (
        foreign.model.tied_head
        and _HEAD in tensors.names
        and not torch.equal(tensors.read(_HEAD), tensors.read(embedding))
    ):
        raise ConfigError(
            Problem(
                f"config.json ties the head to the embedding, but {_HEAD} differs from {embedding}",
                "one of the two would be lost",
                "set tie_word_embeddings: false in config.json if the head was trained by itself",
            )
        )
