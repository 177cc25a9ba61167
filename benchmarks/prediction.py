"""The planner's prediction, where there is a planner: the only file here that knows of it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ds_gpt.config import Composed, Hardware, RunConfig


@dataclass(frozen=True)
class Predicted:
    """What the planner foresees for a case.

    Attributes:
        peak_bytes: of the fullest rank.
        tokens_per_s: of all ranks; None where the planner does not know the device's speed.
    """

    peak_bytes: int
    tokens_per_s: float | None


def available() -> bool:
    """Whether this checkout has a planner."""
    return find_spec("ds_gpt.planner") is not None


def predict(composed: Composed) -> Predicted | None:
    """What the planner says of a configuration; None without a planner, or where it has no answer."""
    if not available():
        return None
    import ds_gpt.planner as planner

    if not hasattr(planner, "predict"):
        return None
    answer = planner.predict(composed)
    return Predicted(answer.peak_bytes, getattr(answer, "tokens_per_s", None))


def predict_record(record: dict[str, Any]) -> Predicted | None:
    """The same for a record, from its own configuration."""
    definition = record["definition"]
    if not available() or definition["trainer"] != "ds_gpt":
        return None
    run, ranks = RunConfig(**record["run"]), definition["ranks"]
    hardware = Hardware("cuda" if record["driver"] else "cpu", record["device"], ranks, bf16=record["precision"] == "bf16")
    micro = definition["micro_batch"]
    policy = None if definition["checkpointing"] == "off" else definition["checkpointing"]
    composed = Composed(run, record["deepspeed"], hardware, micro, run.batch.global_batch_size // (micro * ranks), record["precision"], policy)
    return predict(composed)
