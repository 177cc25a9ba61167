"""A running account of memory: what is taken, what is given back, and when most was held."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True)
class Moment:
    """Memory at its fullest within a phase.

    Attributes:
        phase: where in the step.
        bytes: how much was held.
        kinds: the same, by kind.
    """

    phase: str
    bytes: int
    kinds: dict[str, int]


class Ledger:
    """Bytes held now, by kind, and the fullest moment of each phase."""

    def __init__(self) -> None:
        self.held: dict[str, int] = defaultdict(int)
        self.total = 0
        self.moments: list[Moment] = []
        self._peak = -1
        self._kinds: dict[str, int] = {}

    def take(self, kind: str, size: float) -> None:
        """Allocate."""
        self.held[kind] += int(size)
        self.total += int(size)
        if self.total > self._peak:
            self._peak = self.total
            self._kinds = dict(self.held)

    def give(self, kind: str, size: float) -> None:
        """Free."""
        self.held[kind] -= int(size)
        self.total -= int(size)

    def end(self, phase: str) -> None:
        """A phase ends."""
        self.moments.append(Moment(phase, self._peak, {kind: size for kind, size in self._kinds.items() if size}))
        self._peak, self._kinds = self.total, dict(self.held)

    def fullest(self) -> Moment:
        """The moment that decides whether it fits."""
        return max(self.moments, key=lambda moment: moment.bytes)
