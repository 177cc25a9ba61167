"""Where a rank stands among those that share the model and those that share the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_gpt.config import ParallelConfig


@dataclass(frozen=True)
class Grid:
    """The ranks as a grid of pipeline x data x sequence x tensor, the last of which varies fastest.

    Those that talk most are next to each other, within a node if it has room. It is the order of DeepSpeed's own
    topology (pipe, data, model), in which data and sequence are one axis.

    Attributes:
        parallel: the degrees.
        data_ranks: number of data-parallel ranks.
        rank: this rank among all.
    """

    parallel: ParallelConfig
    data_ranks: int
    rank: int

    @property
    def tensor_rank(self) -> int:
        """Which share of each matrix is here, 0 to parallel.tensor - 1."""
        return self.rank % self.parallel.tensor

    @property
    def sequence_rank(self) -> int:
        """Which share of each sequence is here, 0 to parallel.sequence - 1."""
        return self.rank // self.parallel.tensor % self.parallel.sequence

    def sequence_groups(self) -> list[list[int]]:
        """The ranks that share each sequence, in the order of their shares: those that differ in nothing else."""
        step, degree = self.parallel.tensor, self.parallel.sequence
        firsts = (rank for rank in range(self.parallel.product * self.data_ranks) if rank // step % degree == 0)
        return [[first + share * step for share in range(degree)] for first in firsts]

    @property
    def data_rank(self) -> int:
        """Which share of the batch is here, 0 to data_ranks - 1."""
        return self.rank // (self.parallel.tensor * self.parallel.sequence) % self.data_ranks

    @property
    def pipeline_rank(self) -> int:
        """Which stage of the pipeline is here, 0 to parallel.pipeline - 1."""
        return self.rank // (self.parallel.tensor * self.parallel.sequence * self.data_ranks)

    @property
    def is_last_stage(self) -> bool:
        """Whether logits and losses come into being here."""
        return self.pipeline_rank == self.parallel.pipeline - 1

    @property
    def counts(self) -> bool:
        """Whether what is measured here is added up: of ranks that compute the same loss, one does."""
        return self.is_last_stage and self.tensor_rank == 0

    def copies(self, over_data: bool, over_tensor: bool) -> tuple[int, int]:
        """Which of the ranks this is, and of how many, that hold the same: data-parallel ones, those of a tensor group."""
        index, count = (self.tensor_rank, self.parallel.tensor) if over_tensor else (0, 1)
        if over_data:
            index += count * (self.rank // self.parallel.tensor % self._data_axis)
            count *= self._data_axis
        return index, count

    def topology(self) -> Any:
        """The same arrangement as DeepSpeed describes it."""
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

        return PipeModelDataParallelTopology(self.parallel.pipeline, self.parallel.tensor, self._data_axis)

    @property
    def _data_axis(self) -> int:
        """Ranks over which gradients are averaged."""
        return self.data_ranks * self.parallel.sequence

    @property
    def randomness(self) -> int:
        """What to draw dropout by: ranks that share matrices hold the same stream, and must drop the same of it."""
        return self.rank // self.parallel.tensor


def apart(parallel: ParallelConfig, nodes: Sequence[object]) -> list[range]:
    """Ranks that share matrices or a sequence, by such groups, where a group does not lie on one node.

    Args:
        parallel: the degrees.
        nodes: that of each rank.
    """
    size = parallel.tensor * parallel.sequence
    groups = [range(first, first + size) for first in range(0, len(nodes), size)]
    return [group for group in groups if len({nodes[rank] for rank in group}) > 1]


def said_apart(parallel: ParallelConfig, nodes: Sequence[object]) -> str:
    """The same as a sentence; empty where every group lies on one node."""
    groups = apart(parallel, nodes)
    if not groups:
        return ""
    shared = " and ".join(name for name, size in (("matrices", parallel.tensor), ("sequences", parallel.sequence)) if size > 1)
    first = groups[0]
    more = f", and {len(groups) - 1} more groups," if len(groups) > 1 else ""
    return f"ranks {first.start} to {first.stop - 1}{more} share {shared} ({parallel}) and are not on one node: each block waits for the network"
