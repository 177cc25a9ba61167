"""The stages of a pipeline: what each holds, that together they evaluate and generate as one model, and what they do with a NaN."""

from __future__ import annotations

import math
import os
import signal
import time
from typing import Any

import pytest
import torch
from forked_ranks import Job, run_ranks
from tiny import VOCABULARY, tiny, tiny_loader

from ds_gpt.config import ModelConfig
from ds_gpt.engine.pipeline import balanced, stage_blocks
from ds_gpt.model.gpt import GPT

TWO, FOUR = ["parallel.pipeline=2"], ["parallel.pipeline=4", "model.layers=4"]


def engine_of(ranks: Any, settings: list[str], deepspeed: str = "zero1") -> tuple[Any, Any]:
    from ds_gpt.engine.engine import Engine

    composed = tiny(deepspeed, ranks.world_size, settings)
    engine = Engine(composed, ranks)
    return engine, tiny_loader(composed, engine.grid.data_rank, engine.grid.data_ranks)


@pytest.mark.parametrize(
    ("before", "blocks", "after", "stages", "cuts"),
    [
        (0, [1] * 4, 0, 2, [0, 2, 4]),
        (0, [1] * 12, 0, 4, [0, 3, 6, 9, 12]),
        (3, [1] * 6, 3, 3, [0, 1, 5, 6]),  # the embedding and the head are worth blocks
        (4, [1] * 6, 4, 2, [0, 3, 6]),
        (100, [1] * 4, 100, 4, [0, 1, 2, 3, 4]),  # a stage has a block, whatever the others weigh
        (1, [1] * 5, 2, 2, [0, 3, 5]),
    ],
)
def test_blocks_are_cut_so_that_the_largest_stage_is_smallest(before: int, blocks: list[int], after: int, stages: int, cuts: list[int]) -> None:
    assert balanced(before, blocks, after, stages) == cuts


def test_no_other_cut_has_a_smaller_largest_stage() -> None:
    from itertools import combinations

    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        blocks = torch.randint(1, 20, (7,), generator=generator).tolist()
        before, after, stages = torch.randint(0, 40, (2,), generator=generator).tolist() + [3]

        def largest(cuts: list[int]) -> int:
            sums = [sum(blocks[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
            return max(sums[0] + before, *sums[1:-1], sums[-1] + after)

        every = [[0, *inner, 7] for inner in combinations(range(1, 7), stages - 1)]
        assert largest(balanced(before, blocks, after, stages)) == min(map(largest, every))


def test_the_cut_of_a_model_counts_its_embedding_and_its_head() -> None:
    """GPT-2 (124M): 38.6M parameters in the embedding and as many in the head are 5.4 blocks each."""
    with torch.device("meta"):
        model = GPT(ModelConfig(layers=12, width=768, heads=12, context=1024, vocab_size=50257))
    assert stage_blocks(model, 2) == [0, 6, 12]
    assert stage_blocks(model, 4) == [0, 1, 6, 11, 12]


def used(ranks: Any, settings: list[str]) -> dict[str, Any]:
    """What an engine that trained two steps measures, says and scores; and a step after that."""
    from running import tiny_dataset

    from ds_gpt.data.loader import window_batch
    from ds_gpt.generation.decoding import generate
    from ds_gpt.generation.options import Sampling
    from ds_gpt.trainer.evaluation import Validation

    engine, loader = engine_of(ranks, settings)
    dataset = tiny_dataset()
    for step in range(2):
        engine.step(step, loader.load(step), 0.5)
    validation = Validation(dataset, engine)
    result: dict[str, Any] = {"loss": validation.loss(), "probe": validation.probe_loss()}
    prompts = [[1, 6, 11], [5, 10, 15, 20, 25, 30, 35, 3, 8, 13, 18, 23, 28]]  # the second outgrows the context of 16
    with engine.evaluating():
        result["said"] = generate(engine.model, prompts, 12, Sampling(0.0), 0, VOCABULARY, engine.logits)
        result["logits"] = engine.logits(torch.arange(10)[None]).tolist()
    inputs_BT, targets_BT = window_batch(dataset.val, torch.tensor([0, 50, 100]).numpy(), 16, -100)
    result["scores"] = engine.log_probs(inputs_BT, targets_BT).tolist()
    after = engine.step(2, loader.load(2), 0.5)
    result["after"] = (after.loss, after.grad_norm)
    loader.close()
    engine.close()
    return result


@pytest.mark.parametrize(("world_size", "settings"), [(2, [*TWO, "gradient_accumulation_steps=2"]), (4, [*TWO, "model.positions=rotary"]), (4, FOUR)])
def test_stages_evaluate_generate_and_score_as_one_model(world_size: int, settings: list[str]) -> None:
    settings = [*settings, "optimizer.name=sgd"]  # Adam's first steps make much of gradients that are but rounding
    (expected,) = run_ranks(1, used, [setting for setting in settings if "pipeline" not in setting])
    by_rank = run_ranks(world_size, used, settings)
    for found in by_rank:
        assert found["said"] == expected["said"]
        for key in ("loss", "probe", "logits", "scores", "after"):
            torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(expected[key]), rtol=1e-5, atol=1e-5)
        assert found["loss"] == by_rank[0]["loss"] and found["after"] == by_rank[0]["after"], "the same number on every rank"
