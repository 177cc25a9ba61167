"""Activation checkpointing: what replaces ``GPT.run_block`` so that a block's activations are recomputed in backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ds_gpt.config import Composed

# What DeepSpeed's own checkpointing can do and torch's cannot.
_DEEPSPEEDS_OWN = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")

_MATRIX_MULTIPLICATIONS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
_ATTENTION_DROPOUT_ARGUMENT = {  # position of dropout_p in each fused attention kernel's signature
    torch.ops.aten._scaled_dot_product_flash_attention.default: 3,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    torch.ops.aten._scaled_dot_product_efficient_attention.default: 5,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: 5,
}


def apply_checkpointing(model: nn.Module, composed: Composed) -> None:
    """Replace the model's ``run_block`` as the composed configuration says; off leaves it alone.

    ``full`` keeps only each block's input. ``selective`` also keeps what its matrix multiplications and its fused
    attention return, and recomputes the rest (norms, GELU, dropout), which is cheap but large.
    """
    if composed.checkpoint_policy is None:
        return
    section = composed.deepspeed["activation_checkpointing"]
    if any(section.get(key) for key in _DEEPSPEEDS_OWN):
        model.run_block = _deepspeeds_own(composed)
    elif composed.checkpoint_policy == "selective":
        contexts = partial(create_selective_checkpoint_contexts, _keep)
        model.run_block = partial(checkpoint, use_reentrant=False, context_fn=contexts)
    else:
        model.run_block = partial(checkpoint, use_reentrant=False)


def _keep(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Which results the selective policy keeps."""
    if op in _MATRIX_MULTIPLICATIONS:
        return CheckpointPolicy.MUST_SAVE
    if op is torch.ops.c10d.allreduce_.default:
        # Tensor parallelism adds up, in place, what a kept multiplication returned: not a second time.
        return CheckpointPolicy.MUST_SAVE
    if op in _ATTENTION_DROPOUT_ARGUMENT and _attention_dropout(op, args, kwargs) == 0.0:
        # With dropout it must run again: it advances the random state that the block's later dropouts draw from,
        # and a kept result would leave them with other masks than in the forward pass.
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _attention_dropout(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    position = _ATTENTION_DROPOUT_ARGUMENT[op]
    return args[position] if len(args) > position else kwargs.get("dropout_p", 0.0)


def _deepspeeds_own(composed: Composed) -> Any:
    import deepspeed

    number = composed.deepspeed["activation_checkpointing"].get("number_checkpoints") or composed.run.model.layers
    deepspeed.checkpointing.configure(None, deepspeed_config=composed.deepspeed, num_checkpoints=number)

    def run_block(block: nn.Module, x_BTD: Tensor, *shared: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled():  # it would keep the input all the same, in buffers that only a backward pass empties
            return block(x_BTD, *shared)
        # The stream alone is its argument: it takes no None, and would split what all blocks share among the ranks too.
        return deepspeed.checkpointing.checkpoint(lambda x_BTD: block(x_BTD, *shared), x_BTD)

    return run_block
