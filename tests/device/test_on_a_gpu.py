"""What a CPU cannot show: CUDA, NCCL on one rank, bf16 at full speed, fused attention. ``python -m pytest tests/device``.

Every case runs as a suite would run it: in fresh processes, through ``benchmarks.worker``. What the records of the suite
``device_smoke`` must show is judged by ``benchmarks.checks``; here the same questions are put to small models, in less
time, with those that need two runs of one model.
"""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny

from benchmarks import checks, launch, machine, suite
from benchmarks.bench import Bench
from benchmarks.cases import Case
from benchmarks.prediction import predict_record
from benchmarks.results import Record
from ds_gpt.engine.ranks import Ranks

REPOSITORY = Path(__file__).resolve().parents[2]
SYNTHETIC = "data={corpus: synthetic, synthetic: {vocab_size: 65, branching: 4, tokens: 200000}}"
SMALL = (SYNTHETIC, "model.layers=4", "model.width=256", "model.heads=4", "model.context=256", "model.dropout=0")
# 50M parameters, 8,192 tokens: activations are most of its memory.
WIDE = (SYNTHETIC, "model.layers=8", "model.width=768", "model.heads=12", "model.context=1024", "model.dropout=0")


@functools.cache
def record(name: str, overrides: tuple[str, ...] = SMALL, **fields: Any) -> Record:
    """The record that a suite would keep of a case on one GPU."""
    case = Case(**{"name": name, "recipe": "shakespeare_char", "ranks": 1, "micro_batch": 8, "warmup": 2, "steps": 6, "overrides": overrides, **fields})
    here = machine.here("cuda")
    outcome = launch.run(case)
    assert outcome.status == "ok", f"{outcome.status}: {outcome.message}"
    run = suite.Run(suite.Suite("device", "", "cuda", here.name, here.bf16, 1, (case,)), [case], here, Path(), None, suite.Console())
    return run._record(case, outcome, None, 0.0)


def plain(precision: str) -> Record:
    return record("plain", trainer="ddp", precision=precision)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_draws_plain_pytorchs_curve_in_bf16(stage: int) -> None:
    found = record("stage", deepspeed=f"zero{stage}", precision="bf16")
    assert found["precision"] == "bf16" and found["driver"]
    assert checks.loss_difference(found, plain("bf16")) <= checks.CURVE_TOLERANCE


@pytest.mark.parametrize("stage", [1, 3])
def test_every_stage_draws_plain_pytorchs_curve_in_fp32(stage: int) -> None:
    """With TF32, whose products have 10 bits of mantissa, in both."""
    found = record("stage", deepspeed=f"zero{stage}", precision="fp32")
    assert checks.loss_difference(found, plain("fp32")) <= 1e-3


def test_a_gpu_and_a_cpu_draw_one_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same batches, weights and arithmetic, but for TF32."""
    on_gpu = plain("fp32")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    case = Case("cpu", "shakespeare_char", 1, 8, trainer="ddp", precision="fp32", warmup=1, steps=2, overrides=SMALL, threads=8)
    outcome = launch.run(case)
    assert outcome.status == "ok", outcome.message
    assert outcome.by_rank[0]["device"] != on_gpu["device"]
    assert checks.loss_difference({"losses": outcome.by_rank[0]["losses"]}, on_gpu) <= 1e-3


def test_fp16_scales_its_loss_and_trains() -> None:
    losses = record("fp16", deepspeed="fp16", steps=20)["losses"]
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recomputed_dropout_is_the_same_dropout(policy: str) -> None:
    """Recomputation must draw the masks of the forward pass again, in the flash kernel too, whose generator is the GPU's."""
    dropout = (*SMALL, "model.dropout=0.2")
    off = record("off", dropout, deepspeed="zero1", precision="bf16")
    on = record("on", dropout, deepspeed="zero1", precision="bf16", checkpointing=policy)
    assert checks.loss_difference(on, off) <= 1e-3
    other = record("other seed", (*dropout, "seed=7"), deepspeed="zero1", precision="bf16")
    assert checks.loss_difference(other, off) > 1e-3, "the tolerance tells one run from another"


def test_flash_attention_is_what_runs_in_bf16() -> None:
    ops, kernels = checks.attention_used(record("stage", deepspeed="zero1", precision="bf16"))
    assert ops and kernels and set(ops) <= set(checks._FLASH), (ops, kernels)
    ops, kernels = checks.attention_used(record("flash", deepspeed="zero1", precision="bf16", attention="flash"))
    assert ops == ["_scaled_dot_product_flash_attention"] and any("flash" in kernel for kernel in kernels), (ops, kernels)
    ops, kernels = checks.attention_used(record("math", deepspeed="zero1", precision="bf16", attention="math"))
    assert ops == ["_scaled_dot_product_attention_math"] and not kernels, (ops, kernels)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_checkpointing_saves_the_memory_that_was_predicted(policy: str) -> None:
    off = record("wide", WIDE, deepspeed="zero2", precision="bf16")
    on = record("wide", WIDE, deepspeed="zero2", precision="bf16", checkpointing=policy)
    measured, predicted = checks.saved_bytes(off, on), checks.predicted_saving(off, on, predict_record)
    assert predicted and predicted > 2**27
    assert measured == pytest.approx(predicted, rel=checks.MEMORY_TOLERANCE)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_peak_is_the_one_that_was_predicted(stage: int) -> None:
    found = record("wide", WIDE, deepspeed=f"zero{stage}", precision="bf16")
    predicted = predict_record(found)
    assert predicted and found["measured"]["memory"]["allocated_peak_bytes"] == pytest.approx(predicted.peak_bytes, rel=checks.MEMORY_TOLERANCE)
    assert found["measured"]["memory"]["reserved_peak_bytes"] >= found["measured"]["memory"]["allocated_peak_bytes"]


def test_compiled_and_eager_draw_one_curve() -> None:
    compiled = record("compiled", deepspeed="zero1", precision="bf16", compile=True, deadline_s=240)
    assert checks.loss_difference(compiled, record("stage", deepspeed="zero1", precision="bf16")) <= checks.CURVE_TOLERANCE


def test_the_clock_waits_for_the_gpu() -> None:
    """A step that only enqueues its kernels is timed to their end."""
    cycles, device = 200_000_000, torch.device("cuda", 0)

    class Trainee:
        on_phase = staticmethod(lambda name: None)

        def step(self, *args: Any) -> tuple[float, float]:
            torch.cuda._sleep(cycles)
            return 1.0, 1.0

    class Loader:
        def load(self, step: int) -> list[Any]:
            return []

    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(cycles)
    enqueued_s = time.perf_counter() - start
    torch.cuda.synchronize()
    truth_s = time.perf_counter() - start
    assert enqueued_s < 0.2 * truth_s, "nothing waits unless it is told to"
    made = Bench(tiny("zero0", 1), Ranks(0, 1, 0, 1, device), Trainee(), Loader())
    made.run([(3, nullcontext())])
    # A GPU that has just woken up counts its cycles more slowly.
    assert all(0.3 * truth_s < seconds < 3 * truth_s for seconds in made.steps_s), (made.steps_s, truth_s)


def test_the_smoke_suites_small_cases_pass_their_checks(tmp_path: Path) -> None:
    """One command, its records, its report and its status; the 1.011B cases are left to whoever runs the whole suite."""
    command = [sys.executable, "-m", "benchmarks", "--suite", "device_smoke", "--only", "10m-plain", "--only", "10m-z[12]", "--records", str(tmp_path)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "passed  ZeRO 1 runs in bf16" in ended.stdout and "FAILED" not in ended.stdout
    assert "## Checks" in (tmp_path / "report.md").read_text()
