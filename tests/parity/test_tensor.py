"""Tensor parallelism is the training of one process, in plain PyTorch: the same curve."""

from __future__ import annotations

import shutil

import pytest
import torch
from curves import (
    CHUNKED,
    FP32_TOLERANCE,
    MODERN,
    Curve,
    assert_mixed_close,
    curves,
    mixed_reference,
    overrides,
    reference,
    worst,
)

TENSOR = ("parallel.tensor=2",)
WITH_PIPELINE = (*TENSOR, "parallel.pipeline=2")

# optimizer, accumulation steps, checkpointing, options
Case = tuple[str, int, str | None, tuple[str, ...]]
CASES: dict[int, tuple[Case, ...]] = {  # by ranks
    2: (("adamw", 1, None, ()), ("sgd", 4, "selective", MODERN + CHUNKED)),
    4: (("sgd", 1, None, MODERN), ("adamw", 4, "full", ())),
}


def found(world_size: int, deepspeed: str, cases: tuple[Case, ...], *more: str) -> dict[Case, Curve]:
    settings = [[*overrides(*case[:3]), *case[3], *more] for case in cases]
    return dict(zip(cases, curves(world_size, deepspeed, settings, [case[0] for case in cases]), strict=True))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_tensor_parallelism_reproduces_plain_pytorch(stage: int, world_size: int) -> None:
    by_case = found(world_size, f"zero{stage}", CASES[world_size], *TENSOR)
    differences = {case: worst(curve, reference(case[0], case[3])) for case, curve in by_case.items()}
    assert max(differences.values()) < FP32_TOLERANCE, differences


def test_four_ranks_may_share_each_matrix() -> None:
    cases: tuple[Case, ...] = (("adamw", 2, "selective", MODERN + ("model.kv_heads=4",)),)
    ((case, curve),) = found(4, "zero1", cases, "parallel.tensor=4").items()
    assert worst(curve, reference(case[0], case[3])) < FP32_TOLERANCE


def test_with_offload() -> None:
    ((case, curve),) = found(4, "zero2_offload", CASES[4][1:], *TENSOR).items()
    assert worst(curve, reference(case[0])) < FP32_TOLERANCE


@pytest.mark.parametrize(("stage", "world_size"), [(0, 4), (1, 4), (1, 8)])
def test_with_a_pipeline(stage: int, world_size: int) -> None:
    cases: tuple[Case, ...] = (("adamw", 4, "full", ()), ("sgd", 1, None, MODERN), ("sgd", 4, "selective", MODERN + CHUNKED))
    by_case = found(world_size, f"zero{stage}", cases if world_size == 4 else (("sgd", 2, "full", ()),), *WITH_PIPELINE)
    differences = {case: worst(curve, reference(case[0], case[3])) for case, curve in by_case.items()}
    assert max(differences.values()) < FP32_TOLERANCE, differences


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled() -> None:
    cases: tuple[Case, ...] = (("sgd", 2, None, ("model.layers=1", "model.qk_norm=true")),)
    ((case, curve),) = found(2, "zero2", cases, *TENSOR, "compile.enabled=true").items()
    assert worst(curve, reference(case[0], case[3])) < FP32_TOLERANCE


MIXED: tuple[Case, ...] = (("adamw", 1, None, ()), ("sgd", 2, "full", MODERN))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bf16_reproduces_plain_pytorch(stage: int) -> None:
    for (optimizer, *_, options), curve in found(2, f"zero{stage}", MIXED, *TENSOR, "bf16.enabled=true").items():
        assert_mixed_close(curve, mixed_reference(optimizer, torch.bfloat16, options), "bf16")


def test_fp16_reproduces_plain_pytorch() -> None:
    more = ("zero_optimization.stage=2", "fp16.initial_scale_power=10")
    for (optimizer, *_, options), curve in found(2, "fp16", MIXED, *TENSOR, *more).items():
        assert_mixed_close(curve, mixed_reference(optimizer, torch.float16, options), "fp16")


@pytest.mark.parametrize("stage", [0, 1])
def test_bf16_with_a_pipeline(stage: int) -> None:
    for (optimizer, *_, options), curve in found(4, f"zero{stage}", MIXED, *WITH_PIPELINE, "bf16.enabled=true").items():
        assert_mixed_close(curve, mixed_reference(optimizer, torch.bfloat16, options), "bf16")
