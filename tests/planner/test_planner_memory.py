"""The analytic memory against the trace of the real engine."""

from __future__ import annotations

import json
import os

import pytest
from traced_cases import RECORD, Case, cases, hardware, paths

from ds_gpt.config import ConfigError, Hardware, load
from ds_gpt.planner import predict
from ds_gpt.planner.memory import Memory, memory

CASES = {case[0]: case for case in cases()}
TRACED = json.loads(RECORD.read_text())
TOLERANCE = 0.02  # what is left out: tensors of a few numbers, and the order of what ends at the same moment
LIVE = (
    "wide zero0 full bf16 ranks8", "deep zero1 selective fp32 ranks2", "vocabulary zero2 null bf16 ranks8",
    "short zero3 selective bf16 ranks8", "long llama zero0 null bf16 ranks8", "vocabulary llama chunks zero3 null bf16 ranks2",
    "long llama sequence 2 zero1 null bf16 ranks8", "long sft lora zero1 null bf16 ranks2", "vocabulary dpo lora chunks zero3 full bf16 ranks8",
    "8192 narrow window kv_heads zero1 null bf16 ranks8",
)
LIVE = tuple(CASES) if os.environ.get("TRACE_ALL") else LIVE  # an hour


def predicted(case: Case) -> Memory:
    return memory(load(*paths(case), hardware(case[3]), case[4]))


@pytest.mark.parametrize("name", TRACED)
def test_the_prediction_is_what_was_traced(name: str) -> None:
    ours, traced = predicted(CASES[name]), TRACED[name]
    assert ours.peak.bytes == pytest.approx(traced["peak_bytes"], rel=TOLERANCE)
    assert ours.host_bytes == pytest.approx(traced["host_bytes"], rel=TOLERANCE)
    assert sum(ours.peak.kinds.values()) == ours.peak.bytes
    assert min(ours.peak.kinds.values()) >= 0


def test_the_trace_still_says_the_same() -> None:
    """A change of the model, of the engine or of DeepSpeed shows here."""
    from ds_gpt.engine.trace import Request, trace_elsewhere

    chosen = [CASES[name] for name in LIVE]
    traces = trace_elsewhere([Request(*paths(case), hardware(case[3]), case[4]) for case in chosen], deadline_s=7200)
    for case, traced in zip(chosen, traces, strict=True):
        assert predicted(case).peak.bytes == pytest.approx(traced.peak_bytes, rel=TOLERANCE), case[0]


def gpt_1b(*overrides: str, ranks: int = 8) -> Memory:
    case = ("", "gpt_1b", "zero2", ranks, overrides)
    return predicted(case)


def test_full_checkpointing_shrinks_activations_and_nothing_else() -> None:
    off, full = gpt_1b(), gpt_1b("activation_checkpointing.policy=full")
    assert full.peak.kinds["activations"] < off.peak.kinds["activations"] / 5
    assert full.peak.kinds["weights"] == off.peak.kinds["weights"]


def test_two_reduce_buckets_where_communication_overlaps() -> None:
    one, two = (gpt_1b("activation_checkpointing.policy=full", f"zero_optimization.overlap_comm={overlap}") for overlap in ("false", "true"))
    assert two.peak.bytes - one.peak.bytes == pytest.approx(50_000_000 * 2, rel=0.01)


def test_the_state_shrinks_with_the_ranks() -> None:
    few, many = gpt_1b(ranks=8), gpt_1b("batch.global_batch_size=8192", ranks=1024)
    assert many.resident["moments"] == pytest.approx(few.resident["moments"] / 128, rel=0.01)


def test_what_it_has_no_figures_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="torch_autocast is enabled"):
        gpt_1b("torch_autocast.enabled=true")
    with pytest.raises(ConfigError, match="only the tokenizer knows V"):
        gpt_1b("model.vocab_size=auto")


def test_benchmarks_ask_for_both_at_once() -> None:
    composed = load(*paths(("", "gpt_1b", "zero2", 8, ())), hardware(8))
    prediction = predict(composed)
    assert prediction.peak_bytes == memory(composed).peak.bytes
    assert prediction.tokens_per_s > 100_000
    assert predict(load(*paths(("", "gpt_1b", "zero2", 8, ())), Hardware("cuda", "an unknown GPU", 8, bf16=True))).tokens_per_s is None
