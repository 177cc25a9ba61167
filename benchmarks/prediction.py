"""The planner's prediction for a case or a record: the only file here that asks the planner."""

from __future__ import annotations

from typing import Any

from benchmarks.cases import Case
from ds_gpt.config import Composed, Hardware, RunConfig
from ds_gpt.planner import Prediction, predict

OURS = "ds_gpt"  # the planner foresees this trainer; what others allocate is theirs


def predict_case(case: Case, composed: Composed) -> Prediction | None:
    """For a case before it is run; None where the planner has no answer."""
    return predict(composed) if case.trainer == OURS else None


def predict_record(record: dict[str, Any]) -> Prediction | None:
    """The same for a record, from its own configuration."""
    definition = record["definition"]
    if definition["trainer"] != OURS:
        return None
    run, ranks = RunConfig(**record["run"]), definition["ranks"]
    hardware = Hardware("cuda" if record["driver"] else "cpu", record["device"], ranks, bf16=record["precision"] == "bf16")
    micro = definition["micro_batch"]
    policy = None if definition["checkpointing"] == "off" else definition["checkpointing"]
    steps, item_tokens = run.batch.global_batch_size // (micro * ranks), record["tokens_per_step"] // run.batch.global_batch_size
    composed = Composed(run, record["deepspeed"], hardware, micro, steps, record["precision"], policy, item_tokens=item_tokens)
    return predict(composed)
