"""The folder of a run with a checkpoint, made without training it."""

from __future__ import annotations

from pathlib import Path

from ds_gpt.checkpoint.folder import commit, prepare_partial
from ds_gpt.checkpoint.shards import write_shard
from ds_gpt.data import Tokenizer
from ds_gpt.model.gpt import GPT


def save_run(folder: Path, model: GPT, tokenizer: Tokenizer, precision: str = "fp32") -> Path:
    """Write `model` as a trainer would have; returns `folder`."""
    folder.mkdir(parents=True)
    tokenizer.save(folder / "tokenizer.json")
    run = {
        "name": "made",
        "model": model.config.model_dump(mode="json"),
        "batch": {"global_batch_size": 1},
        "optimizer": {"lr": 1.0},
        "training": {"steps": 1},
    }
    facts = {**run, "tokenizer_identity": tokenizer.identity, "precision": precision}
    partial = prepare_partial(folder / "checkpoints", 1)
    tensors = {f"weight:0:{name}": parameter.detach().flatten().clone() for name, parameter in model.named_parameters()}
    commit(partial, 1, {"step": 1, "facts": facts}, [write_shard(partial, 0, tensors)])
    return folder
