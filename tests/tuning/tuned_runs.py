"""Runs of the tiny model that start from one another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from running import RUN, tiny_dataset
from tiny import tiny

from ds_gpt.checkpoint.initial import initial_at, started_from

SHORT = [*RUN, "training.steps=4", "evaluation.every=4"]
ADAPTERS = [
    *SHORT,
    "lora.rank=2",
    "lora.targets=[qkv, down]",
    "optimizer.lr=0.1",
    "schedule.name=constant",
    "schedule.warmup_steps=0",
]


def run(ranks: Any, deepspeed: str, overrides: list[str], run_dir: Path, init_from: Path | None) -> float:
    """Train a run of its own; returns the loss of the first step."""
    from ds_gpt.engine.engine import Engine
    from ds_gpt.trainer.loop import Trainer
    from ds_gpt.trainer.start import make_start

    composed, initial, dataset = tiny(deepspeed, ranks.world_size, overrides), None, tiny_dataset()
    if init_from is not None:
        composed = tiny(deepspeed, ranks.world_size, [*overrides, f"init_from={init_from}"])
        initial = initial_at(init_from)
        composed = replace(composed, run=started_from(composed.run, initial))
    start = ranks.agree(make_start(str(run_dir), None, composed, dataset) if ranks.is_first else None)
    from ds_gpt.trainer.run_folder import RunFolder

    engine = Engine(composed, ranks, initial.read if initial else None)
    trainer = Trainer(composed, dataset, engine, RunFolder(start.folder), None)
    loss = trainer.validation.loss()
    trainer.train()
    engine.close()
    return loss
