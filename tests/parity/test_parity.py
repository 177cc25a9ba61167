"""One reference curve, many ways: whatever the ZeRO stage, ranks, accumulation and checkpointing, the same training.

The reference is a single process in plain PyTorch (harness/curves.py), the whole global batch in one forward pass.
"""

from __future__ import annotations

import itertools
import shutil

import pytest
import torch
from curves import (
    CHUNKED,
    CLIP,
    FP32_TOLERANCE,
    MODERN,
    STEPS,
    assert_mixed_close,
    curves,
    mixed_reference,
    overrides,
    reference,
    worst,
)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_clipping_bites_on_some_steps_and_not_on_others(optimizer: str) -> None:
    clipped = [norm > CLIP[optimizer] for _, norm in reference(optimizer)]
    assert 4 <= sum(clipped) <= STEPS - 4
    assert reference(optimizer)[-1][0] < reference(optimizer)[0][0] - 0.02, "the reference should learn"


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_reproduces_plain_pytorch(stage: int, world_size: int) -> None:
    """Half of the eight cases, in which every pair of settings occurs; at the next world size and the next stage the other half."""
    places = [case for case in itertools.product(range(2), repeat=3) if (sum(case) + stage + world_size // 2) % 2 == 0]
    cases = [(("adamw", "sgd")[optimizer], (1, 4)[steps], (None, "full")[policy]) for optimizer, steps, policy in places]
    found = curves(world_size, f"zero{stage}", [overrides(*case) for case in cases], [case[0] for case in cases])
    differences = {case: worst(curve, reference(case[0])) for case, curve in zip(cases, found, strict=True)}
    assert max(differences.values()) < FP32_TOLERANCE, differences


@pytest.mark.parametrize("deepspeed", ["zero2_offload", "zero3_offload"])
def test_offload_reproduces_plain_pytorch(deepspeed: str) -> None:
    cases = [("adamw", 1, "full"), ("adamw", 4, None)]
    found = curves(2, deepspeed, [overrides(*case) for case in cases], ["adamw"] * 2)
    assert max(worst(curve, reference("adamw")) for curve in found) < FP32_TOLERANCE


def test_selective_checkpointing_reproduces_plain_pytorch() -> None:
    for stage in (1, 3):
        (curve,) = curves(2, f"zero{stage}", [overrides("adamw", 4, "selective")], ["adamw"])
        assert worst(curve, reference("adamw")) < FP32_TOLERANCE


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_chunked_loss_and_the_models_options_reproduce_plain_pytorch(stage: int) -> None:
    cases = [("adamw", 4, "full", CHUNKED), ("sgd", 1, None, MODERN), ("sgd", 4, "selective", MODERN + CHUNKED)]
    found = curves(2, f"zero{stage}", [[*overrides(*case[:3]), *case[3]] for case in cases], [case[0] for case in cases])
    differences = {case: worst(curve, reference(case[0], case[3])) for case, curve in zip(cases, found, strict=True)}
    assert max(differences.values()) < FP32_TOLERANCE, differences


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a C++ compiler on a CPU")
def test_the_compiled_model_reproduces_plain_pytorch() -> None:
    """One rank and one layer, because compiling is slow on a CPU; the collectives are outside of what is compiled."""
    options = ("model.layers=1", "model.positions=rotary")
    (curve,) = curves(1, "zero2", [[*overrides("sgd", 2, None), *options, "compile.enabled=true"]], ["sgd"])
    assert worst(curve, reference("sgd", options)) < FP32_TOLERANCE


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_reproduces_plain_pytorch(stage: int) -> None:
    cases = [("adamw", 1, None), ("adamw", 2, "full"), ("sgd", 2, None)]
    found = curves(2, f"zero{stage}", [[*overrides(*case), "bf16.enabled=true"] for case in cases], [case[0] for case in cases])
    for case, curve in zip(cases, found, strict=True):
        assert_mixed_close(curve, mixed_reference(case[0], torch.bfloat16), "bf16")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16_reproduces_plain_pytorch(stage: int) -> None:
    cases = [("adamw", 1, None), ("sgd", 2, "full")]
    found = curves(2, "fp16", [[*overrides(*case), f"zero_optimization.stage={stage}", "fp16.initial_scale_power=10"] for case in cases], [case[0] for case in cases])
    for case, curve in zip(cases, found, strict=True):
        assert_mixed_close(curve, mixed_reference(case[0], torch.float16), "fp16")


@pytest.mark.parametrize(("precision", "stage"), [("bf16", 1), ("bf16", 3), ("fp16", 2), ("fp16", 3)])
def test_chunked_loss_and_the_models_options_in_mixed_precision(precision: str, stage: int) -> None:
    settings = [*overrides("sgd", 2, "full"), f"zero_optimization.stage={stage}"]
    settings += ["bf16.enabled=true"] if precision == "bf16" else ["fp16.initial_scale_power=10"]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    cases = [CHUNKED, MODERN + CHUNKED]
    found = curves(2, "fp16" if precision == "fp16" else "zero1", [[*settings, *options] for options in cases], ["sgd"] * 2)
    for options, curve in zip(cases, found, strict=True):
        assert_mixed_close(curve, mixed_reference("sgd", dtype, options), precision)
