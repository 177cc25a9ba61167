"""The trace on fake tensors counts what real gloo ranks allocate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from forked_ranks import run_ranks
from measured_ranks import measured
from tiny import CONFIGS

from ds_gpt.config import ConfigError, Hardware, load
from ds_gpt.engine.trace import Request, Trace, trace_elsewhere

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
    "zero1-fp32-sequence": ("zero1", ("bf16.enabled=false", "parallel.sequence=2", "model.positions=rotary")),
    "zero1-fp32-tensor": ("zero1", ("bf16.enabled=false", "parallel.tensor=2")),
}  # fmt: skip


RUN = str(CONFIGS / "runs" / "quickstart.yaml")


def request(case: str, world_size: int = 2) -> Request:
    deepspeed, overrides = CASES[case]
    hardware = Hardware("cuda", "NVIDIA A100-SXM4-40GB", world_size, bf16=True)
    return Request(RUN, str(CONFIGS / f"{deepspeed}.json"), hardware, (*MODEL, *overrides))


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return dict(zip(CASES, trace_elsewhere([request(case) for case in CASES]), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_trace_is_what_real_ranks_allocate(case: str, traces: dict[str, Trace]) -> None:
    asked = request(case)
    run, traced = load(asked.config, asked.deepspeed_config, asked.hardware, asked.overrides), traces[case]
    for _ in range(3):  # on a busy machine gloo's threads hold a tensor longer than `measured` waits
        real = run_ranks(2, measured, run)[0]
        pairs = [*zip(traced.phases, real.phases, strict=True)]
        if all(abs(a - b) < 0.1 * MIB for p, q in pairs for a, b in ((p.bytes, q.bytes), (p.peak_bytes, q.peak_bytes))):
            break
    assert [phase.name for phase in traced.phases] == [phase.name for phase in real.phases]
    assert traced.peak_bytes > MIB
    for ours, theirs in zip(traced.phases, real.phases, strict=True):
        assert abs(ours.bytes - theirs.bytes) < 0.1 * MIB, (ours, theirs)
        assert abs(ours.peak_bytes - theirs.peak_bytes) < 0.1 * MIB, (ours, theirs)
    for kind in ("weights", "masters", "moments", "gradients"):
        assert abs(traced.resident.get(kind, 0) - real.resident.get(kind, 0)) < 0.1 * MIB, kind


def test_a_trace_of_256_ranks_shards_what_2_ranks_do(traces: dict[str, Trace]) -> None:
    settings = ("batch.global_batch_size=512",)
    asked = request("zero2-fp32", world_size=256)
    (many,) = trace_elsewhere([replace(asked, overrides=(*asked.overrides, *settings))])
    few = traces["zero2-fp32"]
    assert many.resident["weights"] == pytest.approx(few.resident["weights"], rel=0.02)
    assert many.resident["moments"] < few.resident["moments"] / 100


def test_what_cannot_be_composed_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no_such.yaml' does not exist"):
        trace_elsewhere([replace(request("zero2-fp32"), config=str(tmp_path / "no_such.yaml"))])


def test_a_trace_that_takes_too_long_is_ended() -> None:
    with pytest.raises(ConfigError, match="not done after 0 s"):
        trace_elsewhere([request("zero2-fp32")], deadline_s=0.2)
