"""Schedules by hand, and against the learning rates that a published run logged."""

import math
import subprocess
import sys
from itertools import pairwise

import pytest

from ds_gpt.config import RunConfig
from ds_gpt.learning.schedule import constant, cosine, noam, scaled_lr, schedule


def run_config(*, lr=4e-4, lr_scaling="none", steps=15_000, width=64, **schedule_section) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "test",
            "model": {"layers": 1, "width": width, "heads": 1, "context": 8},
            "batch": {"global_batch_size": 8},
            "optimizer": {"lr": lr, "lr_scaling": lr_scaling},
            "schedule": schedule_section,
            "training": {"steps": steps},
        }
    )


PUBLISHED = {
    0: "1.13e-06",
    50: "5.77e-05",
    1000: "1.13e-03",
    13_550: "6.86e-05",
    14_500: "4.34e-05",
    14_950: "4.00e-05",
}


@pytest.mark.parametrize("step, logged", PUBLISHED.items())
def test_reproduces_the_published_run_of_the_1b_model(step, logged):
    """8 ranks, lr 4e-4 scaled by sqrt(8), 1000 warm-up steps, 15,000 steps, minimum 4e-5 that is not scaled."""
    run = run_config(name="cosine", warmup_steps=1000, min_lr=4e-5, lr_scaling="sqrt_world_size")
    assert f"{schedule(run, world_size=8)(step):.2e}" == logged


def test_cosine_by_hand():
    rate = {"lr": 1.0, "min_lr": 0.2, "warmup_steps": 4, "decay_steps": 12}
    by_hand = {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0, 8: 0.6, 12: 0.2, 13: 0.2, 10**9: 0.2}
    assert {step: cosine(step, **rate) for step in by_hand} == pytest.approx(by_hand)
    assert cosine(6, **rate) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.sqrt(0.5)))


def test_cosine_never_jumps():
    rate = {"lr": 1e-3, "min_lr": 1e-5, "warmup_steps": 100, "decay_steps": 1000}
    rates = [cosine(step, **rate) for step in range(1200)]
    assert max(rates) == 1e-3 and rates.index(1e-3) == 99
    assert all(abs(b - a) <= 1e-3 / 100 * 1.001 for a, b in pairwise(rates))
    assert rates[:100] == sorted(rates[:100]) and rates[99:] == sorted(rates[99:], reverse=True)
    assert cosine(999, **rate) == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize("decay_steps", [1, 4, 5])
def test_cosine_without_room_to_decay_goes_from_warmup_to_the_minimum(decay_steps):
    rates = [cosine(step, lr=1.0, min_lr=0.1, warmup_steps=5, decay_steps=decay_steps) for step in range(7)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 0.1, 0.1])


def test_cosine_without_warmup_starts_at_the_peak():
    assert cosine(0, lr=1.0, min_lr=0.0, warmup_steps=0, decay_steps=10) == 1.0


def test_noam_by_hand():
    # The base model of the paper: width 512, 4000 warm-up steps, peak 7e-4.
    rate = {"width": 512, "warmup_steps": 4000}
    assert noam(0, **rate) == pytest.approx(512**-0.5 * 4000**-1.5)
    assert noam(1999, **rate) == pytest.approx(0.5 * noam(3999, **rate))
    assert noam(3999, **rate) == pytest.approx(1 / math.sqrt(512 * 4000)) == pytest.approx(6.99e-4, rel=1e-3)
    assert noam(15_999, **rate) == pytest.approx(0.5 * noam(3999, **rate))
    assert noam(7, width=64, warmup_steps=4, factor=2.0) == pytest.approx(2.0 / 8 / math.sqrt(8))


def test_noam_peaks_at_the_end_of_warmup_without_a_jump():
    rates = [noam(step, width=64, warmup_steps=50) for step in range(200)]
    assert rates.index(max(rates)) == 49
    assert all(abs(b - a) <= rates[0] * 1.001 for a, b in pairwise(rates))


def test_noam_without_warmup_is_the_decay_alone():
    assert noam(3, width=4, warmup_steps=0) == pytest.approx(0.25)


def test_constant_by_hand():
    assert [constant(step, lr=0.3, warmup_steps=3) for step in range(5)] == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.3])
    assert constant(0, lr=0.3) == 0.3


@pytest.mark.parametrize("name", ["cosine", "noam", "constant"])
def test_the_first_update_is_small_but_not_lost(name):
    rate = schedule(run_config(name=name, warmup_steps=100), world_size=1)
    assert rate(0) == pytest.approx(rate(99) / 100)


def test_scaled_lr():
    assert scaled_lr(1e-3, "none", 64) == 1e-3
    assert scaled_lr(1e-3, "sqrt_world_size", 64) == pytest.approx(8e-3)
    with pytest.raises(ValueError, match="linear"):
        scaled_lr(1e-3, "linear", 64)


def test_schedule_reads_the_run():
    cosine_run = run_config(name="cosine", warmup_steps=2, decay_steps=10, min_lr=1e-5, steps=20)
    assert schedule(cosine_run, 1)(10) == 1e-5
    assert schedule(run_config(name="cosine", min_lr=1e-5, steps=20), 1)(19) > 1e-5  # auto: training.steps
    assert schedule(run_config(name="noam", lr=2.0, warmup_steps=4, width=64, lr_scaling="sqrt_world_size"), 4)(
        3
    ) == pytest.approx(noam(3, width=64, warmup_steps=4, factor=4.0))
    assert schedule(run_config(name="constant", lr=0.5), 1)(10**6) == 0.5


def test_min_lr_is_never_scaled():
    run = run_config(name="cosine", min_lr=4e-5, steps=10, lr_scaling="sqrt_world_size")
    assert schedule(run, world_size=64)(10) == 4e-5


def test_schedule_loads_without_torch():
    code = "import sys, ds_gpt.learning.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
