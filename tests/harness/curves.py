"""The curve of plain PyTorch, in one process with the whole global batch in one forward pass, and those of real ranks."""

from __future__ import annotations

import functools
import math
from typing import Any

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
