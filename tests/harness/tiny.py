"""A GPT small enough to run a hundred times, on tokens with something to learn, for the tests of engine and trainer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_gpt.config import Composed, Hardware, load
from ds_gpt.data import Split, WindowSampler
from ds_gpt.data.loader import BatchLoader

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "ds_configs"
VOCABULARY = 37
TINY = (
    "model.layers=2",
    "model.width=32",
    "model.heads=4",
    "model.context=16",
    f"model.vocab_size={VOCABULARY}",
    "batch.global_batch_size=16",
    "optimizer.lr=0.01",
)


def tiny(deepspeed: str, world_size: int, overrides: Iterable[str] = ()) -> Composed:
    """The tiny run under ``ds_configs/<deepspeed>.json`` on a CPU."""
    hardware = Hardware("cpu", "CPU", world_size, bf16=False)
    return load(CONFIGS / "runs" / "quickstart.yaml", CONFIGS / f"{deepspeed}.json", hardware, [*TINY, *overrides])


def tiny_tokens(count: int = 4096) -> np.ndarray:
    """A noisy periodic sequence: half of the next tokens are certain."""
    generator = np.random.default_rng(11)
    certain = np.arange(count) * 5 % VOCABULARY
    return np.where(generator.random(count) < 0.5, certain, generator.integers(0, VOCABULARY, count)).astype(np.uint16)


def tiny_sampler(composed: Composed) -> WindowSampler:
    """The run's sampler over the tiny tokens."""
    run = composed.run
    return WindowSampler(len(tiny_tokens()), run.model.context, run.batch.global_batch_size, run.seed)


def tiny_loader(composed: Composed, rank: int, ranks: int) -> BatchLoader:
    """One rank's share of the run's batches."""
    return BatchLoader(Split.of(tiny_tokens()), tiny_sampler(composed), rank, ranks, composed.micro_batch_size, "cpu")


def train_curve(ranks: Any, composed: Composed, steps: int, lr: float = 0.01) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step of the tiny run through the engine; called on every rank."""
    from ds_gpt.engine.engine import Engine

    engine = Engine(composed, ranks)
    loader = tiny_loader(composed, engine.grid.data_rank, engine.grid.data_ranks)
    curve = []
    for step in range(steps):
        result = engine.step(step, loader.load(step), lr)
        curve.append((result.loss, result.grad_norm))
    loader.close()
    engine.close()
    return curve


def whole_batch(composed: Composed, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs_BT, targets_BT) of the whole global batch, read without the loader."""
    tokens, context = tiny_tokens().astype(np.int64), composed.run.model.context
    windows = np.stack([tokens[start : start + context + 1] for start in tiny_sampler(composed).windows(step)])
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())
