"""The stages of a pipeline: what each holds, that together they evaluate and generate as one model, and what they do with a NaN."""

from __future__ import annotations

import math
import os
import signal
from typing import Any

import pytest
import torch
from forked_ranks import Job, run_ranks
from tiny import VOCABULARY, tiny, tiny_loader


TWO, FOUR = ["parallel.pipeline=2"], ["parallel.pipeline=4", "model.layers=4"]


def engine_of(ranks: Any, settings: list[str], deepspeed: str = "zero1") -> tuple[Any, Any]:
    from ds_gpt.engine.engine import Engine

    composed = tiny(deepspeed, ranks.world_size, settings)
    engine = Engine(composed, ranks)
    return engine, tiny_loader(composed, engine.grid.data_rank, engine.grid.data_ranks)


def used(ranks: Any, settings: list[str]) -> dict[str, Any]:
    """What an engine that trained two steps measures, says and scores; and a step after that."""
    from running import tiny_dataset

    from ds_gpt.data.loader import window_batch
    from ds_gpt.generation.decoding import generate
    from ds_gpt.generation.options import Sampling
    from ds_gpt.trainer.evaluation import Validation

    engine, loader = engine_of(ranks, settings)
    dataset = tiny_dataset()
    passes: list[None] = []  # a sign of life to the watchdog
    handle = engine.model.register_forward_hook(lambda *_: passes.append(None))
    for step in range(2):
        engine.step(step, loader.load(step), 0.5)
    handle.remove()
    assert len(passes) == 2 * engine.composed.accumulation_steps
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


@pytest.mark.parametrize(("world_size", "settings"), [(2, [*TWO, "gradient_accumulation_steps=2"]), (4, [*TWO, "model.positions=rotary"]), (4, FOUR), (4, [*TWO, "parallel.tensor=2"]), (4, [*TWO, "parallel.sequence=2"])])
def test_stages_evaluate_generate_and_score_as_one_model(world_size: int, settings: list[str]) -> None:
    settings = [*settings, "optimizer.name=sgd"]  # Adam's first steps make much of gradients that are but rounding
    (expected,) = run_ranks(1, used, [setting for setting in settings if "parallel" not in setting])
    by_rank = run_ranks(world_size, used, settings)
    for found in by_rank:
        assert found["said"] == expected["said"]
        for key in ("loss", "probe", "logits", "scores", "after"):
            torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(expected[key]), rtol=1e-5, atol=1e-5)
        assert found["loss"] == by_rank[0]["loss"] and found["after"] == by_rank[0]["after"], "the same number on every rank"


POISONED_STEP = 2


def poisoned_curve(ranks: Any, settings: list[str], deepspeed: str, rank: int | None) -> list[tuple[float, float, bool]]:
    """(loss, norm, applied) of five steps; in one of them this rank's gradients are NaN."""
    engine, loader = engine_of(ranks, settings, deepspeed)
    armed = False
    parameter = next(p for name, p in engine.model.named_parameters() if "feed_forward" in name)
    parameter.register_hook(lambda gradient: gradient * math.nan if armed else gradient)
    curve = []
    for step in range(5):
        armed = step == POISONED_STEP and ranks.rank == rank
        before = [parameter.detach().clone() for parameter in engine.model.parameters()]
        result = engine.step(step, loader.load(step), 0.01)
        if not result.applied:
            assert all(torch.equal(old, new) for old, new in zip(before, engine.model.parameters(), strict=True))
        curve.append((result.loss, result.grad_norm, result.applied))
    loader.close()
    engine.close()
    return curve


def poisoned_curves(ranks: Any, settings: list[str], deepspeed: str, poisoned: list[int | None]) -> Any:
    return [poisoned_curve(ranks, settings, deepspeed, rank) for rank in poisoned]


@pytest.mark.parametrize(
    ("world_size", "deepspeed", "settings"),
    [
        (2, "zero1", []),
        (4, "zero1", ["model.tied_head=false"]),
        (4, "zero0", []),
        (2, "zero1", ["bf16.enabled=true"]),
        (2, "fp16", ["zero_optimization.stage=1", "fp16.initial_scale_power=10"]),
    ],
)
def test_a_gradient_that_is_nan_on_one_stage_is_skipped_by_all(world_size: int, deepspeed: str, settings: list[str]) -> None:
    settings = [*settings, "gradient_accumulation_steps=2", "gradient_clipping=0.5"]
    (expected,) = run_ranks(1, poisoned_curves, settings, deepspeed, [0])
    tolerance = 1e-2 if deepspeed == "fp16" or "bf16.enabled=true" in settings else 1e-5
    by_rank = run_ranks(world_size, poisoned_curves, [*settings, *TWO], deepspeed, [0, world_size - 1])
    for curve in (curve for curves in by_rank for curve in curves):
        assert [applied for *_, applied in curve] == [step != POISONED_STEP for step in range(5)]
        assert not math.isfinite(curve[POISONED_STEP][1]) and math.isfinite(curve[POISONED_STEP][0])
        for step, (found, wanted) in enumerate(zip(curve, expected[0], strict=True)):
            if step != POISONED_STEP:
                assert found[:2] == pytest.approx(wanted[:2], rel=tolerance)


def kept(ranks: Any, settings: list[str]) -> dict[str, Any]:
    """Bytes that this rank keeps between steps by kind, the most that it had beyond them, and what it should keep."""
    import gc
    from collections import Counter

    from ds_gpt.engine.allocations import Allocations
    from ds_gpt.engine.trace import classify

    allocations, kinds = Allocations(), {}
    with allocations:
        engine, loader = engine_of(ranks, settings)
        allocations.mark("build")
        for step in range(2):
            engine.step(step, loader.load(step), 0.01)
            gc.collect()
            allocations.mark("step")
        classify(engine, allocations, kinds)
    sizes: Counter[str] = Counter()
    for serial, size in allocations.live_at(len(allocations.events)).items():
        sizes[kinds.get(serial, "other")] += size
    last = [phase for phase, _ in allocations.phases()][-1]
    result = {
        "sizes": dict(sizes),
        "beyond": last.peak_bytes - last.bytes,
        "names": [name for name, _ in engine.model.named_parameters()],
        "parameters": sum(parameter.numel() for parameter in engine.model.parameters()),
        "pieces": sum(piece.numel for piece in engine.pieces()),
    }
    loader.close()
    engine.close()
    return result


# So many tokens that activations are most of the memory; a small bucket, which would be all of it.
LONG = ["model.layers=4", "model.context=128", "zero_optimization.reduce_bucket_size=10000", "gradient_accumulation_steps=4", "batch.global_batch_size=8"]
STREAM_BYTES = 2 * 128 * 32 * 4  # B x T x D, fp32, of a micro-batch


@pytest.fixture(scope="module")
def memory() -> dict[int, list[dict[str, Any]]]:
    """What each rank keeps: of the whole model, and of two stages on two and on four ranks."""
    return {world_size: run_ranks(world_size, kept, [*LONG, *(TWO if world_size > 1 else [])]) for world_size in (1, 2, 4)}


def test_a_stage_keeps_its_own_parameters_and_their_state_alone(memory: dict[int, list[dict[str, Any]]]) -> None:
    (whole,) = memory[1]
    for world_size in (2, 4):
        by_rank = memory[world_size]
        data_ranks = world_size // 2
        stages = [by_rank[0], by_rank[-1]]
        shared = VOCABULARY * 32  # the tied weight, of which both stages have a copy
        assert sum(stage["parameters"] for stage in stages) == whole["parameters"] + shared
        assert stages[0]["parameters"] < 0.6 * whole["parameters"]
        for stage in stages:
            ours = [rank for rank in by_rank if rank["names"] == stage["names"]]
            assert sum(rank["pieces"] for rank in ours) == stage["parameters"] and len(ours) == data_ranks
            for rank in ours:
                parameters, shard = stage["parameters"], stage["parameters"] / data_ranks
                assert rank["sizes"]["weights"] == pytest.approx(4 * parameters, abs=2048), "rounded up to blocks of 512 bytes"
                assert rank["sizes"]["masters"] == pytest.approx(4 * shard, abs=2048)
                assert rank["sizes"]["moments"] == pytest.approx(8 * shard, abs=4096)
                # What is sent and received, not a model: at most a few streams.
                assert rank["sizes"]["other"] < 6 * STREAM_BYTES + 16384, rank["sizes"]
                assert rank["sizes"].keys() == {"weights", "masters", "moments", "other"}, "no gradients between steps"


def test_activations_are_those_of_a_stage_for_as_many_micro_batches_as_stages(memory: dict[int, list[dict[str, Any]]]) -> None:
    """Four micro-batches a step: the last stage has one under way, the first two, of half the layers each."""
    (whole,), (first, last) = memory[1], memory[2]
    assert last["beyond"] < 0.65 * whole["beyond"]
    assert first["beyond"] < 1.02 * whole["beyond"]


def stopped(ranks: Any, settings: list[str]) -> None:
    """Rank 1 is killed in the middle of its third step, in a backward pass; the others train on."""
    engine, loader = engine_of(ranks, settings)
    passes = 0

    def die(gradient: torch.Tensor) -> None:
        nonlocal passes
        passes += 1
        if ranks.rank == 1 and passes == 10:  # four micro-batches a step
            os.kill(os.getpid(), signal.SIGKILL)

    next(p for name, p in engine.model.named_parameters() if "feed_forward" in name).register_hook(die)
    for step in range(100):
        engine.step(step, loader.load(step), 0.01)


@pytest.mark.parametrize(("world_size", "settings"), [(2, TWO), (4, FOUR)])
def test_a_stage_that_dies_in_a_step_ends_the_others(world_size: int, settings: list[str]) -> None:
    with Job(world_size, stopped, [*settings, "gradient_accumulation_steps=4"]) as job:
        ready = [rank for rank in range(world_size) if job.pipes[rank].poll(60)]
        assert ready == list(range(world_size)), "a rank hung after another was killed"
        with pytest.raises(EOFError):
            job.pipes[1].recv()
        for rank in set(ready) - {1}:
            ok, told = job.pipes[rank].recv()
            assert not ok and "engine.step" in told, told
