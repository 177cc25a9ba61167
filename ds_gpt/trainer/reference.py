"""Log-probabilities of the pairs' answers under the model that a run starts from.

They are taken once, before the first step, and kept. So no second copy of the model is ever in memory, with adapters or
without, and the reference of a resumed run is that of the run: the engine is built from the same weights first.
"""

from __future__ import annotations

import numpy as np

from ds_gpt.data import Dataset, rank_share
from ds_gpt.data.loader import window_batch
from ds_gpt.data.rows import Rows
from ds_gpt.engine.engine import Engine
from ds_gpt.learning.loss import IGNORE_INDEX


def remember_reference(engine: Engine, dataset: Dataset) -> None:
    """Fill in the reference log-probabilities of both splits; every rank must call it."""
    for rows in (dataset.train, dataset.val):
        assert isinstance(rows, Rows)
        _fill(engine, rows)


def _fill(engine: Engine, rows: Rows) -> None:
    ranks, grid, size = engine.ranks, engine.grid, engine.composed.micro_batch_size
    mine = rank_share(np.arange(len(rows.counted)), grid.data_rank, grid.data_ranks)
    found = []
    for first in range(0, len(mine), size):
        inputs, targets, _ = window_batch(rows, mine[first : first + size], rows.arrays[0].shape[-1], IGNORE_INDEX)
        found.append(engine.log_probs(inputs.to(ranks.device), targets.to(ranks.device)).view(-1, 2).cpu().numpy())
    for numbers, log_probs in ranks.gather((mine, np.concatenate(found))):
        real = numbers >= 0
        rows.arrays[2][numbers[real]] = log_probs[real]
