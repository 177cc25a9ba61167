"""How the next token is chosen. Imports no torch, so that a mistyped option is told at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_gpt.config import ConfigError, Problem


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits; the fields act in this order.

    Attributes:
        repetition_penalty: logits of tokens that occurred before are divided by it where positive, else multiplied
            (Keskar et al. 2019, section 4.1, with the sign taken care of); 1 changes nothing.
        temperature: divides the logits; 0 is greedy.
        top_k: only the k likeliest tokens (Fan et al. 2018); None: all.
        top_p: only the likeliest tokens that together have this probability (Holtzman et al. 2020); None: all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Raises ConfigError with all that is impossible."""
        problems = []
        if not (0 <= self.temperature < math.inf):
            problems.append(
                Problem(
                    f"temperature {self.temperature:g} is not a number from 0 on",
                    "it divides the logits",
                    "0 is greedy, 1 the model's own distribution",
                )
            )
        if self.top_k is not None and self.top_k < 1:
            problems.append(
                Problem(f"top-k {self.top_k} keeps no token", fix="give 1 or more, or leave it out to keep all")
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            problems.append(
                Problem(
                    f"top-p {self.top_p:g} is no probability",
                    fix="give more than 0 and at most 1, or leave it out to keep all tokens",
                )
            )
        if not 0 < self.repetition_penalty < math.inf:
            problems.append(
                Problem(
                    f"repetition penalty {self.repetition_penalty:g} is not positive",
                    "it divides logits",
                    "1 changes nothing, 1.1 to 1.3 is usual",
                )
            )
        if problems:
            raise ConfigError(problems)
