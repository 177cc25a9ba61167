"""Tensor parallelism is the training of one process, in plain PyTorch: the same curve."""

from __future__ import annotations

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

# optimizer, accumulation steps, checkpointing, options
Case = tuple[str, int, str | None, tuple[str, ...]]
CASES: tuple[Case, ...] = (
    ("adamw", 4, "full", ()),
    ("sgd", 1, None, MODERN),
    ("sgd", 4, "selective", MODERN + CHUNKED),
)


def found(world_size: int, deepspeed: str, cases: tuple[Case, ...], *more: str) -> dict[Case, Curve]:
    settings = [[*overrides(*case[:3]), *case[3], *TENSOR, *more] for case in cases]
    return dict(zip(cases, curves(world_size, deepspeed, settings, [case[0] for case in cases]), strict=True))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_tensor_parallelism_reproduces_plain_pytorch(stage: int, world_size: int) -> None:
    by_case = found(world_size, f"zero{stage}", CASES)
    differences = {case: worst(curve, reference(case[0], case[3])) for case, curve in by_case.items()}
    assert max(differences.values()) < FP32_TOLERANCE, differences


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bf16_reproduces_plain_pytorch(stage: int) -> None:
    cases = (("adamw", 1, None, ()), ("sgd", 2, "full", MODERN))
    for (optimizer, *_, options), curve in found(2, f"zero{stage}", cases, "bf16.enabled=true").items():
        assert_mixed_close(curve, mixed_reference(optimizer, torch.bfloat16, options), "bf16")
