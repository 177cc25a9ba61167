"""What DeepSpeed 0.19 itself refuses with a traceback, or obeys otherwise than it says, told before a process starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ds_gpt.config.errors import Problem
from ds_gpt.config.files import ConfigFile
from ds_gpt.config.hardware import Hardware

_DTYPES = ("fp16", "float16", "half", "bf16", "bfloat16", "fp32", "float32", "float")
_PACKAGES = {"wandb": "wandb", "comet": "comet_ml"}


@dataclass(frozen=True)
class _Setting:
    """A value that is refused.

    Attributes:
        key: dotted.
        wrong: whether a value, given the stage and the hardware, is one.
        why: why it matters.
        fix: what to do.
        when: the condition, in words, where the value alone is not wrong.
    """

    key: str
    wrong: Callable[[Any, int, Hardware], bool]
    why: str
    fix: str
    when: str = ""


def _on(value: Any, stage: int, hardware: Hardware) -> bool:
    return bool(value)


def _off(value: Any, stage: int, hardware: Hardware) -> bool:
    return value is False


def _on_a_cpu(value: Any, stage: int, hardware: Hardware) -> bool:
    return bool(value) and hardware.kind == "cpu"


_AVERAGES = "DeepSpeed scales gradients this way only where it does not scatter them"
_CUDA_KERNEL = "DeepSpeed has the kernel for it on GPUs alone"
_SETTINGS = (
    _Setting(
        "zero_optimization.compute_grad_norm", _off,
        "clipping, and the verdict on the health of a run, need the norm of the gradient", "remove it",
    ),
    _Setting(
        "zero_optimization.override_module_apply", _off,
        "under ZeRO-3 weights would be drawn in pieces: the model starts from others than the seed's", "remove it",
    ),
    _Setting("zero_optimization.legacy_stage1", _on, "DeepSpeed has that stage 1 no more", "remove it"),
    _Setting(
        "zero_optimization.zenflow", _on,
        "it updates weights apart from the optimizer's step, of which the training loop would not know", "remove it",
    ),
    _Setting("zero_optimization.zero_quantized_weights", _on_a_cpu, _CUDA_KERNEL, "remove it", " on a CPU"),
    _Setting("zero_optimization.zero_quantized_nontrainable_weights", _on_a_cpu, _CUDA_KERNEL, "remove it", " on a CPU"),
    _Setting(
        "zero_optimization.offload_optimizer.super_offload", _on_a_cpu, "there is no GPU to take the optimizer from", "remove it",
        " on a CPU",
    ),
    _Setting(
        "zero_optimization.offload_optimizer.ratio", lambda value, stage, hardware: value < 1 and (stage < 3 or hardware.kind == "cpu"),
        "DeepSpeed divides the optimizer between a GPU and its host under ZeRO stage 3 alone", "remove it, or set zero_optimization.stage: 3 on GPUs",
    ),
    _Setting(
        "gradient_allreduce_op", lambda value, stage, hardware: value != "mean",
        "gradients, and so clipping and the learning rate, would depend on the number of ranks", "remove it: gradients are averaged",
    ),
    _Setting(
        "prescale_gradients", lambda value, stage, hardware: bool(value) and stage >= 2, _AVERAGES,
        "remove it: the mean is the same", " with ZeRO stage 2 or 3",
    ),
    _Setting(
        "gradient_predivide_factor", lambda value, stage, hardware: value != 1 and stage >= 2, _AVERAGES,
        "remove it: the mean is the same", " with ZeRO stage 2 or 3",
    ),
    _Setting(
        "steps_per_print", lambda value, stage, hardware: isinstance(value, bool) or not isinstance(value, int) or value < 1,
        "DeepSpeed divides by it", "give 1 or more, or remove it: log_every in the run config says how often ds_gpt prints",
    ),
    *(
        _Setting(f"data_types.{key}", lambda value, stage, hardware: value not in (*_DTYPES, "auto"), "DeepSpeed knows no such type", "use fp32, bf16 or fp16")
        for key in ("grad_accum_dtype", "param_dtype", "buffer_dtype")
    ),
)  # fmt: skip


def refusal_problems(deepspeed: ConfigFile, stage: int, hardware: Hardware) -> Iterator[Problem]:
    """Values that DeepSpeed would answer with a traceback, or by doing something else."""
    for setting in _SETTINGS:
        value = deepspeed.get(setting.key)
        if value is not None and _is_wrong(setting, value, stage, hardware):
            yield Problem(f"{setting.key} = {value!r} ({deepspeed.where(setting.key)}){setting.when}", setting.why, setting.fix)
    yield from _nvme_problems(deepspeed, stage)
    yield from _master_problems(deepspeed, hardware)
    checkpointing = deepspeed.get("activation_checkpointing")
    if (
        isinstance(checkpointing, Mapping)
        and checkpointing.get("contiguous_memory_optimization")
        and not checkpointing.get("partition_activations")
        and checkpointing.get("policy") != "selective"  # refused for that
    ):
        yield Problem(
            "activation_checkpointing.contiguous_memory_optimization without partition_activations",
            "DeepSpeed lays out in one piece only what it has partitioned",
            "add partition_activations: true, or remove it",
        )
    for section, package in _PACKAGES.items():
        if deepspeed.get(f"{section}.enabled") and find_spec(package) is None:
            yield Problem(
                f"{section}.enabled = True ({deepspeed.where(section)}), but Python has no package '{package}'",
                "DeepSpeed would report to it",
                f"pip install {package}, or remove the section: ds_gpt writes TensorBoard files and metrics.jsonl by itself",
            )


def _is_wrong(setting: _Setting, value: Any, stage: int, hardware: Hardware) -> bool:
    try:
        return setting.wrong(value, stage, hardware)
    except TypeError:  # not even of the right type, which DeepSpeed's own check words well
        return False


def _nvme_problems(deepspeed: ConfigFile, stage: int) -> Iterator[Problem]:
    for section in ("offload_optimizer", "offload_param"):
        offload = deepspeed.get(f"zero_optimization.{section}")
        if not isinstance(offload, Mapping) or offload.get("device") != "nvme":
            continue
        if stage < 3:
            yield Problem(
                f"zero_optimization.{section}.device = 'nvme' with ZeRO stage {stage}",
                "DeepSpeed would keep it in the host's memory instead, in silence",
                "set device: cpu, or zero_optimization.stage: 3",
            )
        elif not offload.get("nvme_path"):
            yield Problem(
                f"zero_optimization.{section}.device = 'nvme' without nvme_path",
                "DeepSpeed has nowhere to put the files",
                f"add zero_optimization.{section}.nvme_path: the folder of a local NVMe disk",
            )


def _master_problems(deepspeed: ConfigFile, hardware: Hardware) -> Iterator[Problem]:
    offload = deepspeed.get("zero_optimization.offload_optimizer")
    offloaded = isinstance(offload, Mapping) and offload.get("device") in ("cpu", "nvme") and hardware.kind == "cuda"
    for section in ("fp16", "bf16"):
        key = f"{section}.{section}_master_weights_and_grads"
        if deepspeed.get(key) and not offloaded:
            yield Problem(
                f"{key} = True ({deepspeed.where(key)}) without an optimizer that is offloaded from a GPU",
                "DeepSpeed's CPU Adam alone keeps masters and gradients in 16 bits",
                "remove it, or set zero_optimization.offload_optimizer.device: cpu",
            )
