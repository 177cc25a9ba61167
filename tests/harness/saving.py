"""What the ranks of the checkpoint tests do: train, save, load, train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny import tiny, tiny_loader

LR = 0.003


def build(ranks: Any, deepspeed: str, overrides: list[str]) -> tuple[Any, Any]:
    from ds_gpt.engine.engine import Engine

    composed = tiny(deepspeed, ranks.world_size, overrides)
    engine = Engine(composed, ranks)
    return engine, tiny_loader(composed, engine.grid.data_rank, engine.grid.data_ranks)


def steps(engine: Any, loader: Any, first: int, last: int) -> list[tuple[float, float]]:
    results = [engine.step(step, loader.load(step), LR) for step in range(first, last)]
    return [(result.loss, result.grad_norm) for result in results]


def weights(engine: Any) -> dict[tuple[str, str, int], list[float]]:
    """Masters and moments that this rank keeps, as numbers."""
    return {(piece.parameter, kind, piece.start): tensor.tolist() for piece in engine.pieces() for kind, tensor in piece.tensors.items()}


def train_and_save(ranks: Any, cases: list[tuple[str, list[str], Path]], at: int, until: int) -> list[Any]:
    """For each (deepspeed, overrides, folder): the curve after step `at`, where the run is saved, and the final weights."""
    from ds_gpt.checkpoint.run_state import RunState
    from ds_gpt.checkpoint.saver import Saver
    from ds_gpt.config.run import CheckpointsConfig

    results = []
    for deepspeed, overrides, folder in cases:
        engine, loader = build(ranks, deepspeed, overrides)
        steps(engine, loader, 0, at)
        saver = Saver(engine, folder, CheckpointsConfig(keep_last=None))
        saver.save(RunState(step=at, data_step=at), {"note": deepspeed})
        saver.close()
        curve = steps(engine, loader, at, until)
        results.append((curve, weights(engine)))
        loader.close()
        engine.close()
    return results


def load_and_train(ranks: Any, cases: list[tuple[str, list[str], Path]], until: int) -> list[Any]:
    """For each (deepspeed, overrides, folder): the curve from the newest checkpoint on, and the final weights."""
    from ds_gpt.checkpoint.resume import load, newest_intact

    results = []
    for deepspeed, overrides, folder in cases:
        engine, loader = build(ranks, deepspeed, overrides)
        checkpoint = newest_intact(folder, ranks, lambda text: None)
        loaded = load(engine, checkpoint)
        assert loaded.absent == []
        curve = steps(engine, loader, loaded.state.step, until)
        results.append((curve, weights(engine)))
        loader.close()
        engine.close()
    return results
