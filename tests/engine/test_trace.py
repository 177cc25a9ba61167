"""The trace on fake tensors counts what real gloo ranks allocate."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import asdict, replace
from typing import Any

import pytest
from forked_ranks import run_ranks
from tiny import CONFIGS

from ds_gpt.config import Composed, ConfigError, Hardware, load
from ds_gpt.engine.trace import Phase, Trace, trace_elsewhere

MIB = 2**20
MODEL = ("model.layers=3", "model.width=96", "model.heads=4", "model.context=64", "model.vocab_size=517", "batch.global_batch_size=8", "batch.micro_batch_size=2")
CASES = {
    "zero0-bf16": ("zero0", ()),
    "zero0-fp32": ("zero0", ("bf16.enabled=false",)),
    "zero1-bf16-full": ("zero1", ("activation_checkpointing.policy=full",)),
    "zero1-fp32": ("zero1", ("bf16.enabled=false",)),
    "zero2-bf16-selective": ("zero2", ("activation_checkpointing.policy=selective", "zero_optimization.reduce_bucket_size=100000")),
    "zero2-fp32": ("zero2", ("bf16.enabled=false", "zero_optimization.overlap_comm=false")),
    "zero3-bf16": ("zero3", ("zero_optimization.reduce_bucket_size=100000", "zero_optimization.stage3_param_persistence_threshold=1000")),
    "zero3-fp32": ("zero3", ("bf16.enabled=false",)),
}  # fmt: skip


def composed(case: str, world_size: int = 2) -> tuple[str, list[str], Hardware, Composed]:
    deepspeed, overrides = CASES[case]
    hardware, settings = Hardware("cuda", "NVIDIA A100-SXM4-40GB", world_size, bf16=True), [*MODEL, *overrides]
    path = str(CONFIGS / f"{deepspeed}.json")
    return path, settings, hardware, load(CONFIGS / "runs" / "quickstart.yaml", path, hardware, settings)


def measured(ranks: Any, run: Composed) -> Trace:
    from ds_gpt.engine.trace import Allocations, measure

    dispatch = Allocations.__torch_dispatch__

    def patient(self: Allocations, func: Any, *args: Any) -> Any:
        result = dispatch(self, func, *args)
        if func.namespace == "c10d":
            time.sleep(0.02)  # gloo's threads let go of a collective's tensors a moment after it is done
        return result

    Allocations.__torch_dispatch__ = patient
    return measure(run, ranks)


@pytest.mark.parametrize("case", CASES)
def test_the_trace_is_what_real_ranks_allocate(case: str) -> None:
    path, settings, hardware, run = composed(case)
    real = run_ranks(2, measured, run)[0]
    traced = trace_elsewhere(str(CONFIGS / "runs" / "quickstart.yaml"), path, hardware, settings)
    assert [phase.name for phase in traced.phases] == [phase.name for phase in real.phases]
    assert traced.peak_bytes > MIB
    for ours, theirs in zip(traced.phases, real.phases, strict=True):
        assert abs(ours.bytes - theirs.bytes) < 0.1 * MIB, (ours, theirs)
        assert abs(ours.peak_bytes - theirs.peak_bytes) < 0.1 * MIB, (ours, theirs)
    for kind in ("weights", "masters", "moments", "gradients"):
        assert abs(traced.resident.get(kind, 0) - real.resident.get(kind, 0)) < 0.1 * MIB, kind
