"""Where a rank stands among those that share the model and those that share the data."""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def randomness(self) -> int:
        """What to draw dropout by: ranks that share matrices hold the same stream, and must drop the same of it."""
        return self.rank // self.parallel.tensor
