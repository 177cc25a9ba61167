"""Compose the run YAML and the DeepSpeed JSON into the one dictionary that DeepSpeed gets.

Each number has one owner: the JSON how it runs on the hardware, the YAML what is learned. ``"auto"`` in the JSON is
filled from the run; a number that both state, differently, is an error. Nothing is overridden in silence.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_gpt.config.batch import settle_batch, stated_number
from ds_gpt.config.checks import deepspeed_problems, run_problems
from ds_gpt.config.deepspeed_keys import KNOWN_KEYS, is_deepspeed, key_problems
from ds_gpt.config.errors import ConfigError, Problem
from ds_gpt.config.files import ConfigFile, flatten, lay_over, read_deepspeed_json, read_run_yaml
from ds_gpt.config.hardware import Hardware, Precision
from ds_gpt.config.parallel import ParallelConfig, beside_problems, parallel_notes, parallel_problems
from ds_gpt.config.parse import parse_run, sound_sections
from ds_gpt.config.run import BatchConfig, OptimizerConfig, RunConfig

# What DeepSpeed clips at where the JSON says nothing (older versions: not at all). Said aloud, so that nobody is surprised.
_DEEPSPEEDS_CLIPPING = 1.0
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Composed:
    """A run that can start: every number settled.

    Attributes:
        run: the typed run config (``model.vocab_size`` may still be ``"auto"``: the tokenizer settles it).
        deepspeed: the dictionary for ``deepspeed.initialize``; no ``"auto"`` is left in it.
        hardware: the devices it was composed for.
        micro_batch_size: sequences per rank and micro-step.
        accumulation_steps: micro-steps per optimizer step.
        precision: what the model computes in.
        checkpoint_policy: activation checkpointing: ``None`` (off), ``"full"`` or ``"selective"``.
        compiled: whether the engine compiles the model.
        owners: who stated each dotted key of ``deepspeed``, for ``show-config``.
        run_owners: the same for each dotted key of ``run``.
        notes: what was decided for the user, a sentence each.
        stated: the DeepSpeed config as it was given, ``--set`` included and every ``"auto"`` kept.
        item_tokens: tokens of one item of the batch, padding included, where only the data tells; None: as many as fit.
    """

    run: RunConfig
    deepspeed: dict[str, Any]
    hardware: Hardware
    micro_batch_size: int
    accumulation_steps: int
    precision: Precision
    checkpoint_policy: str | None
    compiled: bool = False
    owners: dict[str, str] = field(default_factory=dict)
    run_owners: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    stated: dict[str, Any] = field(default_factory=dict)
    item_tokens: int | None = None

    @property
    def zero_stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        return self.deepspeed["zero_optimization"]["stage"]

    @property
    def data_ranks(self) -> int:
        """Data-parallel ranks: those that take sequences of their own."""
        return self.hardware.world_size // self.run.parallel.product

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the global batch, all that the model sees: padding, and both sequences of a pair."""
        return self.run.batch.global_batch_size * (self.item_tokens or self.run.sequences * self.run.model.context)


def load(
    run_path: str | Path, deepspeed_path: str | Path, hardware: Hardware, overrides: Iterable[str] = ()
) -> Composed:
    """Read both files, lay ``--set`` over them and compose. Raises ConfigError with every problem found."""
    run_file, deepspeed_file = _read(run_path, deepspeed_path)
    run_file, deepspeed_file, problems = lay_over(run_file, deepspeed_file, overrides, KNOWN_KEYS)
    try:
        composed = compose(run_file, deepspeed_file, hardware)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return composed


def _read(run_path: str | Path, deepspeed_path: str | Path) -> tuple[ConfigFile, ConfigFile]:
    """Both files. Raises ConfigError with the problems of both; one in the other's place is one problem."""
    files: list[ConfigFile] = []
    problems: list[Problem] = []
    for read, path in ((read_run_yaml, run_path), (read_deepspeed_json, deepspeed_path)):
        try:
            files.append(read(path))
        except ConfigError as error:
            problems += error.problems
        else:
            if read is read_run_yaml and is_deepspeed(files[0].values):
                problems.append(
                    Problem(
                        f"'{path}', given as the run config, is a DeepSpeed config",
                        "the run config says what is learned, the DeepSpeed config how it runs on the hardware",
                        f"--deepspeed_config {path}, and a run YAML (ds_configs/runs/quickstart.yaml) for --config",
                    )
                )
    if problems:
        raise ConfigError(problems)
    return files[0], files[1]


def compose(run_file: ConfigFile, deepspeed_file: ConfigFile, hardware: Hardware) -> Composed:
    """Compose two files that are already read. Raises ConfigError with every problem found."""
    problems = key_problems(deepspeed_file) + deepspeed_problems(deepspeed_file, hardware)
    sections = sound_sections(run_file)
    problems += run_problems(sections)
    problems += _disagreements(run_file, sections.get("batch"), sections.get("optimizer"), deepspeed_file)
    micro_batch_size = accumulation_steps = 0
    parallel = sections.get("parallel", ParallelConfig())
    impossible = parallel_problems(parallel, sections.get("model"), deepspeed_file.get("zero_optimization.stage") or 0, hardware.world_size)
    problems += impossible
    if "batch" in sections and not impossible:
        ranks = hardware.world_size // parallel.product
        micro_batch_size, accumulation_steps, batch_problems = settle_batch(sections["batch"], deepspeed_file, ranks, parallel)
        problems += batch_problems
    try:
        run = parse_run(run_file)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from None
    problems += beside_problems(run, deepspeed_file)
    if problems:
        raise ConfigError(problems)
    return _fill(run_file, run, deepspeed_file, hardware, micro_batch_size, accumulation_steps)


def _disagreements(run_file: ConfigFile, batch: BatchConfig | None, optimizer: OptimizerConfig | None, deepspeed: ConfigFile) -> list[Problem]:
    """Numbers that both files state and that differ; None for a section of the run that cannot be judged."""
    twice: list[tuple[str, str, Any]] = []
    if batch:
        twice.append(("train_batch_size", "batch.global_batch_size", batch.global_batch_size))
    if batch and batch.micro_batch_size != "auto":
        twice.append(("train_micro_batch_size_per_gpu", "batch.micro_batch_size", batch.micro_batch_size))
    if optimizer:
        twice += [("optimizer.params.lr", "optimizer.lr", optimizer.lr), ("optimizer.params.weight_decay", "optimizer.weight_decay", optimizer.weight_decay)]
    if optimizer and optimizer.name == "adamw":
        twice += [("optimizer.params.betas", "optimizer.betas", list(optimizer.betas)), ("optimizer.params.eps", "optimizer.eps", optimizer.eps)]
    problems = []
    stated_type = stated_number(deepspeed, "optimizer.type")
    if optimizer and stated_type is not None and str(stated_type).lower() != optimizer.name:
        problems.append(_disagreement(run_file, deepspeed, "optimizer.type", stated_type, "optimizer.name", optimizer.name))
    for json_key, run_key, value in twice:
        stated = stated_number(deepspeed, json_key)
        if stated is not None and stated != value:
            problems.append(_disagreement(run_file, deepspeed, json_key, stated, run_key, value))
    if stated_number(deepspeed, "scheduler") is not None:
        problems.append(
            Problem(
                f"scheduler ({deepspeed.where('scheduler')}) is stated in the DeepSpeed config",
                "the learning-rate schedule belongs to the run config, where it is a pure function of the step",
                f"delete it there (or write \"scheduler\": \"auto\") and use 'schedule' in {run_file.path.name}",
            )
        )
    return problems


def _shares(parallel: ParallelConfig, ranks: int) -> str:
    """Among whom the batch is divided; DeepSpeed takes each rank's part of a sequence for one."""
    data = f"{ranks // parallel.product} data ranks of {ranks}" if parallel.used else f"{ranks} rank{'s' * (ranks > 1)}"
    return data + (f", each sequence in {parallel.sequence} parts" if parallel.sequence > 1 else "")


def _disagreement(run_file: ConfigFile, deepspeed: ConfigFile, json_key: str, stated: Any, run_key: str, value: Any) -> Problem:
    return Problem(
        f"{json_key} = {stated!r} ({deepspeed.where(json_key)}) but {run_key} = {value!r} ({run_file.where(run_key)})",
        "the run config owns this number; two that differ would make the result depend on who wins",
        "drop that --set" if deepspeed.where(json_key) == "--set" else f'delete it at {deepspeed.where(json_key)}, or write "auto"',
    )


def _fill(
    run_file: ConfigFile, run: RunConfig, deepspeed_file: ConfigFile, hardware: Hardware, micro: int, accumulation: int
) -> Composed:
    """The DeepSpeed dictionary with every "auto" filled. The files are known to be sound here."""
    values = _without_nulls(deepspeed_file.values)
    owners: dict[str, str] = {}
    notes: list[str] = []
    values.setdefault("zero_optimization", {}).setdefault("stage", 0)
    # DeepSpeed reduces gradients over the ranks that share a sequence as it does over data-parallel ones, and takes
    # each one's part of a sequence for a sequence.
    batch = run.batch.global_batch_size * run.parallel.sequence
    for key, number in zip(_BATCH_KEYS, (batch, micro, accumulation), strict=True):
        if values.get(key) != number:  # under sequence parallelism also where the batch that the run holds is stated
            owners[key] = f"run config: batch ({run_file.path.name}) and {_shares(run.parallel, hardware.world_size)}"
        values[key] = number
    if "gradient_clipping" not in values:
        values["gradient_clipping"] = _DEEPSPEEDS_CLIPPING
        owners["gradient_clipping"] = "DeepSpeed's default"
        notes.append(f"gradient_clipping is not stated: DeepSpeed clips at {_DEEPSPEEDS_CLIPPING} (0 for none)")
    precision = _precision(values, hardware, owners, notes)
    _accumulation_dtype(values, precision, owners, notes)
    values.pop("scheduler", None)
    values["optimizer"] = _optimizer(run, values, hardware)
    for key in flatten(values["optimizer"], "optimizer."):
        if deepspeed_file.get(key) in (None, "auto"):
            owners[key] = "ds_gpt" if key.split(".")[-1] in ("torch_adam", "fused") else f"run config: optimizer ({run_file.path.name})"
    if run.optimizer.name == "sgd" and values["zero_optimization"]["stage"] > 0:
        values.setdefault("zero_allow_untested_optimizer", True)
    warmup_steps, steps = run.schedule.warmup_steps, run.training.steps
    if warmup_steps >= steps:
        peak = "only in the last one" if warmup_steps == steps else "never"
        notes.append(f"schedule.warmup_steps = {warmup_steps} of training.steps = {steps}: the learning rate rises to the end, and reaches its peak {peak}")
    notes += parallel_notes(run.parallel, accumulation)
    policy = None
    if "activation_checkpointing" in values:
        policy = values["activation_checkpointing"].pop("policy", "full")
    if policy == "selective" and values["zero_optimization"]["stage"] == 3:
        # DeepSpeed's own linear adds the bias in place to the kept result of the multiplication, so that a
        # recomputation adds it again: wrong gradients, in silence.
        values["zero_optimization"]["memory_efficient_linear"] = False
    compiled = bool(values.get("compile", {}).pop("enabled", False))
    for key in flatten(values):
        owners.setdefault(key, f"DeepSpeed config ({deepspeed_file.where(key)})" if deepspeed_file.get(key) is not None else "ds_gpt")
    run_owners = {
        key: f"run config ({run_file.where(key)})" if run_file.get(key) is not None else "default"
        for key in flatten(run.model_dump(mode="json"))
    }
    return Composed(run, values, hardware, micro, accumulation, precision, policy, compiled, owners, run_owners, tuple(notes), deepspeed_file.values)


def _precision(values: dict[str, Any], hardware: Hardware, owners: dict[str, str], notes: list[str]) -> Precision:
    bf16, fp16 = values.get("bf16", {}), values.get("fp16", {})
    if bf16.get("enabled") == "auto":
        other = next((section for section in ("fp16", "torch_autocast") if values.get(section, {}).get("enabled")), None)
        bf16["enabled"] = hardware.bf16 and other is None
        reason = f"{hardware.name} computes bf16 at full speed: on" if hardware.bf16 else f"{hardware.name} does not compute bf16 at full speed: fp32"
        reason = f"{other} is enabled: off" if other else reason
        owners["bf16.enabled"] = f'"auto": {reason}'
        notes.append(f'bf16 is "auto" and {reason}')
    if fp16.get("enabled"):
        return "fp16"
    if bf16.get("enabled"):
        return "bf16"
    return "bf16" if values.get("torch_autocast", {}).get("enabled") else "fp32"


def _accumulation_dtype(values: dict[str, Any], precision: Precision, owners: dict[str, str], notes: list[str]) -> None:
    """Settle ``data_types.grad_accum_dtype: "auto"``: fp32 wherever DeepSpeed accumulates in it."""
    types = values.get("data_types", {})
    if types.get("grad_accum_dtype") != "auto":
        return
    stage = values["zero_optimization"]["stage"]
    if values.get("bf16", {}).get("enabled") and stage > 0:
        types["grad_accum_dtype"] = "fp32"
        owners["data_types.grad_accum_dtype"] = '"auto": bf16 gradients are accumulated in fp32'
        return
    del types["grad_accum_dtype"]  # the gradients' own dtype
    if not types:
        del values["data_types"]
    if precision != "fp32" and not values.get("torch_autocast", {}).get("enabled"):
        notes.append(f"gradients accumulate in {precision}: DeepSpeed has no fp32 accumulation for {precision} at ZeRO stage {stage}")


def _optimizer(run: RunConfig, values: Mapping[str, Any], hardware: Hardware) -> dict[str, Any]:
    """DeepSpeed's optimizer section: the run's numbers, and an implementation that needs no compiler where one exists."""
    stated = values.get("optimizer")
    section = copy.deepcopy(stated) if isinstance(stated, dict) else {}
    stated_params = section.get("params")
    params = {key: value for key, value in stated_params.items() if value != "auto"} if isinstance(stated_params, dict) else {}
    optimizer = run.optimizer
    params["lr"] = optimizer.lr
    params["weight_decay"] = optimizer.weight_decay
    if optimizer.name == "sgd":
        return {**section, "type": "SGD", "params": params}
    params["betas"], params["eps"] = list(optimizer.betas), optimizer.eps
    offload = (values["zero_optimization"].get("offload_optimizer") or {}).get("device", "none") != "none"
    # DeepSpeed's own Adams are compiled at first use: minutes, and a compiler that laptops may not have.
    # torch's fused AdamW is as fast on a GPU, and 4 to 10 times as fast as its plain one on a CPU; only offload to a GPU's
    # host is worth DeepSpeedCPUAdam.
    if "torch_adam" not in params and not (offload and hardware.kind == "cuda"):
        params["torch_adam"] = True
        params.setdefault("fused", True)
    return {**section, "type": "AdamW", "params": params}


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy without the keys that are null: null (``--set bf16=null``) means not stated, at every depth."""
    return {
        key: _without_nulls(value) if isinstance(value, Mapping) else copy.deepcopy(value) for key, value in values.items() if value is not None
    }
