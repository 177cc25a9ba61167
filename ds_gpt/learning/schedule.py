"""The learning rate as a pure function of the step. Imports no torch.

`step` is the number of optimizer steps completed: 0 for the first update. Warm-up therefore counts `step + 1`,
so that the first update is not lost to a rate of zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from ds_gpt.config import RunConfig


def cosine(step: int, *, lr: float, min_lr: float, warmup_steps: int, decay_steps: int) -> float:
    """Linear warm-up to `lr`, half a cosine down to `min_lr` at step `decay_steps`, and `min_lr` from there on.

    Loshchilov and Hutter 2017, without restarts. Where `decay_steps` <= `warmup_steps`, `min_lr` follows warm-up.
    """
    if step < warmup_steps:
        return constant(step, lr=lr, warmup_steps=warmup_steps)
    if step >= decay_steps:
        return min_lr
    progress = (step - warmup_steps) / (decay_steps - warmup_steps)
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def noam(step: int, *, width: int, warmup_steps: int, factor: float = 1.0) -> float:
    """factor x width^-0.5 x min(n^-0.5, n x warmup_steps^-1.5), n = step + 1: Vaswani et al. 2017, equation 3.

    The peak, factor / sqrt(width x warmup_steps), is at step `warmup_steps` - 1. Without warm-up only decay is left.
    """
    update = step + 1
    decay = update**-0.5
    warmup = update * warmup_steps**-1.5 if warmup_steps > 0 else math.inf
    return factor * width**-0.5 * min(decay, warmup)


def constant(step: int, *, lr: float, warmup_steps: int = 0) -> float:
    """Linear warm-up to `lr`, then `lr`."""
    return lr * (step + 1) / warmup_steps if step < warmup_steps else lr


def scaled_lr(lr: float, rule: str, world_size: int) -> float:
    """`lr` for a global batch spread over `world_size` ranks: as it is (`none`), or times its root (`sqrt_world_size`).

    The square-root rule keeps the variance of an update as the batch grows (Krizhevsky 2014, section 5).
    """
    if rule == "none":
        return lr
    if rule == "sqrt_world_size":
        return lr * math.sqrt(world_size)
    raise ValueError(f"unknown learning-rate scaling {rule!r}; known: none, sqrt_world_size")


def schedule(run: RunConfig, world_size: int) -> Callable[[int], float]:
    """The run's learning rate as a function of the step.

    `optimizer.lr` is the peak, or the factor under `noam`, and is scaled by `optimizer.lr_scaling`;
    `schedule.min_lr` never is. `world_size` is the number of data-parallel ranks.
    """
    lr = scaled_lr(run.optimizer.lr, run.optimizer.lr_scaling, world_size)
    name, warmup_steps = run.schedule.name, run.schedule.warmup_steps
    if name == "cosine":
        min_lr = run.schedule.min_lr
        return partial(cosine, lr=lr, min_lr=min_lr, warmup_steps=warmup_steps, decay_steps=run.decay_steps)
    if name == "noam":
        return partial(noam, width=run.model.width, warmup_steps=warmup_steps, factor=lr)
    assert name == "constant", f"the config layer refuses schedule.name {name!r}"
    return partial(constant, lr=lr, warmup_steps=warmup_steps)
