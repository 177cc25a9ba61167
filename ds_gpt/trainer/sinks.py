"""Where metrics go: a JSONL file, TensorBoard, and the person at the console. Rank 0 alone has sinks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Protocol

Metrics = dict[str, Any]


class Sink(Protocol):
    """Receives one dictionary of metrics per logged step."""

    def write(self, metrics: Metrics) -> None:
        """Record the metrics of a step."""

    def close(self) -> None:
        """Flush and release."""


class MetricsFile:
    """``metrics.jsonl``: one JSON object a line, flushed at once so that other tools can follow.

    A number that is not finite (a skipped step's gradient norm) is written as null, since JSON has no word for it.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, metrics: Metrics) -> None:
        """Append a line."""
        finite = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in metrics.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """TensorBoard scalars, by step."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        # What an interrupted run wrote of the steps that are about to be trained again is not shown.
        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def write(self, metrics: Metrics) -> None:
        """Add every number but the step as a scalar, with the perplexity beside each loss of tokens."""
        step = metrics["step"]
        for key, value in metrics.items():
            if key != "step" and value is not None:
                self._writer.add_scalar(f"train/{key}" if not key.startswith("val_") else f"validation/{key[4:]}", value, step)
        if "val_loss" in metrics and "val_accuracy" not in metrics:  # of pairs it means nothing
            self._writer.add_scalar("validation/perplexity", perplexity(metrics["val_loss"]), step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
