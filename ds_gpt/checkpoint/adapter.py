"""A run's adapters as a small folder in the layout of PEFT, which ``peft`` loads."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from ds_gpt.checkpoint.shards import ShardReader
from ds_gpt.config.run import RunConfig
from ds_gpt.engine.state import WEIGHT

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."  # PEFT's own, in front of the name that a map has in the model


def write_adapter(checkpoint: Path, run: RunConfig, folder: Path) -> None:
    """Write the adapters that a checkpoint holds, in fp32. Raises OSError.

    The maps have the names of this package's GPT, for which ``peft.PeftModel.from_pretrained(GPT(config), folder)``
    takes it.
    """
    rank, tensors = run.lora.rank, {}
    assert rank is not None
    with ShardReader(checkpoint) as shards:
        for name in shards.parameters():
            if ".lora_" in name:
                flat = shards.read(name, WEIGHT, 0, shards.numel(name))
                assert flat is not None
                tensors[_PREFIX + name] = flat.view((rank, -1) if ".lora_A." in name else (-1, rank)).contiguous()
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": run.init_from,
        "r": rank,
        "lora_alpha": run.lora.alpha,
        "lora_dropout": run.lora.dropout,
        "target_modules": sorted({name.removeprefix(_PREFIX).partition(".lora_")[0] for name in tensors}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
