"""Time, throughput, MFU and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import tiny

from ds_gpt.config import Composed, Hardware
from ds_gpt.model.counts import flops_per_token, training_flops_per_token
from ds_gpt.trainer import measurements
from ds_gpt.trainer.measurements import Stopwatch, peak_bytes


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 5.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measurements, "time", clock)
    return clock


def on(device: str, world_size: int = 8, precision: str = "bf16") -> Composed:
    hardware = Hardware("cuda", device, world_size, bf16=True)
    return replace(tiny("zero1", 8), hardware=hardware, precision=precision)  # type: ignore[arg-type]


def test_pauses_are_left_out_and_each_reading_starts_anew(clock: Clock) -> None:
    stopwatch = Stopwatch(tiny("zero1", 1))
    for _ in range(4):
        clock.now += 0.5
        stopwatch.step_done()
    with stopwatch.paused():
        clock.now += 100
    with pytest.raises(ZeroDivisionError), stopwatch.paused():
        clock.now += 100
        _ = 1 / 0
    speed = stopwatch.read()
    assert (speed.step_s, speed.tokens_per_s, speed.mfu) == (pytest.approx(0.5), pytest.approx(512), None)
    clock.now += 2
    stopwatch.step_done()
    assert stopwatch.read().step_s == pytest.approx(2), "neither earlier steps nor earlier pauses"


def test_mfu_of_a_known_device(clock: Clock) -> None:
    """A100: 312 TFLOP/s in bf16, 156 in fp32 (TF32); eight of them."""
    for precision, peak in (("bf16", 312e12), ("fp32", 156e12)):
        composed = on("NVIDIA A100-SXM4-40GB", 8, precision)
        stopwatch = Stopwatch(composed)
        clock.now += 0.25
        stopwatch.step_done()
        assert stopwatch.read().mfu == pytest.approx(256 / 0.25 * flops_per_token(composed.run.model) / (8 * peak))


@pytest.mark.parametrize("stage", ["dpo", "reward"])
def test_tokens_of_pairs_are_those_of_both_sequences_as_long_as_they_are(clock: Clock, stage: str) -> None:
    """16 pairs, the longest sequence of which has 11 tokens, of 16 that would fit."""
    run = tiny("zero1", 8, [f"stage={stage}", "lora.rank=4"]).run
    composed = replace(on("NVIDIA A100-SXM4-40GB"), run=run)
    assert composed.tokens_per_step == 16 * 2 * 16
    composed = replace(composed, item_tokens=2 * 11)
    stopwatch = Stopwatch(composed)
    clock.now += 0.25
    stopwatch.step_done()
    speed = stopwatch.read()
    assert speed.tokens_per_s == pytest.approx(16 * 2 * 11 / 0.25)
    flops = training_flops_per_token(run.model, run.lora, stage == "reward", context=11)
    assert speed.mfu == pytest.approx(16 * 2 * 11 / 0.25 * flops / (8 * 312e12))
    assert flops < flops_per_token(run.model)


def test_mfu_of_the_published_run() -> None:
    """1.011e9 parameters, 58,300 tokens/s on 8 x A100: 6 N + 12 L D T FLOPs a token give about 17 %."""
    config = tiny("zero1", 8, ["model.layers=20", "model.width=2048", "model.heads=16", "model.context=2048", "model.vocab_size=65"]).run.model
    share = measurements.mfu(58_300, flops_per_token(config), 8 * 312e12)
    assert share == pytest.approx(58_300 * (6 * 1.007e9 + 12 * 20 * 2048 * 2048) / (8 * 312e12), rel=0.01)
    assert 0.15 < share < 0.18


def test_mfu_of_an_unknown_device_is_not_guessed(clock: Clock) -> None:
    for composed in (on("NVIDIA A42"), tiny("zero1", 2)):
        stopwatch = Stopwatch(composed)
        clock.now += 1
        stopwatch.step_done()
        assert stopwatch.read().mfu is None


def test_peak_bytes_is_this_process_s_own() -> None:
    before = peak_bytes(torch.device("cpu"))
    assert 20 << 20 < before < 64 << 30
    block = b"x" * (before + (64 << 20))  # more than has ever been resident
    after = peak_bytes(torch.device("cpu"))
    assert after >= before + (64 << 20)
    del block
    assert peak_bytes(torch.device("cpu")) >= after, "a peak does not fall"
