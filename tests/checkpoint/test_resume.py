"""Stop and go on: the same run, bit for bit where the arithmetic is the same, to tolerance at any other arrangement."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from forked_ranks import run_ranks
from saving import load_and_train, train_and_save

STAGES = ("zero0", "zero1", "zero2", "zero3")
# fp32 sums in another order, as in tests/parity.
FP32_TOLERANCE = 1e-5

# Dropout, accumulation, and a batch that crosses an epoch's end at step 15: 255 windows, 16 a step.
HARD = ["model.dropout=0.1", "gradient_accumulation_steps=2", "gradient_clipping=0.75"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resume_is_exact_at_the_same_world_size(precision: str, tmp_path: Path) -> None:
    settings = {"fp32": [], "bf16": ["bf16.enabled=true"], "fp16": ["fp16.initial_scale_power=10", "fp16.loss_scale_window=4"]}[precision]
    if precision == "fp16":
        cases = [("fp16", [*HARD, *settings, f"zero_optimization.stage={stage}"], tmp_path / str(stage)) for stage in (1, 2, 3)]
    else:
        cases = [(name, [*HARD, *settings], tmp_path / name) for name in STAGES]
    if precision == "fp32":
        cases += [(name, HARD, tmp_path / name) for name in ("zero2_offload", "zero3_offload")]
    never_stopped = run_ranks(2, train_and_save, cases, 13, 18)
    resumed = run_ranks(2, load_and_train, cases, 18)
    for rank in range(2):
        for (name, *_), expected, found in zip(cases, never_stopped[rank], resumed[rank], strict=True):
            assert found[0] == expected[0], f"{name}: losses or norms differ"
            assert found[1] == expected[1], f"{name}: weights or moments differ"


def test_resume_at_any_world_size_and_stage(tmp_path: Path) -> None:
    sources = list(itertools.product((1, 2, 4), STAGES))
    curves = {}
    for world_size in (1, 2, 4):
        cases = [(stage, [], tmp_path / f"{world_size}-{stage}") for stage in STAGES]
        results = run_ranks(world_size, train_and_save, cases, 5, 9, deadline_s=240)[0]
        curves |= {(world_size, stage): curve for stage, (curve, _) in zip(STAGES, results, strict=True)}
    for number, world_size in enumerate((1, 2, 4)):
        # Each target takes every third source, another third at each world size: all pairs of stages and of world sizes occur.
        wanted = [(target, source) for (i, target), (j, source) in itertools.product(enumerate(STAGES), enumerate(sources)) if (i + j + number) % 3 == 0]
        cases = [(target, [], tmp_path / f"{source[0]}-{source[1]}") for target, source in wanted]
        results = run_ranks(world_size, load_and_train, cases, 9, deadline_s=400)[0]
        for (target, source), (curve, _) in zip(wanted, results, strict=True):
            expected = curves[source]
            worst = max(abs(a - b) / abs(b) for pair, right in zip(curve, expected, strict=True) for a, b in zip(pair, right, strict=True))
            assert worst < FP32_TOLERANCE, f"saved at {source}, resumed at {(world_size, target)}: {worst}"


def test_bf16_and_fp32_runs_resume_each_other(tmp_path: Path) -> None:
    cases = [("zero1", ["bf16.enabled=true"], tmp_path / "bf16"), ("zero1", [], tmp_path / "fp32")]
    (bf16, _), (fp32, _) = run_ranks(2, train_and_save, cases, 8, 10)[0]
    swapped = [("zero3", [], tmp_path / "bf16"), ("zero2", ["bf16.enabled=true"], tmp_path / "fp32")]
    (as_fp32, _), (as_bf16, _) = run_ranks(2, load_and_train, swapped, 10)[0]
    for found, expected in ((as_fp32, bf16), (as_bf16, fp32)):
        # One rounding to bf16 is 4e-3 of a weight; the loss averages them away.
        assert found[0][0] == pytest.approx(expected[0][0], rel=5e-4)
        assert found[1][0] == pytest.approx(expected[1][0], rel=2e-3)
