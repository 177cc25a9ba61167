"""What `diagnose` has to say, one thing at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """Something a good engineer would say.

    Attributes:
        kind: one word for programs.
        severity: "problem" costs the run, "warning" costs time or quality, "note" is good to know.
        what: what is seen, with steps and numbers.
        remedy: what to do.
        spans: (first, last) steps where it shows.
    """

    kind: str
    severity: Literal["problem", "warning", "note"]
    what: str
    remedy: str
    spans: tuple[tuple[int, int], ...] = ()
