"""One reference curve, many ways: whatever the ZeRO stage, ranks, accumulation and checkpointing, the same training.

The reference is a single process in plain PyTorch, written here, with the whole global batch in one forward pass.
"""

from __future__ import annotations

import functools
import itertools
import math
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked_ranks import run_ranks
from tiny import tiny, train_curve, whole_batch

from ds_gpt.model.gpt import GPT

STEPS = 20
LR = {"adamw": 0.003, "sgd": 0.5}
# Clips about half of the steps of each curve; the tests check that it does.
CLIP = {"adamw": 0.75, "sgd": 0.55}
# fp32 sums taken in another order, by other ranks, micro-steps and flat buffers, over 20 steps.
FP32_TOLERANCE = 1e-5

# Options of the model and of the loss. Every micro-batch here has more tokens than a chunk, and not a multiple of it.
CHUNKED = ("loss.chunk_tokens=15",)
MODERN = (
    "model.positions=rotary", "model.norm=rmsnorm", "model.ffn=swiglu", "model.kv_heads=2", "model.bias=false", "model.qk_norm=true",
    "model.tied_head=false", "model.sliding_window=7",
)  # fmt: skip

Curve = list[tuple[float, float]]


def overrides(optimizer: str, accumulation: int, checkpointing: str | None) -> list[str]:
    settings = [f"optimizer.name={optimizer}", f"gradient_clipping={CLIP[optimizer]}", f"gradient_accumulation_steps={accumulation}"]
    settings.append(f"activation_checkpointing={'null' if checkpointing is None else '{policy: ' + checkpointing + '}'}")
    return settings


@functools.cache
def reference(optimizer: str, options: tuple[str, ...] = ()) -> Curve:
    """The curve in plain PyTorch, fp32."""
    composed = tiny("zero0", 1, [*overrides(optimizer, 1, None), *options])
    run = composed.run
    torch.manual_seed(run.seed)
    model = GPT(run.model)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    if optimizer == "adamw":
        steps_by = torch.optim.AdamW(groups, lr=LR["adamw"], betas=(0.9, 0.95), eps=1e-8)
    else:
        steps_by = torch.optim.SGD(groups, lr=LR["sgd"])
    curve = []
    for step in range(STEPS):
        inputs_BT, targets_BT = whole_batch(composed, step)
        loss = F.cross_entropy(model(inputs_BT).flatten(0, 1), targets_BT.flatten())
        steps_by.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP[optimizer])
        steps_by.step()
        curve.append((loss.item(), norm.item()))
    return curve


def worst(curve: Curve, expected: Curve) -> float:
    """Largest relative difference of two curves, loss and gradient norm alike."""
    return max(abs(a - b) / abs(b) for pair, wanted in zip(curve, expected, strict=True) for a, b in zip(pair, wanted, strict=True))


def several_curves(ranks: Any, cases: list[Any], lr: list[float]) -> list[Curve]:
    return [train_curve(ranks, composed, STEPS, rate) for composed, rate in zip(cases, lr, strict=True)]


def curves(world_size: int, deepspeed: str, settings: list[list[str]], optimizers: list[str]) -> list[Curve]:
    """Train each case on real ranks; all ranks must report the same curve, of which rank 0's is returned."""
    cases = [tiny(deepspeed, world_size, case) for case in settings]
    by_rank = run_ranks(world_size, several_curves, cases, [LR[o] for o in optimizers], deadline_s=240)
    for others in by_rank[1:]:
        assert others == by_rank[0], "ranks report different losses or norms"
    return by_rank[0]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_clipping_bites_on_some_steps_and_not_on_others(optimizer: str) -> None:
    clipped = [norm > CLIP[optimizer] for _, norm in reference(optimizer)]
    assert 4 <= sum(clipped) <= STEPS - 4
    assert reference(optimizer)[-1][0] < reference(optimizer)[0][0] - 0.02, "the reference should learn"


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_reproduces_plain_pytorch(stage: int, world_size: int) -> None:
    cases = list(itertools.product(["adamw", "sgd"], [1, 4], [None, "full"]))
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


@functools.cache
def mixed_reference(optimizer: str, dtype: torch.dtype, options: tuple[str, ...] = ()) -> Curve:
    """Mixed precision in plain PyTorch: master weights, gradients' sum and optimizer in fp32, the model in `dtype`."""
    composed = tiny("zero0", 1, [*overrides(optimizer, 1, None), *options])
    run = composed.run
    torch.manual_seed(run.seed)
    model = GPT(run.model).to(dtype)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    groups: list[dict[str, Any]] = [
        {"params": [m for m in masters if m.ndim >= 2], "weight_decay": 0.1},
        {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0},
    ]
    steps_by = torch.optim.AdamW(groups, lr=LR["adamw"], betas=(0.9, 0.95), eps=1e-8) if optimizer == "adamw" else torch.optim.SGD(groups, lr=LR["sgd"])
    scale = 2.0**10 if dtype == torch.float16 else 1.0
    curve = []
    for step in range(STEPS):
        inputs_BT, targets_BT = whole_batch(composed, step)
        loss = F.cross_entropy(model(inputs_BT).float().flatten(0, 1), targets_BT.flatten())
        model.zero_grad()
        (loss * scale).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float() / scale
        norm = torch.nn.utils.clip_grad_norm_(masters, CLIP[optimizer])
        steps_by.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        curve.append((loss.item(), norm.item()))
    return curve


# (loss, gradient norm). bf16 keeps 8 significant bits and fp16 11: one rounding is 2^-9 = 2e-3 and 2^-12 = 2.4e-4.
# Losses average many of them, norms fewer. Measured here: (1.9e-4, 5.5e-3) and (5.0e-5, 1.0e-3). A missing 1/ranks
# or 1/accumulation, or a wrong first Adam step, is far outside.
MIXED_TOLERANCE = {"bf16": (5e-4, 1e-2), "fp16": (1.5e-4, 3e-3)}


def assert_mixed_close(curve: Curve, expected: Curve, precision: str) -> None:
    loss_tolerance, norm_tolerance = MIXED_TOLERANCE[precision]
    for step, ((loss, norm), (wanted_loss, wanted_norm)) in enumerate(zip(curve, expected, strict=True)):
        assert math.isclose(loss, wanted_loss, rel_tol=loss_tolerance), (step, loss, wanted_loss)
        assert math.isclose(norm, wanted_norm, rel_tol=norm_tolerance), (step, norm, wanted_norm)


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
