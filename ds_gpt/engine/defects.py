"""Defects of DeepSpeed 0.19 that would reach the user, and the way around each.

``tests/engine/test_defects.py`` shows each one in DeepSpeed alone, so a release that mends it is noticed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_CUT = "tensor_model_parallel"  # DeepSpeed's mark of a parameter of which each tensor-parallel rank has a share


def allow_fp16_on_cpu() -> None:
    """DeepSpeed refuses fp16 on a CPU, although PyTorch computes it there; only slowly, which suits tests."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        accelerator.is_fp16_supported = lambda: True


def silence_bf16_optimizer() -> None:
    """ZeRO-1 in bf16 with fp32 accumulation prints 15 lines about memory on every rank, whatever the log level."""
    import deepspeed.runtime.bf16_optimizer as bf16_optimizer

    bf16_optimizer.see_memory_usage = lambda *args, **kwargs: None


def undo_dummy_step(engine: Any) -> None:
    """ZeRO-0 in bf16 allocates its optimizer state by a real step on zero gradients.

    That step decays the master weights once and puts Adam's step count one ahead: all bias corrections are wrong.
    The model's own weights are untouched by it, so the masters are copied from them again and the state is dropped.
    """
    if type(engine.optimizer).__name__ == "FP16_UnfusedOptimizer":
        engine.optimizer.refresh_fp32_params()
        engine.basic_optimizer.state.clear()


def guard_plain_optimizer(engine: Any) -> None:
    """ZeRO-0 with fp32 weights steps the bare torch optimizer: no gradient norm, and NaN gradients reach the weights.

    The optimizer's ``step`` is replaced by one that measures the norm, clips, and skips a step whose norm is not
    finite, reporting both through the attributes that the engine reads from its own optimizers.
    """
    optimizer = engine.optimizer
    if optimizer is not engine.basic_optimizer:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    max_norm = engine.gradient_clipping() or math.inf
    take_step = optimizer.step

    def step() -> None:
        # Gradients are already averaged over the ranks, so every rank finds the same norm and decides alike.
        norm = _norm(engine, parameters)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        optimizer._global_grad_norm = norm
        optimizer.overflow = not math.isfinite(norm)
        if not optimizer.overflow:
            take_step()

    optimizer.step = step
    engine.clip_fp32_gradients = lambda: None  # clipped above


def _norm(engine: Any, parameters: list[Tensor]) -> Tensor:
    """2-norm of the whole gradient; of what ranks hold alike that share the model, one of them counts."""
    counted, copies = [], []
    for parameter in parameters:
        if parameter.grad is not None:
            (copies if _is_copy(engine, parameter) else counted).append(parameter.grad)
    norm = torch.nn.utils.get_total_norm(counted)
    if engine.mpu is None:
        return norm
    square = norm.square() + _zero_or_nan(copies, norm)
    torch.distributed.all_reduce(square, group=engine.mpu.get_model_parallel_group())
    return square.sqrt()


def _is_copy(engine: Any, parameter: Tensor) -> bool:
    """Whether another rank counts this parameter: the first tensor-parallel one, or a pipeline's first stage a tied weight."""
    if engine.mpu is None:
        return False
    return getattr(parameter, "ds_pipe_replicated", False) or engine.mpu.get_slice_parallel_rank() > 0 and not hasattr(parameter, _CUT)


def _zero_or_nan(gradients: list[Tensor], like: Tensor) -> Tensor:
    """Zero where all gradients are finite, else NaN."""
    return sum(((gradient * 0).sum(dtype=torch.float32) for gradient in gradients), torch.zeros_like(like))


def mark_cut_gradients(engine: Any) -> None:
    """ZeRO-0 in bf16 takes each gradient for one that all tensor-parallel ranks hold alike, and counts the first rank's.

    It looks for the mark of a cut parameter on the gradient, where nobody puts it.
    """
    if type(engine.optimizer).__name__ != "FP16_UnfusedOptimizer":
        return
    optimizer = engine.optimizer
    take_step = optimizer.step

    def step() -> None:
        for parameter in (parameter for group in optimizer.fp16_groups for parameter in group):
            if hasattr(parameter, _CUT) and parameter.grad is not None:
                setattr(parameter.grad, _CUT, True)
        take_step()

    optimizer.step = step


def hear_every_tensor_rank(engine: Any) -> None:
    """A parameter that tensor-parallel ranks hold alike is counted in the norm of the first rank's gradient alone.

    NaN in another's copy of it would go unheard into that rank's weights.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "check_grad_overflow"):
        optimizer.check_grad_overflow = True  # looks at every rank's gradients, as DeepSpeed does by default in bf16
    elif type(optimizer).__name__ == "BF16_Optimizer":
        find, groups = optimizer.get_grads_for_norm, [*zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)]

        def gradients(for_clipping: bool = False) -> Any:
            found = find(for_clipping)
            if not for_clipping:
                copies = [g for ps, gs in groups for p, g in zip(ps, gs, strict=True) if _is_copy(engine, p)]
                if copies:
                    found[0].append(_zero_or_nan(copies, copies[0].new_zeros(())))
            return found

        optimizer.get_grads_for_norm = gradients


def update_loss_scale_last(engine: Any) -> None:
    """fp16 doubles its loss scale before it divides the gradients by it, though they were made with the old one.

    So one step in every ``fp16.loss_scale_window`` moves half as far and clips at twice the norm, and ZeRO-3 reports
    half the norm. The update is put off until the step is done.
    """
    if not engine.fp16_enabled():
        return
    optimizer = engine.optimizer
    take_step, update_scale = optimizer.step, optimizer._update_scale

    def step() -> None:
        take_step()
        update_scale(optimizer.overflow)

    optimizer.step = step
    optimizer._update_scale = lambda overflow: None
    # At its minimum DeepSpeed ends the run by a bare Exception. Here the step is skipped, and health judges the run.
    optimizer.loss_scaler.raise_error_at_min_scale = False


def skip_reduction_of_one(engine: Any) -> None:
    """DeepSpeed adds up the gradients of one rank with nobody's, which on a CPU takes 1 to 2% of a small model's step.

    ZeRO-0 copies them into buckets and back for it, and ZeRO-1 and 2 divide by one and wait for gloo. What ZeRO-1 and 2
    add to an fp32 copy of bf16 gradients on the way stays, and a GPU's streams are left as they are.
    """
    if engine.dp_world_size > 1:
        return
    optimizer = engine.optimizer
    if not engine.zero_optimization():
        engine.enable_backward_allreduce = False
    elif engine.device.type == "cpu" and hasattr(optimizer, "average_tensor"):
        average = optimizer.average_tensor

        def average_tensor(tensor: Tensor, dtype: torch.dtype) -> None:
            groups = {group for group, _, _ in optimizer.ipg_buckets[dtype].params}
            if any(map(optimizer._use_compact_grad_partition_buffer, groups)):
                average(tensor, dtype)

        optimizer.average_tensor = average_tensor


def keep_one_bucket(engine: Any) -> None:
    """Under a pipeline ZeRO-1 makes its bucket twice: as gradients come, and again to add them up over the ranks."""
    if engine.pipeline_parallelism and hasattr(engine.optimizer, "reduce_gradients"):
        reduce = engine.optimizer.reduce_gradients
        engine.optimizer.reduce_gradients = lambda pipeline_parallel: reduce()


def hide_gathering(engine: Any) -> None:
    """ZeRO-3 gathers and frees parameters within the blocks that selective checkpointing runs twice.

    PyTorch takes these operations for the block's own and wants the same ones in both runs, but what is gathered or
    freed depends on what was before: the first step after a resumed run's evaluation ends in an error. So they are
    hidden from it.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    for name in ("fetch_sub_module", "release_sub_module"):
        setattr(coordinator, name, _disable_current_modes()(getattr(coordinator, name)))


def restore_linear() -> None:
    """ZeRO-3 replaces ``torch.nn.functional.linear`` and leaves it so, for the engines of other stages that follow."""
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Replaced

    torch.nn.functional.linear = getattr(Replaced, "linear_bk", torch.nn.functional.linear)
