"""How the ranks are shared out: tensor, pipeline and sequence parallelism; what is left is data-parallel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ds_gpt.config.errors import Problem
from ds_gpt.config.section import PositiveInt, Section

if TYPE_CHECKING:
    from ds_gpt.config.run import ModelConfig


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
}


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
    problems = list(_combination_problems(parallel, stage))
    if world_size % parallel.product:
        problems.append(
            Problem(
                f"{world_size} ranks are not a whole number of times {parallel} (parallel: {parallel.product} ranks a copy)",
                "every copy of the model takes as many ranks",
                f"launch a multiple of {parallel.product} ranks, or change the degrees",
            )
        )
    return problems + (list(_shape_problems(parallel, model)) if model else [])


def _combination_problems(parallel: ParallelConfig, stage: int) -> Iterator[Problem]:
    stages = COMBINATIONS.get(parallel.used)
    if stages is None:
        within = [f"{' with '.join(sorted(names))}" for names in COMBINATIONS if names and names < parallel.used]
        yield Problem(
            f"parallel: {parallel} does not work together",
            "this combination was never proved to train the same model",
            f"use {' or '.join(within)}" if within else "leave it out: data-parallel ranks and ZeRO share out optimizer and weights",
        )
    elif stage not in stages:
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
