"""What is learned besides the next token of text, and adapters, in a pipeline: as on one rank, which is proved elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_ranks import run_ranks
from made_examples import composed, conversations, settled, write
from tiny import tiny

from ds_gpt.data import Split
from ds_gpt.data.corruption import Corrupted
from ds_gpt.data.loader import BatchLoader, window_batch
from ds_gpt.learning.loss import IGNORE_INDEX

TEXT = np.random.default_rng(0).integers(0, 500, 40_000).astype(np.uint16)
SETTINGS = ["optimizer.name=sgd", "gradient_clipping=0.5", "gradient_accumulation_steps=4", "model.layers=3"]
PIPELINE = ["parallel.pipeline=2", "activation_checkpointing={policy: full}"]


def curve(ranks: Any, case: Any, source: Any) -> list[tuple[float, ...]]:
    """(loss, norm) of four steps, and the loss of an evaluation."""
    from ds_gpt.engine.engine import Engine

    run = case.run
    engine, sampler = Engine(case, ranks), source.sampler(run.model.context, run.batch.global_batch_size, run.seed)
    loader = BatchLoader(source, sampler, engine.grid.data_rank, engine.grid.data_ranks, case.micro_batch_size, "cpu")
    results = [engine.step(step, loader.load(step), 0.1) for step in range(4)]
    mine = sampler.windows(9)[engine.grid.data_rank :: engine.grid.data_ranks]
    loss = engine.evaluate([window_batch(source, mine, run.model.context, IGNORE_INDEX)])
    loader.close()
    engine.close()
    return [*((result.loss, result.grad_norm) for result in results), (loss,)]


def of_examples(ranks: Any, corpus: Path, more: list[str]) -> list[tuple[float, ...]]:
    case = composed("sft", corpus, [*SETTINGS, *more], world_size=ranks.world_size)
    run, dataset = settled(case.run)
    return curve(ranks, replace(case, run=run), dataset.train)


def of_corrupted_text(ranks: Any, objective: str, more: list[str]) -> list[tuple[float, ...]]:
    case = tiny("zero1", ranks.world_size, [*SETTINGS, f"objective.name={objective}", "model.vocab_size=520", *more])
    return curve(ranks, case, Corrupted(Split.of(TEXT), case.run.objective, case.run.model.context, 500, case.run.seed))


def assert_alike(found: list[list[tuple[float, ...]]], expected: list[tuple[float, ...]]) -> None:
    for numbers in found:
        for step, (ours, wanted) in enumerate(zip(numbers, expected, strict=True)):
            assert ours == pytest.approx(wanted, rel=1e-5), step


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("adapters", [[], ["lora.rank=4", "lora.alpha=64", "lora.targets=[qkv, up]"]], ids=["all weights", "adapters"])
def test_fine_tuning(adapters: list[str], world_size: int, tmp_path: Path) -> None:
    corpus = write(tmp_path / "chat.jsonl", conversations())
    (expected,) = run_ranks(1, of_examples, corpus, adapters)
    assert_alike(run_ranks(world_size, of_examples, corpus, [*adapters, *PIPELINE]), expected)


@pytest.mark.parametrize("objective", ["masked", "span_corruption"])
def test_corrupted_text(objective: str) -> None:
    (expected,) = run_ranks(1, of_corrupted_text, objective, [])
    assert_alike(run_ranks(2, of_corrupted_text, objective, PIPELINE), expected)


def refused(ranks: Any, settings: list[str]) -> str:
    from ds_gpt.config import ConfigError
    from ds_gpt.engine.engine import Engine

    with pytest.raises(ConfigError) as raised:
        Engine(tiny("zero1", ranks.world_size, settings), ranks)
    return str(raised.value)


@pytest.mark.parametrize(("adapted", "idle"), [(0, "blocks 1 to 1, which are stage 1 of 2"), (1, "blocks 0 to 0, which are stage 0 of 2")])
def test_adapters_that_leave_a_stage_without_any_are_refused_on_every_rank(adapted: int, idle: str) -> None:
    settings = ["parallel.pipeline=2", "lora.rank=4", "lora.alpha=8", f"lora.targets=[blocks.{adapted}.attention.qkv]"]
    for said in run_ranks(2, refused, settings):
        assert f"lora.targets names no map of {idle}" in said and "set parallel.pipeline: 1" in said
