"""Pipeline parallelism is the training of one process, in plain PyTorch: the same curve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from curves import CHUNKED, FP32_TOLERANCE, MODERN, Curve, assert_mixed_close, curves, mixed_reference, overrides, reference, worst
from forked_ranks import run_ranks
from tiny import tiny, tiny_loader, whole_batch

from ds_gpt.learning.parameter_groups import parameter_groups
from ds_gpt.model.gpt import GPT

TWO = ("parallel.pipeline=2",)
UNTIED = ("model.tied_head=false",)

# optimizer, accumulation steps, checkpointing, options
Case = tuple[str, int, str | None, tuple[str, ...]]


def found(world_size: int, deepspeed: str, cases: list[Case], *more: str) -> dict[Case, Curve]:
    settings = [[*overrides(*case[:3]), *case[3], *more] for case in cases]
    return dict(zip(cases, curves(world_size, deepspeed, settings, [case[0] for case in cases]), strict=True))


@pytest.mark.parametrize("world_size", [2, 4])
def test_two_stages_reproduce_plain_pytorch(world_size: int) -> None:
    cases: list[Case] = [
        ("adamw", 1, "full", ()),
        ("adamw", 4, "selective", UNTIED),
        ("sgd", 1, None, UNTIED),
        ("sgd", 4, "full", ("model.layers=3", *CHUNKED)),
        ("adamw", 2, "full", MODERN + CHUNKED),
    ]
    by_case = found(world_size, "zero1", cases, *TWO)
    differences = {case: worst(curve, reference(case[0], case[3])) for case, curve in by_case.items()}
    assert max(differences.values()) < FP32_TOLERANCE, differences


def test_without_zero_too() -> None:
    cases: list[Case] = [("adamw", 1, None, ()), ("sgd", 4, "full", UNTIED)]
    for case, curve in found(4, "zero0", cases, *TWO).items():
        assert worst(curve, reference(case[0], case[3])) < FP32_TOLERANCE, case
    for case, curve in found(4, "zero0", cases, *TWO, "bf16.enabled=true").items():
        assert_mixed_close(curve, mixed_reference(case[0], torch.bfloat16, case[3]), "bf16")


@pytest.mark.parametrize("stage", [0, 1])
def test_with_shared_sequences(stage: int) -> None:
    cases: list[Case] = [("adamw", 1, None, ()), ("sgd", 4, "full", MODERN + CHUNKED)]
    more = (*TWO, "parallel.sequence=2")
    for case, curve in found(4, f"zero{stage}", cases, *more).items():
        assert worst(curve, reference(case[0], case[3])) < FP32_TOLERANCE, case
    for case, curve in found(4, f"zero{stage}", cases[:1], *more, "bf16.enabled=true").items():
        assert_mixed_close(curve, mixed_reference(case[0], torch.bfloat16, case[3]), "bf16")


def test_four_stages_reproduce_plain_pytorch() -> None:
    options = ("model.layers=4",)
    cases: list[Case] = [("adamw", 2, None, options), ("sgd", 4, "full", options + MODERN)]
    by_case = found(4, "zero1", cases, "parallel.pipeline=4")
    differences = {case: worst(curve, reference(case[0], case[3])) for case, curve in by_case.items()}
    assert max(differences.values()) < FP32_TOLERANCE, differences


@pytest.mark.parametrize("world_size", [2, 4])
def test_bf16_reproduces_plain_pytorch(world_size: int) -> None:
    cases: list[Case] = [("adamw", 1, None, ()), ("sgd", 2, "full", MODERN)]
    for (optimizer, *_, options), curve in found(world_size, "zero1", cases, *TWO, "bf16.enabled=true").items():
        assert_mixed_close(curve, mixed_reference(optimizer, torch.bfloat16, options), "bf16")


def test_bf16_that_adds_gradients_up_in_bf16() -> None:
    more = (*TWO, "bf16.enabled=true", "data_types.grad_accum_dtype=bf16")
    cases: list[Case] = [("adamw", 1, None, ()), ("sgd", 2, "full", ())]
    for (optimizer, *_, options), curve in found(2, "zero1", cases, *more).items():
        assert_mixed_close(curve, mixed_reference(optimizer, torch.bfloat16, options), "bf16")


def test_fp16_reproduces_plain_pytorch() -> None:
    more = (*TWO, "zero_optimization.stage=1", "fp16.initial_scale_power=10")
    cases: list[Case] = [("adamw", 1, None, ()), ("sgd", 2, "full", MODERN)]
    for (optimizer, *_, options), curve in found(2, "fp16", cases, *more).items():
        assert_mixed_close(curve, mixed_reference(optimizer, torch.float16, options), "fp16")


def documents(inputs_BT: torch.Tensor) -> torch.Tensor:
    """Token 0 begins a document."""
    return (inputs_BT == 0).cumsum(dim=1)


def apart(ranks: Any, settings: list[str]) -> Curve:
    from ds_gpt.engine.engine import Engine

    composed = tiny("zero1", ranks.world_size, settings)
    engine = Engine(composed, ranks)
    loader = tiny_loader(composed, engine.grid.data_rank, engine.grid.data_ranks)
    curve = []
    for step in range(6):
        result = engine.step(step, [(x, y, documents(x)) for x, y in loader.load(step)], lr=0.01)
        curve.append((result.loss, result.grad_norm))
    loader.close()
    engine.close()
    return curve


def test_documents_kept_apart_on_every_stage() -> None:
    composed = tiny("zero0", 1, ["gradient_clipping=0.6", "model.layers=4"])
    torch.manual_seed(composed.run.seed)
    model = GPT(composed.run.model)
    optimizer = torch.optim.SGD(parameter_groups(model, 0.1), lr=0.01)
    expected: Curve = []
    for step in range(6):
        inputs_BT, targets_BT = whole_batch(composed, step)
        loss = F.cross_entropy(model(inputs_BT, documents_BT=documents(inputs_BT)).flatten(0, 1), targets_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.6)
        optimizer.step()
        expected.append((loss.item(), norm.item()))
    settings = ["gradient_clipping=0.6", "model.layers=4", "optimizer.name=sgd", "gradient_accumulation_steps=2", "parallel.pipeline=4"]
    for curve in run_ranks(4, apart, settings):
        assert worst(curve, expected) < FP32_TOLERANCE
