"""Defects of DeepSpeed's tensor parallelism that ds_gpt goes around: that it alone has each, and that ours mends it.

Where DeepSpeed mends one, a test fails and names what can be removed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ds_gpt.config import ParallelConfig

LR = 0.01
BF16 = {"bf16": {"enabled": True}}


class OneOfEach(nn.Module):
    """y = W (g x), ones at first; g is whole on every rank, of W each has a row."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        from deepspeed.module_inject.layers import LinearLayer, set_autotp_mode

        set_autotp_mode(training=True)
        self.gain = nn.Parameter(torch.ones(2))
        whole = nn.Linear(2, 2, bias=False)
        nn.init.ones_(whole.weight)
        self.cut = LinearLayer(whole, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cut(self.gain * x).sum()


def pushed(ranks: Any, stage: int, mend: Callable[[Any], None] | None, poisoned: bool, config: dict[str, Any]) -> tuple[float, bool, bool]:
    """One step on x = (1, 1): the norm, whether it was applied, and whether the weights are finite. NaN on request in the
    last rank's gradient of g."""
    import deepspeed

    from ds_gpt.engine.grid import Grid
    from ds_gpt.engine.tensor_parallel import forget_groups, model_parallel_unit

    unit = model_parallel_unit(Grid(ParallelConfig(tensor=2), 1, ranks.rank))
    model = OneOfEach(unit.get_slice_parallel_group())
    if poisoned and ranks.rank == 1:
        model.gain.register_hook(lambda gradient: gradient * math.nan)
    base = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
    }
    engine = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=base | config, mpu=unit, dist_init_required=False
    )[0]
    if mend:
        mend(engine)
    engine.backward(engine(torch.ones(1, 2, dtype=model.gain.dtype)))
    engine.step()
    norm, applied = engine.get_global_grad_norm(), engine.was_step_applied()
    finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    engine.destroy()
    forget_groups()
    return math.nan if norm is None else float(norm), applied, finite


WHOLE_NORM = math.sqrt(2 * 2**2 + 2 * 2)  # dy/dg is 2, twice; dy/dW is 1, four times


def test_bf16_without_zero_leaves_out_the_other_ranks_rows() -> None:
    from ds_gpt.engine.defects import mark_cut_gradients

    for norm, *_ in run_ranks(2, pushed, 0, None, False, BF16):
        assert norm == pytest.approx(math.sqrt(2 * 2**2 + 2)), "mended upstream: remove mark_cut_gradients (defects.py)"
    for norm, *_ in run_ranks(2, pushed, 0, mark_cut_gradients, False, BF16):
        assert norm == pytest.approx(WHOLE_NORM)


@pytest.mark.parametrize("config", [{}, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}], ids=["fp32", "bf16"])
def test_nan_in_a_copy_is_not_heard(config: dict[str, Any]) -> None:
    from ds_gpt.engine.defects import hear_every_tensor_rank

    (_, _, finite), (_, applied, finite_at_nan) = run_ranks(2, pushed, 1, None, True, config)
    assert finite and applied and not finite_at_nan, "mended upstream: remove hear_every_tensor_rank (defects.py)"
    assert [found[1:] for found in run_ranks(2, pushed, 1, hear_every_tensor_rank, True, config)] == [(False, True)] * 2
    assert [found for found in run_ranks(2, pushed, 1, hear_every_tensor_rank, False, config)] == [(pytest.approx(WHOLE_NORM), True, True)] * 2


def recomputed(ranks: Any, ours: bool) -> list[float]:
    """Gradient of the square of W x, of which each rank has a column, where results of multiplications are kept."""
    from deepspeed.module_inject.layers import LinearAllreduce, set_autotp_mode

    from ds_gpt.engine.activation_checkpointing import _keep

    def keep(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    set_autotp_mode(training=True)
    whole = nn.Linear(2, 2, bias=False)
    nn.init.ones_(whole.weight)
    layer = LinearAllreduce(whole, torch.distributed.group.WORLD)
    contexts = partial(create_selective_checkpoint_contexts, _keep if ours else keep)
    checkpoint(lambda x: layer(x).square(), torch.ones(1, 1), use_reentrant=False, context_fn=contexts).sum().backward()
    return layer.weight.grad.flatten().tolist()


def test_a_kept_sum_is_added_up_again() -> None:
    for gradient in run_ranks(2, recomputed, False):
        assert gradient == [8.0, 8.0], "mended upstream: nothing about all-reduces in activation_checkpointing.py is needed"
    for gradient in run_ranks(2, recomputed, True):
        assert gradient == [4.0, 4.0]  # 2 (W x) x, with W x = 2
