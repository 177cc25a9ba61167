"""Which blocks each stage of a pipeline computes. Imports no torch: the planner cuts a model as the engine does."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate

from ds_gpt.config import ConfigError, ModelConfig, Problem
from ds_gpt.model.counts import block_flops_per_token, head_flops_per_token


@lru_cache(maxsize=256)
def stage_blocks(config: ModelConfig, stages: int) -> tuple[int, ...]:
    """The first block of each stage, and one past the last block: the slowest stage has as little to compute as can be.

    All stages wait for the slowest, so arithmetic is what counts, not parameters: the embedding is looked up and takes no
    time in the first stage, the head takes in the last one as much as 4.4 blocks of GPT-2 (124M). Every stage has a block.
    """
    return tuple(accumulate(balanced(config.layers, block_flops_per_token(config), head_flops_per_token(config), stages), initial=0))


def balanced(layers: int, block: int, head: int, stages: int) -> list[int]:
    """Blocks of each of so many `stages`, at least one, such that the largest sum of time is smallest.

    Where several cuts are as fast, the one whose fullest stage keeps activations of the fewest blocks: stage i, counted from
    0, those of `stages` - i micro-batches at a time (1F1B; Narayanan et al. 2021, section 2.2).

    Args:
        layers: blocks in all, no fewer than stages.
        block: time of a block.
        head: time that the last stage needs beside its blocks.
    """
    if stages == 1:
        return [layers]
    of_the_last = range(1, layers - stages + 2)
    slowest = min(max(block * -(-(layers - last) // (stages - 1)), block * last + head) for last in of_the_last)
    most = [slowest // block] * (stages - 1) + [(slowest - head) // block]  # that no stage is slower
    for kept in range(stages, stages * layers + 1):
        sizes = [min(size, kept // (stages - stage)) for stage, size in enumerate(most)]
        if sum(sizes) >= layers:
            break
    for stage in range(stages):  # the first holds most beside its blocks: the embedding
        sizes[stage] -= min(sizes[stage] - 1, sum(sizes) - layers)
    return sizes


def check_trained(stage: int, stages: int, blocks: range, trained: Callable[[int], bool]) -> None:
    """Refuse adapters of some blocks alone that leave a stage without any: its optimizer would have nothing to step.

    Args:
        stage: which of so many `stages`.
        blocks: of this stage.
        trained: whether anything of a block is trained.

    Raises:
        ConfigError: nothing is.
    """
    if not any(map(trained, blocks)):
        raise ConfigError(
            Problem(
                f"lora.targets names no map of blocks {blocks.start} to {blocks.stop - 1}, which are stage {stage} of {stages}"
                " (parallel.pipeline)",
                "each stage has an optimizer, which needs something to train",
                "add maps of these blocks to lora.targets, or set parallel.pipeline: 1",
            )
        )
