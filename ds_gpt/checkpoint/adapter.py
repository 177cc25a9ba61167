"""A run's adapters as a small folder in the layout of PEFT, which ``peft`` loads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ds_gpt.checkpoint.shards import ShardReader
from ds_gpt.config.run import RunConfig
from ds_gpt.engine.state import WEIGHT

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # PEFT's own, in front of the name that a map has in the model


def write_adapter(checkpoint: Path, run: RunConfig, folder: Path) -> None:
    """Write the adapters that a checkpoint holds, in fp32. Raises OSError.

    The maps have the names of this package's GPT, for which ``peft.PeftModel.from_pretrained(GPT(config), folder)``
    takes it; for a model as it is exported there is `ds_gpt.exchange.adapters`.
    """
    adapters = read_adapters(checkpoint, run)
    tensors = {
        f"{PREFIX}{name}.lora_{kind}.weight": matrix
        for name, pair in adapters.items()
        for kind, matrix in zip("AB", pair, strict=True)
    }
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(adapter_config(run, adapters, task=None, transposed=False), indent=2)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def read_adapters(checkpoint: Path, run: RunConfig) -> dict[str, tuple[Tensor, Tensor]]:
    """A (rank, inputs) and B (outputs, rank) of each adapter that a checkpoint holds, by its map's name; fp32."""
    rank = run.lora.rank
    assert rank is not None
    found: dict[str, tuple[Tensor, Tensor]] = {}
    with ShardReader(checkpoint) as shards:

        def matrix(name: str, *shape: int) -> Tensor:
            flat = shards.read(name, WEIGHT, 0, shards.numel(name))
            assert flat is not None
            return flat.view(shape)

        for name in shards.parameters():
            if name.endswith(_A):
                of = name.removesuffix(_A)
                found[of] = matrix(name, rank, -1), matrix(of + _B, -1, rank)
    return found


_A, _B = ".lora_A.weight", ".lora_B.weight"


def adapter_config(run: RunConfig, modules: Iterable[str], task: str | None, transposed: bool) -> dict[str, Any]:
    """Content of ``adapter_config.json``.

    Args:
        run: what was trained.
        modules: full names of the maps that have adapters.
        task: PEFT's name for what the model does.
        transposed: whether these maps store their weight as (inputs, outputs).
    """
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": run.init_from,
        "r": run.lora.rank,
        "lora_alpha": run.lora.alpha,
        "lora_dropout": run.lora.dropout,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": transposed,
        "inference_mode": True,
    }
