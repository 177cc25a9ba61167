"""Bytes that the planner foresees, kind by kind, against real DeepSpeed ranks on this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from forked_ranks import run_ranks
from measured_ranks import measured
from tiny import CONFIGS

from ds_gpt.config import Composed, Hardware, load
from ds_gpt.planner.memory import memory, memory_of_stage
from ds_gpt.planner.shapes import Shapes

MODEL = ("model.layers=3", "model.width=256", "model.heads=4", "model.context=64", "model.vocab_size=1024", "batch.micro_batch_size=2")
SMALL_BUCKETS = ("zero_optimization.reduce_bucket_size=100000", "zero_optimization.stage3_param_persistence_threshold=1000")
ADAPTERS = ("lora.rank=8", "lora.targets=[qkv, up, down]")
CASES = {
    "zero0": ("zero0", 1, ()),
    "zero1, accumulation": ("zero1", 2, ()),
    "zero2, accumulation": ("zero2", 2, ("bf16.enabled=false",)),
    "zero3, accumulation": ("zero3", 2, SMALL_BUCKETS),
    "zero2, offload, accumulation": ("zero2_offload", 2, SMALL_BUCKETS[:1]),
    "zero3, offload": ("zero3_offload", 1, SMALL_BUCKETS),
    "zero1, adapters, accumulation": ("zero1", 2, ADAPTERS),
    "zero2, adapters, conversations": ("zero2", 1, (*ADAPTERS, "stage=sft", "bf16.enabled=false")),
    "zero3, adapters, pairs": ("zero3", 1, (*ADAPTERS, *SMALL_BUCKETS, "stage=dpo")),
    "zero0, rewards": ("zero0", 1, ("stage=reward",)),
}  # fmt: skip
KINDS = ("weights", "masters", "moments", "gradients", "buckets")
TOLERANCE = 0.02
ROUNDING_BYTES = 40 * 512  # the log rounds each tensor up to 512 bytes, as CUDA's allocator does


def composed(deepspeed: str, overrides: tuple[str, ...], ranks: int = 2) -> Composed:
    hardware = Hardware("cuda", "NVIDIA A100-SXM4-40GB", ranks, bf16=True)
    run = load(str(CONFIGS / "runs" / "quickstart.yaml"), str(CONFIGS / f"{deepspeed}.json"), hardware, (*MODEL, *overrides))
    optimizer = run.deepspeed["optimizer"]  # without the Adam that DeepSpeed compiles; fused: no temporaries in the step
    return replace(run, deepspeed={**run.deepspeed, "optimizer": {**optimizer, "params": {**optimizer["params"], "torch_adam": True, "fused": True}}})


@pytest.mark.parametrize(("stage", "degree", "precision"), [(1, "tensor", "fp32"), (1, "sequence", "fp32"), (1, "pipeline", "fp32"), (0, "pipeline", "bf16")])
def test_the_peak_is_that_of_ranks_that_share_a_model(stage: int, degree: str, precision: str) -> None:
    sizes = ("model.layers=4", "model.context=128", "batch.global_batch_size=8", f"bf16.enabled={str(precision == 'bf16').lower()}")
    run = composed(f"zero{stage}", (*sizes, *SMALL_BUCKETS[:1], f"parallel.{degree}=2"))
    fullest = max(real.peak_bytes for real in run_ranks(2, measured, run))  # the stages of a pipeline differ
    assert memory(run).peak.bytes == pytest.approx(fullest, rel=TOLERANCE)


def test_the_peak_of_each_stage_is_that_of_its_rank() -> None:
    """Of 1, 1, 2 and 1 blocks: the head takes as long as two, so the last stage has one."""
    sizes = ("model.layers=5", "model.vocab_size=6500", "batch.global_batch_size=8", "bf16.enabled=false", "parallel.pipeline=4")
    run = composed("zero1", (*sizes, *SMALL_BUCKETS[:1]), ranks=4)
    shapes = Shapes.of(run)
    assert [len(shapes.blocks(stage)) for stage in range(4)] == [1, 1, 2, 1]
    real = [rank.peak_bytes for rank in run_ranks(4, measured, run)]
    planned = [memory_of_stage(shapes, stage).peak.bytes for stage in range(4)]
    assert planned == pytest.approx(real, rel=TOLERANCE), (planned, real)
    assert memory(run).peak.bytes == max(planned)


@pytest.mark.parametrize("case", CASES)
def test_each_kind_is_what_a_real_rank_holds(case: str) -> None:
    deepspeed, accumulation, overrides = CASES[case]
    run = composed(deepspeed, (f"batch.global_batch_size={4 * accumulation}", *overrides))
    planned, real = memory(run), run_ranks(2, measured, run)[0]
    if ADAPTERS[0] in overrides:  # three maps of three blocks, from 256 to 768 and 1024, and back from 1024
        trained = 3 * 8 * (256 + 768 + 2 * (256 + 1024))
        assert real.resident["moments"] == pytest.approx(2 * 4 * trained / (2 if run.zero_stage else 1), rel=TOLERANCE, abs=ROUNDING_BYTES)
        assert real.resident.get("gradients", 0) <= 4 * trained + ROUNDING_BYTES
    found = {kind: (planned.resident.get(kind, 0), real.resident.get(kind, 0)) for kind in KINDS}
    for kind, (ours, theirs) in found.items():
        assert ours == pytest.approx(theirs, rel=TOLERANCE, abs=ROUNDING_BYTES), (kind, found)
    assert planned.host_bytes == pytest.approx(real.host_bytes, rel=TOLERANCE, abs=ROUNDING_BYTES)
    if not planned.host_bytes:  # how long copies to the host keep what they copy is the accelerator's affair; the recipes' traces hold these peaks
        assert planned.peak.bytes == pytest.approx(real.peak_bytes, rel=TOLERANCE)
