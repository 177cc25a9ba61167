"""Where a run stands, besides its weights and optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RunState:
    """The few numbers from which everything else of a run follows.

    There is no sampler state and no random state in it: the batch of a step is arithmetic on (seed, ``data_step``), and
    dropout is drawn from (seed, step, rank).

    Attributes:
        step: optimizer steps completed.
        data_step: global batches used or skipped; ahead of ``step`` once a rollback has skipped data.
        tokens: tokens trained on.
        lr_factor: what the schedule's learning rate is multiplied by, after a rollback.
        lr_factor_until: the step at which that ends.
        rollbacks: how often the run was rolled back.
        skipped: (first, last) global batches that rollbacks skipped.
    """

    step: int = 0
    data_step: int = 0
    tokens: int = 0
    lr_factor: float = 1.0
    lr_factor_until: int = 0
    rollbacks: int = 0
    skipped: tuple[tuple[int, int], ...] = ()

    def after_step(self, tokens: int) -> RunState:
        """The state one optimizer step of `tokens` tokens later."""
        return replace(self, step=self.step + 1, data_step=self.data_step + 1, tokens=self.tokens + tokens)

    def factor(self) -> float:
        """Factor on the learning rate of the next step."""
        return self.lr_factor if self.step < self.lr_factor_until else 1.0
