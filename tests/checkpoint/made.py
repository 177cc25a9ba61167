"""Checkpoints and a saver without DeepSpeed and without other processes, for what depends on files alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ds_gpt.checkpoint.folder import apply_retention, commit, prepare_partial
from ds_gpt.checkpoint.shards import write_shard
from ds_gpt.engine.ranks import Ranks
from ds_gpt.engine.state import Piece

RANKS = 2
ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"))


def make(checkpoints: Path, step: int, val_loss: float | None = None, version: float = 0.0) -> Path:
    """A checkpoint of two ranks, by the calls that a saver makes."""
    partial = prepare_partial(checkpoints, step)
    records = [write_shard(partial, rank, {f"weight:{rank * 8}:w": torch.full((8,), step + version)}) for rank in range(RANKS)]
    return commit(partial, step, {"step": step, "val_loss": val_loss, "version": version}, records)


def make_and_retain(checkpoints: Path, step: int, version: float = 0.0, keep_last: int | None = 2) -> Path:
    """The same, and what retention does after it."""
    path = make(checkpoints, step, version=version)
    apply_retention(checkpoints, step, keep_last, None, keep_best=True)
    return path


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder and a digest of it."""
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*")) if path.is_file()}


class OneRankEngine:
    """What `Saver` asks of an engine. It keeps one parameter; `weight` is its value."""

    ranks = ALONE

    def __init__(self) -> None:
        self.weight = torch.zeros(1000)

    def pieces(self) -> Iterator[Piece]:
        yield Piece("w", 0, {"weight": self.weight})

    def state_facts(self) -> dict[str, Any]:
        return {"optimizer_steps": 0, "loss_scaler": {}}
