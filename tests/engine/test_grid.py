"""The grid of ranks agrees with the topology that DeepSpeed itself arranges ranks in."""

from __future__ import annotations

from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from ds_gpt.config import ParallelConfig
from ds_gpt.engine.grid import Grid


def test_ranks_stand_where_deepspeeds_topology_puts_them() -> None:
    parallel, data_ranks = ParallelConfig(tensor=2, pipeline=3, sequence=4), 5
    topology = PipeModelDataParallelTopology(num_pp=3, num_mp=2, num_dp=data_ranks * parallel.sequence)
    seen = set()
    for rank in range(parallel.product * data_ranks):
        grid, there = Grid(parallel, data_ranks, rank), topology.get_coord(rank)
        assert (grid.pipeline_rank, grid.data_rank * 4 + grid.sequence_rank, grid.tensor_rank) == (there.pipe, there.data, there.model)
        seen.add((grid.pipeline_rank, grid.data_rank, grid.sequence_rank, grid.tensor_rank))
    assert len(seen) == parallel.product * data_ranks


def test_a_loss_is_counted_once_for_each_share_of_the_data() -> None:
    parallel, data_ranks = ParallelConfig(tensor=2, pipeline=3, sequence=4), 5
    grids = [Grid(parallel, data_ranks, rank) for rank in range(parallel.product * data_ranks)]
    counting = [(grid.data_rank, grid.sequence_rank) for grid in grids if grid.counts]
    assert sorted(counting) == [(data, sequence) for data in range(5) for sequence in range(4)]
    assert len({grid.randomness for grid in grids}) == len(grids) // parallel.tensor
