"""Degrees of parallelism: what goes together, and what is refused."""

from __future__ import annotations

import pytest
from tiny import tiny

from ds_gpt.config import ConfigError, ParallelConfig


def test_without_degrees_all_ranks_are_data_parallel() -> None:
    composed = tiny("zero1", 4)
    assert composed.data_ranks == 4 and str(composed.run.parallel) == "data parallel alone"


def test_degrees_have_a_product_and_a_name() -> None:
    parallel = ParallelConfig(tensor=2, pipeline=3)
    assert parallel.product == 6 and str(parallel) == "tensor 2 x pipeline 3"


def test_all_together_is_refused_and_says_why() -> None:
    with pytest.raises(ConfigError, match="does not work together"):
        tiny("zero1", 8, ["parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=2"])


def test_ranks_that_are_no_whole_number_of_copies_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 ranks are not a whole number of times pipeline 3"):
        tiny("zero1", 4, ["parallel.pipeline=3"])


@pytest.mark.parametrize(
    ("settings", "ranks", "complaint"),
    [
        (["parallel.tensor=8"], 8, "model.heads = 4 is not a multiple"),
        (["parallel.tensor=4", "model.kv_heads=2"], 4, "2 heads of keys"),
        (["parallel.tensor=4", "model.ffn_width=30"], 4, "feed-forward width 30"),
        (["parallel.pipeline=4"], 4, "more than model.layers = 2"),
        (["parallel.sequence=4", "model.context=18"], 4, "model.context = 18"),
    ],
)
def test_shapes_that_cannot_be_shared_out_are_refused(settings: list[str], ranks: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        tiny("zero1", ranks, settings)
