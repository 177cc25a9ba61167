"""The keys a DeepSpeed JSON may have.

DeepSpeed 0.19 ignores an unknown top-level key in silence, so that ``"gradient_cliping": 0.3`` clips at 1.0, its default.
These tables are checked here, before a process starts; a test compares them with what DeepSpeed itself reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ds_gpt.config.errors import Problem, did_you_mean
from ds_gpt.config.files import ConfigFile
from ds_gpt.config.run import RunConfig

_OFFLOAD = frozenset({"device", "nvme_path", "buffer_count", "pin_memory"})

KNOWN_KEYS: Mapping[str, frozenset[str]] = {
    "": frozenset(
        """
        activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type
        compile compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last
        datastates_ckpt disable_allgather disable_python_gc dump_state eigenvalue elasticity expert_parallel
        flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping
        gradient_predivide_factor graph_harvesting hybrid_engine log_level managed_gradient_accumulation
        memory_breakdown nebula optimizer pipeline prescale_gradients progressive_layer_drop quantize_training
        scheduler seq_parallel_communication_data_type sparse_attention sparse_gradients steps_per_print
        tensor_parallel tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
        use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
        """.split()
    ),
    "zero_optimization": frozenset(
        """
        allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients cpu_offload
        cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks ignore_unused_parameters
        leaf_module legacy_stage1 load_from_fp32_weights log_trace_cache_warnings memory_efficient_linear
        mics_hierarchical_params_gather mics_shard_size offload_optimizer offload_param overlap_comm
        override_module_apply parameter_alignment pipeline_loading_checkpoint reduce_bucket_size reduce_scatter
        round_robin_gradients save_muon_momentum_buffer_in_memory stage stage3_allgather_sequential
        stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
        stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold
        stage3_module_granularity_threshold stage3_param_persistence_threshold stage3_prefetch_bucket_size
        stage3_use_all_reduce_for_fetch_params sub_group_size use_multi_rank_bucket_allreduce zenflow
        zero_hpz_partition_size zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights
        zeropp_loco_param
        """.split()
    ),
    "zero_optimization.offload_optimizer": _OFFLOAD
    | {"cpuadam_cores_perc", "fast_init", "pipeline_read", "pipeline_write", "ratio", "super_offload"},
    "zero_optimization.offload_param": _OFFLOAD | {"buffer_size", "max_in_cpu"},
    "bf16": frozenset(
        {"enabled", "bf16_master_weights_and_grads", "bf16_optimizer_states", "check_grad_overflow", "immediate_grad_update"}
    ),
    "fp16": frozenset(
        """
        auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis initial_scale_power
        loss_scale loss_scale_window min_loss_scale
        """.split()
    ),
    "torch_autocast": frozenset({"dtype", "enabled", "lower_precision_safe_modules"}),
    # `policy` (full or selective) is ds_gpt's own: DeepSpeed has no word for what to keep.
    "activation_checkpointing": frozenset(
        """
        contiguous_memory_optimization cpu_checkpointing number_checkpoints partition_activations policy profile
        synchronize_checkpoint_boundary
        """.split()
    ),
    # `enabled` is ds_gpt's own: DeepSpeed compiles when its caller says so, and this section says how.
    "compile": frozenset(
        """
        autoep_non_moe debug_log deepcompile double_buffer enabled free_activation free_activation_threshold
        keep_all_input_tensors keep_int_input_tensors offload_activation offload_activation_pin_memory
        offload_opt_states offload_parameters passes symmetric_memory sync_after_allgather sync_after_reduce
        sync_before_allgather sync_before_reduce
        """.split()
    ),
    "data_types": frozenset({"buffer_dtype", "grad_accum_dtype", "keep_in_fp32_modules", "param_dtype"}),
    "optimizer": frozenset({"type", "params", "legacy_fusion"}),
}

# Of the optimizers that a run can name, adamw and sgd, in torch's implementation and DeepSpeed's; and what chooses it.
OPTIMIZER_PARAMS = frozenset(
    """
    adam_w_mode amsgrad betas bias_correction capturable dampening differentiable eps foreach fused lr maximize momentum
    nesterov set_grad_none torch_adam weight_decay
    """.split()
)

# Where "auto" has a meaning: filled from the run, and in the last two read by DeepSpeed itself.
_AUTO = frozenset(
    """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer optimizer.type optimizer.params
    optimizer.params.lr optimizer.params.betas optimizer.params.eps optimizer.params.weight_decay scheduler bf16.enabled
    data_types.grad_accum_dtype data_types.keep_in_fp32_modules
    """.split()
)

# Values that ds_gpt.config.checks names itself, "auto" among them: one mistake, one problem.
_CHECKED = frozenset(
    """
    zero_optimization.stage gradient_clipping fp16.enabled torch_autocast.enabled activation_checkpointing.policy
    zero_optimization.offload_optimizer.device zero_optimization.offload_param.device
    """.split()
)

# Sections that change what is computed, which the training loop does not drive: silently wrong, so refused.
_NOT_DRIVEN: Mapping[str, str] = {
    "bfloat16": "use bf16, its newer name",
    "data_efficiency": "remove it",
    "expert_parallel": "remove it; the GPT has no experts",
    "hybrid_engine": "remove it",
    "pipeline": "remove it, and set parallel.pipeline in the run config",
    "tensor_parallel": "remove it, and set parallel.tensor in the run config",
    "weight_quantization": "remove it",
}

# Known to DeepSpeed by name alone: where one is present, even if it says enabled: false, DeepSpeed raises an error.
_REMOVED: Mapping[str, str] = {
    "amp": "use bf16, fp16 or torch_autocast",
    "compression_training": "remove it",
    "curriculum_learning": "remove it",
    "eigenvalue": "remove it",
    "elasticity": "remove it; the run's global batch is kept at any number of ranks",
    "graph_harvesting": "remove it; compile.enabled: true is torch.compile",
    "nebula": "remove it; ds_gpt writes checkpoints in the background (checkpoints in the run config)",
    "progressive_layer_drop": "remove it",
    "quantize_training": "remove it",
    "sparse_attention": "remove it",
    "sparse_gradients": "remove it; gradients are dense",
    "zero_optimization.mics_hierarchical_params_gather": "remove it",
    "zero_optimization.mics_shard_size": "use zero_optimization.zero_hpz_partition_size",
    "zero_optimization.zeropp_loco_param": "remove it; zero_quantized_gradients works without",
}

# Read by parts of DeepSpeed that ds_gpt has no use of: whoever states one would wait for it in vain.
_WITHOUT_EFFECT: Mapping[str, str] = {
    "autotuning": "remove it; `ds-gpt plan` finds the fastest configuration that fits",
    "checkpoint": "remove it, and set checkpoints in the run config",
    "dataloader_drop_last": "remove it; every step takes a whole global batch",
    "datastates_ckpt": "remove it, and set checkpoints in the run config",
    "disable_allgather": "remove it",
    "use_data_before_expert_parallelism": "remove it; the GPT has no experts",
    "vocabulary_size": "remove it, and set model.vocab_size in the run config",
    "zero_optimization.elastic_checkpoint": "remove it; a checkpoint of ds_gpt can be resumed on any number of ranks",
    "zero_optimization.pipeline_loading_checkpoint": "remove it",
}


def is_deepspeed(values: Mapping[str, Any]) -> bool:
    """Whether a file that was given as a run config has keys of a DeepSpeed JSON alone."""
    return bool(values.keys() & (KNOWN_KEYS[""] - RunConfig.model_fields.keys())) and not values.keys() & (RunConfig.model_fields.keys() - KNOWN_KEYS[""])


def key_problems(deepspeed: ConfigFile) -> list[Problem]:
    """Unknown keys, and sections that ds_gpt does not drive, in a DeepSpeed JSON."""
    problems = []
    for section, known in KNOWN_KEYS.items():
        values: Any = deepspeed.values if not section else deepspeed.get(section)
        if isinstance(values, Mapping):
            problems += _unknown(deepspeed, section, values, known)
        elif values is not None and not (values == "auto" and section in _AUTO):
            problems.append(
                Problem(f"{section} = {values!r} ({deepspeed.where(section)}) is not a section", fix=f'write "{section}": {{...}}')
            )
    params = deepspeed.get("optimizer.params")
    if params is not None and params != "auto" and not isinstance(params, Mapping):
        problems.append(Problem(f"optimizer.params = {params!r} ({deepspeed.where('optimizer.params')}) is not a section", fix='write "auto"'))
    elif isinstance(params, Mapping):
        problems += _unknown(deepspeed, "optimizer.params", params, OPTIMIZER_PARAMS)
    problems += [
        Problem(f'{key} = "auto" ({deepspeed.where(key)}) is not filled by ds_gpt', "DeepSpeed would get the word", "write a value, or remove it")
        for key in _autos(deepspeed.values)
        if key not in _AUTO | _CHECKED and key not in KNOWN_KEYS
    ]
    problems += [
        _of_no_use(deepspeed, key, "is a DeepSpeed section that ds_gpt does not drive", "it changes what is computed, and the training loop would not know", fix)
        for key, fix in _NOT_DRIVEN.items()
        if _switched_on(deepspeed.get(key))
    ]
    problems += [
        _of_no_use(deepspeed, key, "has been removed from DeepSpeed", "DeepSpeed refuses to start with it, whatever its value", fix)
        for key, fix in _REMOVED.items()
        if deepspeed.get(key) is not None
    ]
    problems += [
        _of_no_use(deepspeed, key, "has no effect under ds_gpt", "the part of DeepSpeed that reads it is not used", fix)
        for key, fix in _WITHOUT_EFFECT.items()
        if _switched_on(deepspeed.get(key))
    ]
    return problems


def _switched_on(value: Any) -> bool:
    return bool(value) and not (isinstance(value, Mapping) and value.get("enabled") is False)


def _of_no_use(deepspeed: ConfigFile, key: str, what: str, why: str, fix: str) -> Problem:
    return Problem(f"'{key}' ({deepspeed.where(key)}) {what}", why, fix)


def _unknown(deepspeed: ConfigFile, section: str, values: Mapping[str, Any], known: Iterable[str]) -> list[Problem]:
    problems = []
    for key in values:
        if key not in known:
            dotted = f"{section}.{key}" if section else key
            problems.append(
                Problem(
                    f"unknown key '{dotted}' in the DeepSpeed config ({deepspeed.where(dotted)})",
                    "DeepSpeed ignores unknown top-level keys in silence" if not section else "",
                    did_you_mean(key, known),
                )
            )
    return problems


def _autos(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted keys whose value is "auto"."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _autos(value, f"{prefix}{key}.")
        elif value == "auto":
            yield prefix + key
