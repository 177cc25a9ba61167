"""A run's adapters for the model that its base is exported as: PEFT's layout, under the names of transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from ds_gpt.checkpoint.adapter import CONFIG, PREFIX, WEIGHTS, adapter_config, read_adapters
from ds_gpt.checkpoint.saved_model import SavedModel
from ds_gpt.config import ConfigError, Problem
from ds_gpt.data.replacing import sync
from ds_gpt.exchange.exporting import DTYPES, cast
from ds_gpt.exchange.families import family_of
from ds_gpt.exchange.layouts import Layout
from ds_gpt.exchange.model_card import model_card
from ds_gpt.exchange.new_folder import new_folder
from ds_gpt.exchange.tensor_files import write_tensors

_TRANSPOSED = "GPT2LMHeadModel"  # its Conv1D stores (inputs, outputs)


def export_adapter(saved: SavedModel, output: Path, dtype: str = "fp32", base: str | None = None) -> None:
    """Write the adapters of a run to a new folder, for ``peft.PeftModel.from_pretrained(model, output)``.

    The model is what transformers loads of the exported run that this one started from.

    Args:
        saved: an intact checkpoint.
        output: the folder; it must not exist.
        dtype: of the adapters, a key of `DTYPES`.
        base: where transformers finds that model, a folder or a name on the Hugging Face hub, for
            ``peft.AutoPeftModelForCausalLM.from_pretrained(output)``; None: the checkpoint that the run started from is
            noted, which transformers cannot read.

    Raises:
        ConfigError: the run trained no adapters, no class of transformers computes its model, the folder exists or
            cannot be written, the type cannot hold a value, or `base` is no folder of a model, nor a name.
    """
    if saved.run.lora.rank is None:
        raise ConfigError(
            Problem(
                f"--format peft: the run of '{saved.checkpoint}' has no adapters (lora.rank)",
                "it trained every weight",
                "--format hf exports the whole model",
            )
        )
    base = None if base is None else _found(base)
    family = family_of(saved.run.model)
    transposed = family.architecture == _TRANSPOSED
    adapters = read_adapters(saved.checkpoint, saved.run)
    maps = dict(_for_their_maps(adapters, family.layout(saved.run.model), transposed))
    tensors = {
        f"{PREFIX}{name}.lora_{kind}.weight": cast(matrix, DTYPES[dtype], name)
        for name, pair in maps.items()
        for kind, matrix in zip("AB", pair, strict=True)
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    config = adapter_config(saved.run, maps, "CAUSAL_LM", transposed)
    if base is not None:
        config["base_model_name_or_path"] = base
    with new_folder(output, "--output") as folder:
        write_tensors(folder / WEIGHTS, shapes, DTYPES[dtype], tensors.values())
        card = model_card(saved, "peft", dtype, family.architecture, base)
        for name, text in {CONFIG: json.dumps(config, indent=2) + "\n", "README.md": card}.items():
            (folder / name).write_text(text, encoding="utf-8")
            sync(folder / name)


def _found(base: str) -> str:
    """The base as it is noted: a folder with its whole path. Raises ConfigError where it is neither folder nor name."""
    folder = Path(base)
    if (folder / "config.json").is_file():
        return str(folder.absolute())
    if folder.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base) or base.startswith("."):
        raise ConfigError(
            Problem(
                f"--base '{base}' is {'a folder without config.json' if folder.is_dir() else 'neither a folder nor a name on the Hugging Face hub'}",
                "peft loads the model from there before it adds the adapters",
                "give what ds-gpt export --format hf made of the run that this one started from, or the model that was imported",
            )
        )
    return base


def _for_their_maps(
    adapters: dict[str, tuple[Tensor, Tensor]], layout: Layout, transposed: bool
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """The pair of each map of theirs, by its name.

    B has a row for each output, as the map's weight has, so what rearranges or divides the one does it to the other.
    Where our map is several of theirs, each has the whole of A.
    """
    for rule in layout.rules:
        name = rule.ours.removesuffix(".weight")
        if name in adapters and rule.ours.endswith(".weight"):
            a, b = adapters[name]
            for theirs, rows in zip(rule.theirs, rule.outward(b), strict=True):
                yield theirs.removesuffix(".weight"), (a, rows.t() if transposed else rows)
