"""The grid of ranks agrees with the topology that DeepSpeed itself arranges ranks in."""

from __future__ import annotations

from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from ds_gpt.config import ParallelConfig
from ds_gpt.engine.grid import Grid, apart


def test_ranks_stand_where_deepspeeds_topology_puts_them() -> None:
    parallel, data_ranks = ParallelConfig(tensor=2, pipeline=3, sequence=4), 5
    topology = PipeModelDataParallelTopology(num_pp=3, num_mp=2, num_dp=data_ranks * parallel.sequence)
    seen = set()
    for rank in range(parallel.product * data_ranks):
        grid, there = Grid(parallel, data_ranks, rank), topology.get_coord(rank)
        assert (grid.pipeline_rank, grid.data_rank * 4 + grid.sequence_rank, grid.tensor_rank) == (there.pipe, there.data, there.model)
        seen.add((grid.pipeline_rank, grid.data_rank, grid.sequence_rank, grid.tensor_rank))
    assert len(seen) == parallel.product * data_ranks


def test_a_sequence_is_shared_by_ranks_that_differ_in_nothing_else() -> None:
    parallel, data_ranks = ParallelConfig(tensor=2, pipeline=3, sequence=4), 5
    topology = PipeModelDataParallelTopology(num_pp=3, num_mp=2, num_dp=data_ranks * parallel.sequence)
    groups = Grid(parallel, data_ranks, 0).sequence_groups()
    assert sorted(rank for group in groups for rank in group) == list(range(parallel.product * data_ranks))
    for group in groups:
        assert [Grid(parallel, data_ranks, rank).sequence_rank for rank in group] == [0, 1, 2, 3]
        assert len({(there.pipe, there.data // 4, there.model) for there in map(topology.get_coord, group)}) == 1


def test_a_loss_is_counted_once_for_each_share_of_the_data() -> None:
    parallel, data_ranks = ParallelConfig(tensor=2, pipeline=3, sequence=4), 5
    grids = [Grid(parallel, data_ranks, rank) for rank in range(parallel.product * data_ranks)]
    counting = [(grid.data_rank, grid.sequence_rank) for grid in grids if grid.counts]
    assert sorted(counting) == [(data, sequence) for data in range(5) for sequence in range(4)]
    assert len({grid.randomness for grid in grids}) == len(grids) // parallel.tensor


def test_ranks_that_share_most_and_are_on_several_nodes() -> None:
    eights = [rank // 8 for rank in range(24)]
    assert apart(ParallelConfig(tensor=4, pipeline=3, sequence=2), eights) == []
    assert apart(ParallelConfig(tensor=12), eights) == [range(12), range(12, 24)]
    assert apart(ParallelConfig(tensor=2, sequence=3), eights) == [range(6, 12), range(12, 18)]
    assert apart(ParallelConfig(pipeline=24), eights) == []
