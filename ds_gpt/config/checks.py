"""What cannot work, found before a process starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ds_gpt.config.errors import Problem
from ds_gpt.config.files import ConfigFile
from ds_gpt.config.hardware import Hardware
from ds_gpt.config.parse import shape_problems
from ds_gpt.config.refusals import refusal_problems
from ds_gpt.config.run import DataConfig, OptimizerConfig, ScheduleConfig


def run_problems(sections: Mapping[str, Any]) -> list[Problem]:
    """Impossible combinations inside the run config, as far as the sections that are given say."""
    model, data, optimizer, schedule = (sections.get(name) for name in ("model", "data", "optimizer", "schedule"))
    return [
        *(shape_problems(model) if model else []),
        *(_schedule_problems(schedule, optimizer) if schedule else []),
        *(_data_problems(data) if data else []),
    ]


def _schedule_problems(schedule: ScheduleConfig, optimizer: OptimizerConfig | None) -> list[Problem]:
    problems = []
    if schedule.name == "noam" and schedule.warmup_steps == 0:
        problems.append(
            Problem("schedule.warmup_steps = 0 under the noam schedule", "Noam divides by it", "set schedule.warmup_steps: 4000 (the paper's)")
        )
    if schedule.name == "cosine" and optimizer and schedule.min_lr > optimizer.lr:
        problems.append(
            Problem(
                f"schedule.min_lr = {schedule.min_lr} is above optimizer.lr = {optimizer.lr}",
                "the learning rate would rise instead of decay",
                f"set schedule.min_lr to {optimizer.lr / 10:g}",
            )
        )
    return problems


def _data_problems(data: DataConfig) -> list[Problem]:
    synthetic = data.synthetic
    if all(part.corpus != "synthetic" for part in data.parts) or synthetic.branching <= synthetic.vocab_size:
        return []
    return [
        Problem(
            f"data.synthetic.branching = {synthetic.branching} is above data.synthetic.vocab_size = {synthetic.vocab_size}",
            "a token cannot have more successors than there are tokens",
            f"set data.synthetic.branching to {synthetic.vocab_size} or less",
        )
    ]


def deepspeed_problems(deepspeed: ConfigFile, hardware: Hardware) -> list[Problem]:
    """Impossible combinations inside the DeepSpeed config, on this hardware."""
    stage = deepspeed.get("zero_optimization.stage")
    stage = 0 if stage is None else stage
    if not isinstance(stage, int) or isinstance(stage, bool) or not 0 <= stage <= 3:
        return [
            Problem(f"zero_optimization.stage = {stage!r} ({deepspeed.where('zero_optimization.stage')}) should be 0, 1, 2 or 3", fix="correct it")
        ]
    return [
        *_precision_problems(deepspeed, stage),
        *_offload_problems(deepspeed, stage),
        *_checkpointing_problems(deepspeed, hardware),
        *_compile_problems(deepspeed, hardware),
        *_stepping_problems(deepspeed),
        *refusal_problems(deepspeed, stage, hardware),
    ]


def _enabled(deepspeed: ConfigFile, section: str) -> Any:
    return deepspeed.get(f"{section}.enabled")


def _precision_problems(deepspeed: ConfigFile, stage: int) -> list[Problem]:
    problems = []
    for section, allowed in (("bf16", (True, False, "auto")), ("fp16", (True, False)), ("torch_autocast", (True, False))):
        value = _enabled(deepspeed, section)
        if value is not None and not any(value is option or value == option == "auto" for option in allowed):
            choices = ", ".join('"auto"' if option == "auto" else str(option).lower() for option in allowed)
            problems.append(Problem(f"{section}.enabled = {value!r} ({deepspeed.where(section + '.enabled')}) should be {choices}", fix="correct it"))
    on = [section for section in ("bf16", "fp16", "torch_autocast") if _enabled(deepspeed, section) is True]
    if len(on) > 1:
        problems.append(Problem(f"{' and '.join(on)} are both enabled", "a model computes in one precision", "enable one of them"))
    if _enabled(deepspeed, "fp16") is True and stage == 0:
        problems.append(
            Problem(
                "fp16 with ZeRO stage 0",
                "DeepSpeed divides these gradients by a loss scale that it never multiplied the loss by: they all but vanish",
                "set zero_optimization.stage: 1 (same mathematics)",
            )
        )
    autocast_dtype = deepspeed.get("torch_autocast.dtype")
    if _enabled(deepspeed, "torch_autocast") is True and autocast_dtype in ("fp16", "float16", "half"):
        problems.append(
            Problem(
                f"torch_autocast.dtype = {autocast_dtype!r} ({deepspeed.where('torch_autocast.dtype')})",
                "DeepSpeed clips these gradients before it unscales them, so they all but vanish, and an overflow never lowers the scale",
                'set torch_autocast.dtype: bfloat16, or use "fp16": {"enabled": true}',
            )
        )
    if _enabled(deepspeed, "bf16") is True and stage == 0 and deepspeed.get("data_types.grad_accum_dtype") == "fp32":
        problems.append(
            Problem(
                f"data_types.grad_accum_dtype = 'fp32' ({deepspeed.where('data_types.grad_accum_dtype')}) with bf16 and ZeRO stage 0",
                "DeepSpeed does not accumulate bf16 gradients in fp32 without ZeRO",
                'use zero_optimization.stage: 1 (same mathematics), or grad_accum_dtype: "auto"',
            )
        )
    return problems


def _device(deepspeed: ConfigFile, section: str) -> Any:
    offload = deepspeed.get(f"zero_optimization.{section}")
    device = offload.get("device") if isinstance(offload, Mapping) else None
    return "none" if device is None else device


def _offload_problems(deepspeed: ConfigFile, stage: int) -> list[Problem]:
    problems = []
    for section, needs in (("offload_optimizer", 1), ("offload_param", 3)):
        device = _device(deepspeed, section)
        if device not in ("none", "cpu", "nvme"):
            problems.append(Problem(f"zero_optimization.{section}.device = {device!r} should be none, cpu or nvme", fix="correct it"))
        elif device != "none" and stage < needs:
            problems.append(
                Problem(
                    f"zero_optimization.{section}.device = '{device}' with ZeRO stage {stage}",
                    f"DeepSpeed offloads only what ZeRO stage {needs} or higher has partitioned",
                    f"set zero_optimization.stage: {max(needs, 2)}, or remove {section}",
                )
            )
    return problems


def _checkpointing_problems(deepspeed: ConfigFile, hardware: Hardware) -> list[Problem]:
    section = deepspeed.get("activation_checkpointing")
    if not isinstance(section, Mapping):
        return []
    problems = []
    policy = "full" if section.get("policy") is None else section["policy"]
    if policy not in ("full", "selective"):
        problems.append(
            Problem(
                f"activation_checkpointing.policy = {policy!r} should be full or selective",
                "full keeps each block's input; selective also keeps the results of its matrix multiplications and attention",
                "correct it, or remove the section to switch checkpointing off",
            )
        )
    deepspeeds_own = [key for key in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization") if section.get(key)]
    if policy == "selective" and deepspeeds_own:
        problems.append(
            Problem(
                f"activation_checkpointing.policy = 'selective' with {', '.join(deepspeeds_own)}",
                "DeepSpeed's own checkpointing, which these need, keeps block inputs only",
                "use policy: full, or remove them",
            )
        )
    if policy == "selective" and deepspeed.get("zero_optimization.stage") == 3 and deepspeed.get("zero_optimization.memory_efficient_linear"):
        problems.append(
            Problem(
                "activation_checkpointing.policy = 'selective' with zero_optimization.memory_efficient_linear = true",
                "that linear adds its bias in place to a result which the policy keeps: gradients would be wrong",
                "remove memory_efficient_linear, or use policy: full",
            )
        )
    if section.get("cpu_checkpointing") and not section.get("partition_activations") and hardware.kind == "cpu":
        problems.append(
            Problem(
                "activation_checkpointing.cpu_checkpointing without partition_activations on a CPU",
                "DeepSpeed empties the saved inputs there and the backward pass fails",
                "remove cpu_checkpointing: the activations are in host memory already",
            )
        )
    return problems


def _compile_problems(deepspeed: ConfigFile, hardware: Hardware) -> list[Problem]:
    enabled, deepcompile = _enabled(deepspeed, "compile"), deepspeed.get("compile.deepcompile")
    problems = []
    if enabled not in (None, True, False):
        problems.append(Problem(f"compile.enabled = {enabled!r} ({deepspeed.where('compile.enabled')}) should be true or false", fix="correct it"))
    if deepcompile and not enabled:
        problems.append(
            Problem(f"compile.deepcompile ({deepspeed.where('compile.deepcompile')}) without compile.enabled", "nothing would be compiled", "set compile.enabled: true")
        )
    if deepcompile and hardware.kind == "cpu":
        problems.append(
            Problem(
                f"compile.deepcompile ({deepspeed.where('compile.deepcompile')}) on a CPU",
                "DeepSpeed's own compiler passes are a CUDA extension",
                "remove it: compile.enabled alone is torch.compile",
            )
        )
    return problems


def _stepping_problems(deepspeed: ConfigFile) -> list[Problem]:
    problems = []
    clipping = deepspeed.get("gradient_clipping")
    if clipping is not None and (isinstance(clipping, bool) or not isinstance(clipping, (int, float)) or not 0 <= clipping < math.inf):
        problems.append(
            Problem(f"gradient_clipping = {clipping!r} ({deepspeed.where('gradient_clipping')}) should be a number, 0 for none", fix="for example 1.0")
        )
    if deepspeed.get("managed_gradient_accumulation") is False:
        problems.append(
            Problem("managed_gradient_accumulation = false", "the training loop lets DeepSpeed find the accumulation boundary", "remove it")
        )
    return problems
