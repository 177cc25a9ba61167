"""A run's model as files that other tools read: written parameter by parameter, from any ZeRO stage and world size."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from ds_gpt.checkpoint.initial import Initial
from ds_gpt.checkpoint.saved_model import SavedModel
from ds_gpt.config import ConfigError, Problem
from ds_gpt.data.replacing import sync
from ds_gpt.data.tokenizer_json import end_name, separator_name, tokenizer_json
from ds_gpt.exchange.families import Family, config_json, family_of
from ds_gpt.exchange.foreign_config import OWN
from ds_gpt.exchange.layouts import Layout, Shape, foreign_shapes, own_layout, parameter_shapes
from ds_gpt.exchange.model_card import model_card
from ds_gpt.exchange.new_folder import new_folder
from ds_gpt.exchange.tensor_files import write_sharded

Format = Literal["hf", "safetensors", "torch"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_TORCH_FILE = "model.pt"
_TOKENIZER = "tokenizer.json"

Read = Callable[[str], Tensor]  # a parameter's name to its fp32 values


def export(
    saved: SavedModel, output: Path, format: Format, dtype: str = "fp32", max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write the model, its tokenizer and a model card to a new folder.

    ``hf`` is what `from_pretrained` of transformers loads; ``safetensors`` has our own tensor names; ``torch`` is one
    file for `torch.load`. In host memory there is never more than the largest parameter, in a few copies; for
    ``torch``, whose writer wants them all, one copy of the weights.

    Args:
        saved: an intact checkpoint.
        output: the folder; it must not exist.
        format: the kind of files.
        dtype: of the weights, a key of `DTYPES`.
        max_shard_bytes: of one file of weights; beyond, there are several and an index. ``torch`` writes one always.

    Raises:
        ConfigError: the folder exists or cannot be written; the format or the type cannot express the model.
    """
    model, family = saved.run.model, family_of(saved.run.model) if format == "hf" else None
    layout = family.layout(model) if family else own_layout(model)
    shapes, torch_dtype = parameter_shapes(model), DTYPES[dtype]
    files = _hugging_face_files(saved, family, torch_dtype) if family else _own_files(saved)
    with new_folder(output, "--output") as folder, _Masters(saved, shapes) as masters:
        if format == "torch":
            _write_torch(folder / _TORCH_FILE, shapes, masters.read, torch_dtype, model.tied_head)
        else:
            tensors = _tensors(layout, masters.read, torch_dtype)
            write_sharded(folder, list(foreign_shapes(layout, shapes)), torch_dtype, tensors, max_shard_bytes)
        card = model_card(saved, format, dtype, family.architecture if family else None)
        for name, content in {**files, "README.md": card}.items():
            indent = None if name == _TOKENIZER else 2
            text = content if isinstance(content, str) else json.dumps(content, indent=indent) + "\n"
            (folder / name).write_text(text, encoding="utf-8")
            sync(folder / name)


class _Masters:
    """The fp32 weights of a checkpoint, one at a time, adapters merged.

    What was read of a mapped file counts as this process's memory for as long as the file is open, so the files are
    closed and opened anew each time that a share of the weights was read.
    """

    _SHARE = 1 / 8

    def __init__(self, saved: SavedModel, shapes: Mapping[str, Shape]) -> None:
        self._saved, self._numels = saved, {name: math.prod(shape) for name, shape in shapes.items()}
        self._shapes, self._limit = shapes, sum(self._numels.values()) * self._SHARE
        self._since_opened = 0
        self._files = ExitStack()
        self._stored = self._open()

    def _open(self) -> Initial:
        return self._files.enter_context(Initial(self._saved.checkpoint, self._saved.state["facts"]))

    def __enter__(self) -> _Masters:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def read(self, name: str) -> Tensor:
        """A parameter's values."""
        if self._since_opened > self._limit:
            self._files.close()
            self._stored, self._since_opened = self._open(), 0
        values = self._stored.read(name, self._numels[name])
        self._since_opened += self._numels[name]
        return values.view(self._shapes[name])


def _tensors(layout: Layout, read: Read, dtype: torch.dtype) -> Iterator[Tensor]:
    """The format's tensors, in the order of `foreign_shapes`."""
    for rule in layout.rules:
        for part in rule.outward(read(rule.ours)):
            yield cast(part, dtype, rule.ours)
    for shape in layout.zeros.values():
        yield torch.zeros(shape, dtype=dtype)


def _write_torch(path: Path, shapes: Mapping[str, Shape], read: Read, dtype: torch.dtype, tied_head: bool) -> None:
    weights = {name: cast(read(name), dtype, name) for name in shapes}
    if tied_head:  # the same tensor under a second name: `load_state_dict` asks for it, the file holds it once
        weights["head.weight"] = weights["embedding.tokens.weight"]
    try:
        torch.save(weights, path)
    except RuntimeError as error:  # what torch makes of the operating system's error
        raise OSError(f"torch.save failed: {error}") from error
    sync(path)


def cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """`tensor` in `dtype`. Raises ConfigError where a value is beyond what fp16 holds."""
    result = tensor.to(dtype)
    if dtype == torch.float16 and tensor.isfinite().all() and not result.isfinite().all():
        raise ConfigError(
            Problem(
                f"--dtype fp16: '{name}' has values up to {tensor.abs().max():.3g}",
                f"fp16 ends at {torch.finfo(dtype).max:g}, and they would become infinite",
                "export as bf16 or fp32",
            )
        )
    return result


def _own_files(saved: SavedModel) -> dict[str, Any]:
    return {
        "config.json": {"model_type": OWN, "model": saved.run.model.model_dump(mode="json")},
        _TOKENIZER: saved.tokenizer.to_dict(),
    }


def _hugging_face_files(saved: SavedModel, family: Family, dtype: torch.dtype) -> dict[str, Any]:
    name = separator_name(saved.tokenizer)
    separator = saved.tokenizer.separator if name is not None else None
    ends = saved.tokenizer.ends if name is not None else ()
    special = {"bos_token_id": separator, "eos_token_id": list(ends) if len(ends) > 1 else separator}
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    tokenizer_config |= {"model_max_length": saved.run.model.context}
    if name is not None:
        tokenizer_config |= {"bos_token": name, "eos_token": end_name(saved.tokenizer), "pad_token": name}
    return {
        "config.json": config_json(saved.run.model, family, str(dtype).removeprefix("torch."), special),
        "generation_config.json": {**special, "pad_token_id": separator},
        _TOKENIZER: tokenizer_json(saved.tokenizer),
        "tokenizer_config.json": tokenizer_config,
    }
