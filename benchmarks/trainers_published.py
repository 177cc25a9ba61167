"""The software that others published their runs with, as options of the planner's formulas."""

from __future__ import annotations

from dataclasses import replace

from ds_gpt.planner.trainers import PLAIN_DDP, States, Trainer

_MEGATRON = Trainer("plain", "softmax", states=States(2, 4, 2, 0, 12, sent=4, lasting=True), vocabulary_parallel=True, fused=True)
_LLM_FOUNDRY = Trainer("flash", "fused", states=States(4, 4, 2, 0, 8, sent=4, lasting=True))

TRAINERS: dict[str, Trainer] = {
    # PyTorch's FullyShardedDataParallel as LLM-Foundry and its predecessor run it: fp32 shards, blocks gathered in bf16, gradients
    # reduced in fp32 or, with mixed_precision PURE, in bf16; fused_crossentropy, which is FlashAttention's.
    "llm-foundry": _LLM_FOUNDRY,
    "llm-foundry pure": replace(_LLM_FOUNDRY, states=States(4, 4, 2, 0, 8, sent=2, lasting=True)),
    # Megatron-LM: gradients are summed in fp32 where they stay; fused softmax, GELU and dropout.
    "megatron": _MEGATRON,
    # Its fp32 model as FlagPerf has it, in PyTorch's DistributedDataParallel where there is more than one rank.
    "megatron fp32": replace(_MEGATRON, states=States(4, 4, 0, 4, 8, sent=4, lasting=False)),
    # Megatron-LM of spring 2021 without its options for gradients: they are fp16, sent as such, and the optimizer's fp32 copies of them stay
    # until the next step's (zero_grad of FP16OptimizerWithFP16Params leaves them).
    "megatron 2021": replace(_MEGATRON, states=States(2, 2, 0, 0, 16, sent=2, lasting=False)),
    "megatron flash": replace(_MEGATRON, attention="flash"),
    # TorchTitan: FSDP2 with bf16 parameters and fp32 reduction, PyTorch's own cross-entropy of fp32 logits.
    "torchtitan": replace(_LLM_FOUNDRY, loss="log_probs"),
    # Megatron's model on DeepSpeed's optimizers.
    "megatron-deepspeed": replace(_MEGATRON, states=None),
    # DeepSpeedExamples' Megatron-LM of 2020 on DeepSpeed 0.3: no fused kernels yet, and a cross-entropy that clones the fp32 logits.
    "deepspeed 2020": replace(_MEGATRON, loss="log_probs", states=None, fused=False),
    # OneFlow's static graph: fp32 weights and their casts, fp16 gradients, Megatron's fused kernels. For its speed alone.
    "oneflow": replace(_MEGATRON, states=States(6, 2, 0, 0, 8, sent=2, lasting=False)),
    # PaddleNLP's hybrid parallelism at level O2: fp16 weights and gradients, fp32 masters and moments. Nothing says that it ran fused kernels
    # but FlashAttention.
    "paddle": Trainer("flash", "softmax", states=States(2, 2, 0, 0, 12, sent=2, lasting=True), vocabulary_parallel=True),
    # FlashAttention's training scripts: Lightning with autocast, fused kernels throughout.
    "flash-attention": Trainer("flash", "fused", autocast=True, states=States(4, 4, 0, 4, 8, sent=4, lasting=True), fused=True),
    "plain ddp": PLAIN_DDP,
}
# Those that reduce gradients when the backward pass is over: Megatron-LM's own DistributedDataParallel, whose overlap came later and is an
# option; DeepSpeed without overlap_comm.
REDUCES_AFTERWARDS = frozenset({"megatron", "megatron 2021", "megatron flash", "megatron-deepspeed", "deepspeed 2020"})
