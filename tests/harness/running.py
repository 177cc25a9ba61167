"""A whole run by the Trainer on ranks of the harness, as ``ds_gpt/train.py`` wires it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tiny import VOCABULARY, tiny, tiny_tokens

from ds_gpt.data import Dataset, SyntheticTokenizer


def tiny_dataset() -> Dataset:
    """The tiny tokens as a dataset."""
    return Dataset.cut(tiny_tokens(), 0.1, SyntheticTokenizer(VOCABULARY), digest="tiny")


RUN = ["training.steps=40", "evaluation.every=20", "evaluation.sequences=8", "sample.tokens=2", "logging.every=1", "logging.tensorboard=false"]


def train_run(ranks: Any, run_dir: str, deepspeed: str, overrides: list[str], poison: dict[int, str] | None = None, report: bool = True) -> dict[str, Any]:
    """Start a run in `run_dir`, or go on with the one that is there; returns its end state and weights.

    `poison` does harm at a global batch (data step): ``loss`` replaces its targets by noise that the model finds
    absurd, ``nan`` makes one rank's gradient NaN.
    """
    from saving import weights

    from ds_gpt.checkpoint.run_state import RunState
    from ds_gpt.engine.engine import Engine
    from ds_gpt.trainer.loop import Trainer
    from ds_gpt.trainer.run_folder import RunFolder
    from ds_gpt.trainer.start import find_checkpoint, make_start

    composed = tiny(deepspeed, ranks.world_size, [*RUN, *overrides])
    dataset = tiny_dataset()
    start = ranks.agree(make_start(run_dir, "auto", composed, dataset) if ranks.is_first else None)
    said: list[str] = []
    checkpoint = find_checkpoint(start, composed, dataset, ranks, said.append)
    folder = RunFolder(Path(start.folder))
    engine = Engine(composed, ranks)
    trainer = Trainer(composed, dataset, engine, folder, None)
    state = trainer.resume(checkpoint) if checkpoint else RunState()
    if start.continues and ranks.is_first:
        folder.continue_from(state.step, composed, dataset.tokenizer, dataset.digest)
    if poison:
        _poison(trainer, engine, poison)
    first_step = state.step
    outcome = trainer.train(state)
    result = {"from": first_step, "state": outcome.state, "weights": weights(engine) if report else {}, "said": said}
    engine.close()
    return result


def _poison(trainer: Any, engine: Any, poison: dict[int, str]) -> None:
    load, armed = trainer.loader.load, {"nan": False}

    def poisoned_load(data_step: int) -> Any:
        batches = load(data_step)
        harm = poison.get(data_step)
        armed["nan"] = harm == "nan" and engine.ranks.rank == engine.ranks.world_size - 1
        if harm == "loss":
            generator = np.random.default_rng(data_step)
            batches = [(x, x.new_tensor(generator.integers(0, VOCABULARY, x.shape))) for x, _ in batches]
        return batches

    trainer.loader.load = poisoned_load
    norm = next(weight for name, weight in engine.model.named_parameters() if "norm" in name)  # every stage of a pipeline has one
    norm.register_hook(lambda gradient: gradient * float("nan") if armed["nan"] else gradient)


def changed(overrides: list[str]) -> Any:
    """The tiny composed run with other settings, for checks that need no ranks."""
    return replace(tiny("zero1", 1, [*RUN, *overrides]))
