"""Sequence parallelism: DeepSpeed Ulysses (Jacobs et al. 2023) around the attention of a model that knows nothing of it.

Of every sequence a rank holds the tokens of one stretch. Whatever is done token by token is done there; for attention an
all-to-all gives each rank all tokens of its share of the heads, and another one gives their results back.

DeepSpeed's engine is not told: it takes the ranks that share a sequence for data-parallel ones, each with a shorter
sequence, and averages their gradients and shards with ZeRO over all of them. Told of it, it scales the gradients of
ZeRO 0 to 2 by the degree, or leaves out their reduction, as the way of telling may be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_gpt.engine.grid import Grid
from ds_gpt.model.attention import Attend
from ds_gpt.model.gpt import GPT


class SequenceParallel:
    """One rank's part in it; nothing where the degree is 1. Every rank must make one at the same time.

    Args:
        grid: where this rank stands.
        model: its attentions get another `attend`.
    """

    def __init__(self, grid: Grid, model: GPT) -> None:
        self._rank, self._degree = grid.sequence_rank, grid.parallel.sequence
        self._alone = False
        self._group: torch.distributed.ProcessGroup | None = None
        if self._degree > 1:
            self._group = torch.distributed.new_subgroups_by_enumeration(grid.sequence_groups())[0]
            for block in model.blocks:
                block.attention.attend = self._around(block.attention.attend)

    def _around(self, attend: Attend) -> Attend:
        from deepspeed.sequence.layer import DistributedAttention

        exchanging = DistributedAttention(partial(_heads_last, attend), self._group, scatter_idx=2, gather_idx=1)

        def attend_together(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, dropout: float, **apart: Tensor) -> Tensor:
            if self._alone:
                return attend(q_BHTK, k_BGTK, v_BGTK, dropout, **apart)
            heads_last = (heads.transpose(1, 2) for heads in (q_BHTK, k_BGTK, v_BGTK))
            return exchanging(*heads_last, 0, None, dropout, **apart).transpose(1, 2)

        return attend_together

    def cut(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """This rank's tokens of a batch of whole sequences: inputs_BT, targets_BT, and what else the objective takes.

        That is, as far as there is any: documents_BT, whole, because attention sees the whole; positions_BT; and the
        share that the loss is divided by, of which this is one part in as many as there are ranks.
        """
        if self._degree == 1:
            return batch
        inputs_BT, targets_BT, *others = batch
        documents, positions, share = others[:1], others[1:2], others[2:]
        mine = [self._own(inputs_BT), self._own(targets_BT), *documents, *map(self._own, positions)]
        return (*mine, *(whole / self._degree for whole in share))

    def _own(self, whole_BT: Tensor) -> Tensor:
        return whole_BT.chunk(self._degree, dim=1)[self._rank]

    def positions(self, tokens_BT: Tensor) -> Tensor | None:
        """Where this rank's tokens stand in the whole sequence, T; None: from 0."""
        if self._degree == 1:
            return None
        length = tokens_BT.shape[1]
        return torch.arange(self._rank * length, (self._rank + 1) * length, device=tokens_BT.device)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Every rank attends by itself in here, to whole sequences, as decoding does: those are too short to share."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def close(self) -> None:
        """Leave the group of the ranks that share a sequence."""
        if self._group is not None:
            torch.distributed.destroy_process_group(self._group)


def _heads_last(attend: Attend, q: Tensor, k: Tensor, v: Tensor, dropout: float, **apart: Tensor) -> Tensor:
    """`attend` in DeepSpeed's layout, (B, T, heads, K)."""
    heads_first = (heads.transpose(1, 2) for heads in (q, k, v))
    return attend(*heads_first, dropout, **apart).transpose(1, 2)
