"""Where a pipeline is cut: against all the other cuts, and against what the blocks and the head take in PyTorch."""

from __future__ import annotations

from itertools import combinations

import pytest

from ds_gpt.config import ConfigError, ModelConfig
from ds_gpt.model.stages import balanced, check_trained, stage_blocks

GPT2_124M = ModelConfig(layers=12, width=768, heads=12, context=1024, vocab_size=50304)


@pytest.mark.parametrize(
    ("layers", "head", "stages", "sizes"),
    [
        (4, 0, 1, [4]),
        (4, 0, 2, [2, 2]),
        (12, 0, 4, [3, 3, 3, 3]),
        (6, 20, 2, [4, 2]),  # the head is worth two blocks
        (12, 44, 4, [2, 4, 5, 1]),  # the last stage is the slowest, whatever the others have: those in front keep more micro-batches
        (4, 1000, 4, [1, 1, 1, 1]),  # a stage has a block, whatever the head takes
        (5, 9, 5, [1, 1, 1, 1, 1]),
    ],
)
def test_blocks_are_cut_so_that_the_slowest_stage_is_fastest(layers: int, head: int, stages: int, sizes: list[int]) -> None:
    assert balanced(layers, 10, head, stages) == sizes


@pytest.mark.parametrize("head", [0, 1, 5, 13, 27, 44, 100, 1000])
@pytest.mark.parametrize("layers", [1, 2, 5, 9, 10])
def test_no_other_cut_is_faster_nor_as_fast_and_keeps_less(layers: int, head: int) -> None:
    for stages in range(1, layers + 1):

        def costs(sizes: list[int]) -> tuple[int, int]:
            slowest = max(*(10 * size for size in sizes), 10 * sizes[-1] + head)
            return slowest, max((stages - stage) * size for stage, size in enumerate(sizes))

        every = [[end - start for start, end in zip((0, *inner), (*inner, layers), strict=True)] for inner in combinations(range(1, layers), stages - 1)]
        sizes = balanced(layers, 10, head, stages)
        assert sizes in every and costs(sizes) == min(map(costs, every))


def test_the_head_of_gpt2_weighs_and_its_embedding_does_not() -> None:
    assert stage_blocks(GPT2_124M, 1) == (0, 12)
    assert stage_blocks(GPT2_124M, 2) == (0, 8, 12)
    assert stage_blocks(GPT2_124M, 4) == (0, 2, 6, 11, 12)
    assert stage_blocks(GPT2_124M.model_copy(update={"vocab_size": 65}), 4) == (0, 3, 6, 9, 12)


def test_a_stage_without_adapters_is_refused() -> None:
    check_trained(1, 2, range(2, 4), lambda block: block == 3)
    with pytest.raises(ConfigError, match="no map of blocks 2 to 3, which are stage 1 of 2"):
        check_trained(1, 2, range(2, 4), lambda block: block < 2)
