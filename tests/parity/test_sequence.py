"""Sequence parallelism: the same training as one process in plain PyTorch, whatever the ZeRO stage."""

from __future__ import annotations

import pytest
import torch
from curves import CHUNKED, FP32_TOLERANCE, MODERN, assert_mixed_close, curves, mixed_reference, overrides, reference, worst

TWO = ("parallel.sequence=2",)

# (optimizer, accumulation steps, activation checkpointing, options of the model and of the loss)
Case = tuple[str, int, str | None, tuple[str, ...]]


def differences(world_size: int, deepspeed: str, cases: list[Case], degree: tuple[str, ...] = TWO) -> dict[Case, float]:
    """How far each case is from plain PyTorch."""
    found = curves(world_size, deepspeed, [[*overrides(*case[:3]), *case[3], *degree] for case in cases], [case[0] for case in cases])
    return {case: worst(curve, reference(case[0], case[3])) for case, curve in zip(cases, found, strict=True)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_that_share_sequences_reproduce_plain_pytorch(stage: int) -> None:
    cases: list[Case] = [("adamw", 1, "full", ()), ("adamw", 4, "selective", ()), ("sgd", 4, "full", MODERN + CHUNKED)]
    found = differences(2, f"zero{stage}", cases)
    assert max(found.values()) < FP32_TOLERANCE, found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_with_data_parallel_ranks_too(stage: int) -> None:
    cases: list[Case] = [("adamw", 2, None, MODERN), ("sgd", 1, "full", CHUNKED)]
    found = differences(4, f"zero{stage}", cases)
    assert max(found.values()) < FP32_TOLERANCE, found


def test_four_ranks_with_a_head_each() -> None:
    found = differences(4, "zero1", [("sgd", 4, None, ("model.positions=rotary",))], ("parallel.sequence=4",))
    assert max(found.values()) < FP32_TOLERANCE, found


@pytest.mark.parametrize(("precision", "stage"), [("bf16", 0), ("bf16", 1), ("bf16", 3), ("fp16", 2)])
def test_mixed_precision_reproduces_plain_pytorch(precision: str, stage: int) -> None:
    settings = [*overrides("sgd", 2, "full"), *MODERN, *TWO, f"zero_optimization.stage={stage}"]
    settings += ["bf16.enabled=true"] if precision == "bf16" else ["fp16.initial_scale_power=10"]
    (curve,) = curves(2, "fp16" if precision == "fp16" else "zero1", [settings], ["sgd"])
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    assert_mixed_close(curve, mixed_reference("sgd", dtype, MODERN), precision)


def test_offload_reproduces_plain_pytorch() -> None:
    found = differences(2, "zero2_offload", [("adamw", 4, None, ())])
    assert max(found.values()) < FP32_TOLERANCE, found


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_with_tensor_parallel_ranks_too(stage: int) -> None:
    cases: list[Case] = [("sgd", 2, "selective", ("model.positions=rotary", *CHUNKED))]
    found = differences(4, f"zero{stage}", cases, (*TWO, "parallel.tensor=2"))
    assert max(found.values()) < FP32_TOLERANCE, found


def test_with_tensor_and_data_parallel_ranks_too() -> None:
    found = differences(8, "zero1", [("sgd", 2, None, MODERN + ("model.kv_heads=4",))], (*TWO, "parallel.tensor=2"))
    assert max(found.values()) < FP32_TOLERANCE, found


def test_adapters_train_as_on_one_rank() -> None:
    settings = [*overrides("adamw", 2, "full"), "lora.rank=4", "lora.alpha=8"]
    (alone,), (shared,) = curves(1, "zero1", [settings], ["adamw"]), curves(2, "zero3", [[*settings, *TWO]], ["adamw"])
    assert worst(shared, alone) < FP32_TOLERANCE
