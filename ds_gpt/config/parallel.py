"""How the ranks are shared out: tensor, pipeline and sequence parallelism; what is left is data-parallel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ds_gpt.config.errors import Problem
from ds_gpt.config.section import PositiveInt, Section

if TYPE_CHECKING:
    from ds_gpt.config.files import ConfigFile
    from ds_gpt.config.run import ModelConfig, RunConfig


class ParallelConfig(Section):
    """Ranks that share one copy of the model; the others are data-parallel."""

    tensor: PositiveInt = 1  # that share each matrix of a block (Shoeybi et al. 2019)
    pipeline: PositiveInt = 1  # that share the blocks, a stage each (Huang et al. 2018)
    sequence: PositiveInt = 1  # that share each sequence (DeepSpeed Ulysses, Jacobs et al. 2023)

    @property
    def product(self) -> int:
        """Ranks of one data-parallel replica."""
        return self.tensor * self.pipeline * self.sequence

    @property
    def used(self) -> frozenset[str]:
        """Names of the degrees above 1."""
        return frozenset(name for name in ParallelConfig.model_fields if getattr(self, name) > 1)

    def __str__(self) -> str:
        parts = [f"{name} {getattr(self, name)}" for name in ParallelConfig.model_fields if name in self.used]
        return " x ".join(parts) or "data parallel alone"


# Which degrees go together, and with which ZeRO stages. Each row is proved equal to plain PyTorch in tests/parity; what
# is not here is refused.
COMBINATIONS: dict[frozenset[str], tuple[int, ...]] = {
    frozenset(): (0, 1, 2, 3),
    frozenset({"tensor"}): (0, 1, 2),
    frozenset({"pipeline"}): (0, 1),
    frozenset({"sequence"}): (0, 1, 2, 3),
    frozenset({"tensor", "pipeline"}): (0, 1),
    frozenset({"tensor", "sequence"}): (0, 1, 2),
    frozenset({"pipeline", "sequence"}): (0, 1),
}


_DEEPSPEEDS_CHECKPOINTING = (
    "activation_checkpointing.partition_activations",
    "activation_checkpointing.cpu_checkpointing",
    "activation_checkpointing.contiguous_memory_optimization",
)


def parallel_problems(parallel: ParallelConfig, model: ModelConfig | None, stage: int, world_size: int) -> list[Problem]:
    """What is impossible about the degrees, with the nearest that works; the model, where it is sound.

    Args:
        parallel: the degrees.
        model: the model's shape.
        stage: ZeRO stage.
        world_size: all ranks.
    """
    if not parallel.used:
        return []
    return [*_combination_problems(parallel, stage), *sharing_problems(parallel, model, world_size)]


def proved(parallel: ParallelConfig, stage: int) -> bool:
    """Whether these degrees are known to train the same model at this ZeRO stage."""
    return stage in COMBINATIONS.get(parallel.used, ())


def sharing_problems(parallel: ParallelConfig, model: ModelConfig | None, world_size: int) -> list[Problem]:
    """What about the degrees would be impossible in any software."""
    problems = []
    if world_size % parallel.product:
        problems.append(
            Problem(
                f"{_ranks(world_size)} not a whole number of times {parallel} (parallel: {parallel.product} ranks a copy)",
                "every copy of the model takes as many ranks",
                f"launch a multiple of {parallel.product} ranks, or change the degrees",
            )
        )
    return problems + (list(_shape_problems(parallel, model)) if model else [])


def _ranks(number: int) -> str:
    return "1 rank is" if number == 1 else f"{number} ranks are"


def beside_problems(run: RunConfig, deepspeed: ConfigFile) -> list[Problem]:
    """What the files ask for that does not go together with a degree above 1."""
    tensor = _tensor_problems(run.parallel, deepspeed)
    return tensor + _pipeline_problems(run, deepspeed) + _sequence_problems(run, deepspeed)


def _tensor_problems(parallel: ParallelConfig, deepspeed: ConfigFile) -> list[Problem]:
    if parallel.tensor == 1:
        return []
    return [
        Problem(
            f"{key} ({deepspeed.where(key)}) with parallel.tensor",
            "DeepSpeed's own checkpointing takes every rank for a data-parallel one, and finds the batch size wrong",
            "remove it; activation_checkpointing.policy: full keeps the same, selective costs less time",
        )
        for key in _DEEPSPEEDS_CHECKPOINTING
        if deepspeed.get(key)
    ]


def _pipeline_problems(run: RunConfig, deepspeed: ConfigFile) -> list[Problem]:
    if run.parallel.pipeline == 1:
        return []
    problems = []
    if run.stage in ("dpo", "reward"):
        problems.append(
            _beside_pipeline(f"stage: {run.stage}", "its loss compares sequences, and is measured on the last stage alone")
        )
    reasons = {
        "compile.enabled": "a stage's forward pass is called by DeepSpeed's schedule, never as the one model that is compiled",
        "torch_autocast.enabled": "activations pass between stages in the type of the weights; use bf16",
        "zero_optimization.offload_optimizer": "DeepSpeed copies gradients to the host as one rank's backward pass makes them",
        **dict.fromkeys(
            ("wall_clock_breakdown", "flops_profiler.enabled"),
            "DeepSpeed's timer of the backward pass is started twice in its schedule, and ends the run",
        ),
        **dict.fromkeys(_DEEPSPEEDS_CHECKPOINTING, "DeepSpeed's own checkpointing keeps one micro-batch; several are under way"),
    }
    for key, reason in reasons.items():
        value = deepspeed.get(key)
        if value and not (isinstance(value, Mapping) and value.get("device", "cpu") in (None, "none")):
            problems.append(_beside_pipeline(f"{key} ({deepspeed.where(key)})", reason))
    if deepspeed.get("fp16.enabled") and deepspeed.get("data_types.grad_accum_dtype") == "fp32":
        reason = "all stages but the last would drop their gradients: DeepSpeed adds fp16 gradients up in fp32 elsewhere"
        problems.append(_beside_pipeline(f"data_types.grad_accum_dtype = 'fp32' ({deepspeed.where('data_types')}) with fp16", reason))
    return problems


def parallel_notes(parallel: ParallelConfig, accumulation: int) -> list[str]:
    """What the degrees cost, with so many micro-batches a step."""
    stages = parallel.pipeline
    if stages == 1:
        return []
    idle = (stages - 1) / (accumulation + stages - 1)  # the bubble: Huang et al. 2018, section 2.3
    batches = f"{accumulation} micro-batch{'es' * (accumulation > 1)}"
    return [f"pipeline: {stages} stages idle {idle:.0%} of the time with {batches} a step; they idle less with more, smaller ones"]


def _beside_pipeline(what: str, why: str) -> Problem:
    return Problem(f"{what} with parallel.pipeline", why, "remove it, or set parallel.pipeline: 1")


def _sequence_problems(run: RunConfig, deepspeed: ConfigFile) -> list[Problem]:
    if run.parallel.sequence == 1:
        return []
    with_degree = f"with parallel.sequence = {run.parallel.sequence}"
    problems = []
    if run.stage in ("dpo", "reward"):
        problems.append(
            Problem(
                f"stage = '{run.stage}' {with_degree}",
                "its loss is of whole sequences, of which each rank has a part; stages pretrain and sft add up tokens",
                "set parallel.sequence: 1; activation_checkpointing and ZeRO save memory too",
            )
        )
    if run.objective.name != "next_token":
        problems.append(
            Problem(
                f"objective.name = '{run.objective.name}' {with_degree}",
                "tokens that see what comes after them were never proved to train the same model",
                "set parallel.sequence: 1, or objective.name: next_token",
            )
        )
    if deepspeed.get("compile.enabled"):
        problems.append(
            Problem(
                f"compile.enabled ({deepspeed.where('compile.enabled')}) {with_degree}",
                "PyTorch's compiler loses the gradients that pass through DeepSpeed's all-to-all, in silence",
                "set compile.enabled: false",
            )
        )
    return problems


def _combination_problems(parallel: ParallelConfig, stage: int) -> Iterator[Problem]:
    stages = COMBINATIONS.get(parallel.used)
    if stages is None:
        largest = max((len(names) for names in COMBINATIONS if names < parallel.used), default=0)
        within = [" x ".join(sorted(names)) for names in COMBINATIONS if largest and names < parallel.used and len(names) == largest]
        yield Problem(
            f"parallel: {parallel} does not work together",
            "this combination was never proved to train the same model",
            f"use {' or '.join(within)}" if within else "leave it out: data-parallel ranks and ZeRO share out optimizer and weights",
        )
    elif stage not in stages and stage in COMBINATIONS[frozenset()]:  # that it is no stage at all is told elsewhere
        nearest = min(stages, key=lambda other: (abs(other - stage), other))
        yield Problem(
            f"parallel: {parallel} with zero_optimization.stage = {stage}",
            f"it works with ZeRO {', '.join(map(str, stages))}",
            f"set zero_optimization.stage: {nearest}",
        )


def _shape_problems(parallel: ParallelConfig, model: ModelConfig) -> Iterator[Problem]:
    sharing = parallel.tensor * parallel.sequence
    together = f"parallel.tensor {parallel.tensor} x parallel.sequence {parallel.sequence}"
    if model.heads % sharing:
        yield Problem(
            f"model.heads = {model.heads} is not a multiple of {together}",
            "each rank computes whole heads",
            f"degrees whose product divides {model.heads}",
        )
    elif model.key_heads % sharing:
        yield Problem(
            f"the {model.key_heads} heads of keys (model.kv_heads) are not a multiple of {together}",
            "each rank computes whole groups",
            f"degrees whose product divides {model.key_heads}",
        )
    if model.hidden_width % parallel.tensor:
        yield Problem(
            f"the feed-forward width {model.hidden_width} (model.ffn_width) is not a multiple of parallel.tensor {parallel.tensor}",
            "its columns are shared out",
            f"set model.ffn_width to a multiple of {parallel.tensor}",
        )
    if parallel.pipeline > model.layers:
        yield Problem(
            f"parallel.pipeline = {parallel.pipeline} is more than model.layers = {model.layers}",
            "a stage has at least one block",
            f"at most {model.layers}",
        )
    if model.context % parallel.sequence:
        yield Problem(
            f"model.context = {model.context} is not a multiple of parallel.sequence {parallel.sequence}",
            "each rank takes as many tokens",
            f"set model.context to a multiple of {parallel.sequence}",
        )
