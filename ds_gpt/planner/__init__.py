"""Memory and speed of a run before it is started: arithmetic on the composed configuration. No torch, no DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass

from ds_gpt.config import Composed, ConfigError
from ds_gpt.planner.devices import DEVICES
from ds_gpt.planner.memory import memory
from ds_gpt.planner.speed import speed


@dataclass(frozen=True)
class Prediction:
    """What is foreseen for a run on the devices it was composed for.

    Attributes:
        peak_bytes: most that one rank allocates.
        tokens_per_s: of all ranks; None where the device is not a GPU of ``DEVICES``.
    """

    peak_bytes: int
    tokens_per_s: float | None


def predict(composed: Composed) -> Prediction | None:
    """Memory and speed of a composed run; None where the planner has no figures for it."""
    try:
        needed = memory(composed)
    except ConfigError:
        return None
    device = next((device for device in DEVICES.values() if device.kind == composed.hardware.kind == "cuda" and device.name == composed.hardware.name), None)
    # What is offloaded on a CPU stays in the same memory.
    peak_bytes = needed.peak.bytes + (needed.host_bytes if composed.hardware.kind == "cpu" else 0)
    return Prediction(peak_bytes, speed(composed, device).tokens_per_s if device else None)
