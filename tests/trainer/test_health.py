"""Health's judgement on histories: faults are found in time, and nothing is found where there is none."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from ds_gpt.config.run import HealthConfig
from ds_gpt.trainer.health import MIN_HISTORY, HealthMonitor, Streak, Verdict, spike_limit


def learning(steps: int, seed: int = 0, sigma: float = 0.05) -> np.ndarray:
    """A loss as it falls: steep, then slowly, with the noise of its batches."""
    return 1.5 + 3.0 * np.arange(1, steps + 1) ** -0.3 + np.random.default_rng(seed).normal(0, sigma, steps)


def judged(monitor: HealthMonitor, losses: Iterable[float], first: int = 1, grad_norm: float = 1.0, **more: float) -> list[Verdict]:
    """The verdicts that are not ok."""
    verdicts = [monitor.observe(step, float(loss), grad_norm, **more) for step, loss in enumerate(losses, first)]
    return [verdict for verdict in verdicts if verdict.severity != "ok"]


def kinds(verdicts: Sequence[Verdict]) -> list[tuple[str, str]]:
    return [(verdict.kind, verdict.severity) for verdict in verdicts]


def monitor(vocab_size: int | None = None, **settings: object) -> HealthMonitor:
    return HealthMonitor(HealthConfig(**settings), vocab_size)


@pytest.mark.parametrize("sigma", [0.0, 0.01, 0.05, 0.15])
def test_a_healthy_run_raises_no_alarm(sigma: float) -> None:
    """Steep early decay and Gaussian noise: 20 histories of 400 steps (200 of 1000 were simulated: no alarm either)."""
    for seed in range(20):
        assert judged(monitor(100), learning(400, seed, sigma)) == []


def test_noise_with_long_tails_is_no_reason_to_go_back() -> None:
    """Student's t with 3 degrees of freedom; now and then a lone step is reported, once in 2000 steps or so."""
    noise = np.random.default_rng(1).standard_t(3, (20, 500)) * 0.03
    verdicts = [verdict for row in noise for verdict in judged(monitor(100), learning(500, sigma=0) + row)]
    assert {verdict.severity for verdict in verdicts} <= {"warn"} and len(verdicts) < 20


@pytest.mark.parametrize("at", [40, 100, 500])
def test_a_spike_that_lasts_is_confirmed_after_patience(at: int) -> None:
    losses = learning(at + 20)
    losses[at:] += 2.0
    verdict = next(v for v in judged(monitor(), losses) if v.severity == "rollback")
    assert (verdict.kind, verdict.since, verdict.step) == ("loss_spike", at + 1, at + 3)
    assert verdict.good_step == at - 1, "the loss of a step is measured before its update: update `since` - 1 may have done it"
    assert f"step {at + 3}" in verdict.message and verdict.remedy


def test_a_single_bad_batch_is_told_and_nothing_more() -> None:
    losses = learning(300)
    losses[200] = 1000.0
    well = monitor()
    verdicts = judged(well, losses[:201])
    assert kinds(verdicts) == [("loss_spike", "warn")] and well.suspect
    assert judged(well, losses[201:], first=202) == [] and not well.suspect


def test_the_spike_does_not_enter_the_window() -> None:
    """Every third step is far up: the limit stays where it was, so the small one that lasts is still found."""
    losses = learning(400)
    losses[200:320:3] += 3
    losses[340:] += 1
    verdicts = judged(monitor(), losses)
    assert [v.since for v in verdicts if v.severity == "rollback"] == [341]


def test_a_small_rise_in_a_quiet_run_is_no_spike() -> None:
    losses = learning(300, sigma=0.001)
    losses[200:] += 0.15
    assert judged(monitor(), losses) == []


def test_after_a_rollback_the_losses_of_that_time_are_normal_and_a_new_spike_is_not() -> None:
    losses = learning(1000)
    well = monitor()
    judged(well, losses[:900])
    judged(well, losses[900:903] + 5, first=901)
    well.rolled_back(400)
    assert not well.suspect
    again = learning(600, seed=7)[400:] + 0.05  # other data
    assert judged(well, again, first=401) == []
    well.rolled_back(400)
    assert [v.since for v in judged(well, again[:5] + 5, first=401) if v.severity == "rollback"] == [401], "judged at once"


def test_a_rollback_leaves_what_a_run_that_never_went_further_has() -> None:
    losses = learning(700)
    back, straight = monitor(100), monitor(100)
    judged(back, losses)
    back.rolled_back(500)
    judged(straight, losses[:500])
    future = learning(900)[500:]
    future[200:] += 1
    assert judged(back, future, first=501) == judged(straight, future, first=501) != []


def test_an_empty_monitor_after_a_resume_is_safe() -> None:
    assert judged(monitor(100), learning(2000)[1500:], first=1501) == []
    blind = monitor(100)
    assert judged(blind, [2.0] * (MIN_HISTORY - 4) + [9.0] * 3) == [], "too little to judge by"


def test_verdicts_depend_on_the_numbers_alone() -> None:
    losses = learning(300)
    losses[150:] += 2
    assert judged(monitor(), losses) == judged(monitor(), losses) != []


def test_divergence_in_small_steps_that_no_spike_limit_sees() -> None:
    losses = np.concatenate([learning(300), learning(300)[-1] + np.linspace(0, 2, 600)])
    verdicts = judged(monitor(), losses)
    assert [v.kind for v in verdicts if v.severity == "rollback"] == ["divergence"]
    assert 250 < verdicts[0].good_step < 420, "back to the best"


def test_worse_than_guessing_has_diverged() -> None:
    guessing = math.log(8)
    losses = np.concatenate([np.full(200, guessing - 0.3), np.linspace(guessing - 0.3, guessing + 0.1, 100), np.full(100, guessing + 0.1)])
    assert kinds(judged(monitor(8), losses)) == [("divergence", "rollback")]
    assert judged(monitor(), losses) == []


def test_an_unheeded_spike_becomes_the_level() -> None:
    losses = learning(400, sigma=0.01)
    losses[200:] += 0.4
    well = monitor(action="warn")
    assert len([v for v in judged(well, losses) if v.kind == "loss_spike" and v.severity == "rollback"]) == 1
    assert not well.suspect


NAN = math.nan


@pytest.mark.parametrize(("loss", "grad_norm"), [(NAN, NAN), (math.inf, NAN), (3.0, NAN), (3.0, math.inf)])
def test_non_finite_numbers(loss: float, grad_norm: float) -> None:
    """Skipped by the engine: told at the first, back at the third in a row. In the weights: back at once."""
    well = monitor()
    judged(well, learning(50))
    verdicts = judged(well, [loss] * 3, 51, grad_norm, applied=False)
    assert kinds(verdicts) == [("non_finite", "warn"), ("non_finite", "rollback")]
    assert (verdicts[1].step, verdicts[1].since, verdicts[1].good_step) == (53, 51, 49)
    assert kinds(judged(monitor(), [loss], 1, grad_norm)) == [("non_finite", "rollback")]


def test_steps_that_are_never_applied_are_told_once_more_after_a_window() -> None:
    """Where there was no checkpoint to go back to, the run would go on like that for days."""
    verdicts = [v for v in judged(monitor(window=32), [3.0] * 100, 1, NAN, applied=False) if v.kind == "non_finite"]
    assert [(v.severity, v.step, v.since) for v in verdicts] == [("warn", 1, 1), ("rollback", 3, 1), ("rollback", 32, 1)]


def test_a_lone_skip_does_not_disturb_the_losses() -> None:
    well = monitor()
    judged(well, learning(100))
    assert kinds(judged(well, [NAN], 101, NAN, applied=False)) == [("non_finite", "warn")]
    assert judged(well, learning(300)[101:], first=102) == []


def fp16(well: HealthMonitor, scales: Iterable[tuple[bool, float]], first: int = 1) -> list[Verdict]:
    verdicts = [well.observe(step, 3.0 - step / 1000, 1.0 if applied else math.inf, applied, scale) for step, (applied, scale) in enumerate(scales, first)]
    return [verdict for verdict in verdicts if verdict.severity != "ok"]


SEARCH = [(False, 2.0**16)] + [(False, 2.0**power) for power in range(15, 9, -1)]  # with DeepSpeed's hysteresis of 2


def test_the_search_for_the_loss_scale_is_normal() -> None:
    assert fp16(monitor(), SEARCH + [(True, 2.0**10)] * 500 + [(False, 2.0**10)] + [(True, 2.0**10)] * 500) == []


def test_a_loss_scale_that_cannot_fall() -> None:
    collapse = SEARCH + [(True, 2.0**10)] * 50 + [(False, 2.0**power) for power in range(9, -1, -1)] + [(False, 1.0)] * 3
    verdicts = fp16(monitor(), collapse)
    assert kinds(verdicts) == [("loss_scale", "warn"), ("loss_scale", "rollback")] and "loss scale 1" in verdicts[1].message


def test_skips_that_come_back_are_told_once() -> None:
    flapping = [(step % 8 != 0, 2.0**10 if step % 8 else 2.0**9) for step in range(1, 400)]
    assert kinds(fp16(monitor(), flapping)) == [("skipped_steps", "warn")]


def test_nan_loss_under_fp16_is_no_search() -> None:
    well = monitor()
    verdicts = [well.observe(step, NAN, NAN, False, 2.0 ** (16 - step)) for step in range(1, 4)]
    assert verdicts[-1].severity == "rollback" and verdicts[-1].kind == "non_finite"


def gradients(norms: Iterable[float]) -> list[Verdict]:
    well = monitor()
    verdicts = [well.observe(step, 3.0, float(norm)) for step, norm in enumerate(norms, 1)]
    return [verdict for verdict in verdicts if verdict.severity != "ok"]


def test_gradient_norms() -> None:
    usual = np.random.default_rng(0).lognormal(0, 0.4, 100)
    assert gradients(usual) == []
    assert gradients(np.concatenate([np.linspace(50, 1, MIN_HISTORY), usual])) == [], "the first steps may be large"
    lone = gradients([*usual, 80.0, *usual])
    assert kinds(lone) == [("gradient_spike", "warn")] and "80" in lone[0].message and lone[0].step == 101
    flickering = [12.0, 14.0, 13.0, 2.0] * 20
    assert kinds(gradients([*usual, *flickering, *usual, *flickering])) == [("gradient_spike", "warn")] * 2, "once a burst"
    assert kinds(gradients([*usual, *[0.002] * 60])) == [("vanishing_gradient", "warn")]


def test_plateau_is_told_once_and_late_slow_progress_is_none() -> None:
    flat = judged(monitor(), np.concatenate([learning(300), np.full(1500, learning(300)[-50:].mean())]))
    assert kinds(flat) == [("plateau", "warn")] and flat[0].since < 400
    slow = 1.5 + 3.0 * np.arange(1, 6001) ** -0.3
    assert judged(monitor(), slow) == []


def test_overfitting_needs_several_evaluations_and_a_falling_training_loss() -> None:
    well, verdicts = monitor(), []
    for step, loss in enumerate(np.linspace(4, 1, 1000), 1):
        val_loss = None if step % 100 else 3.0 + abs(step - 400) / 400
        verdicts.append(well.observe(step, float(loss), 1.0, val_loss=val_loss))
    found = [verdict for verdict in verdicts if verdict.severity != "ok"]
    assert kinds(found) == [("overfitting", "warn")] and (found[0].since, found[0].step) == (400, 700)


def test_disabled() -> None:
    assert judged(monitor(enabled=False), [NAN] * 10) == []


def test_the_gravest_verdict_is_the_answer() -> None:
    well = monitor()
    judged(well, learning(100))
    verdicts = judged(well, [9.0] * 3, 101, grad_norm=50.0)
    assert verdicts[-1].kind == "loss_spike" and verdicts[-1].severity == "rollback"


def test_spike_limit_and_streak() -> None:
    assert spike_limit([1, 2, 3, 4, 100], mads=2) == (3, pytest.approx(3 + 2 * 1.4826))
    assert spike_limit([1.0] * 9, mads=6) == (1.0, 1.2)
    streak = Streak()
    assert [streak.reaches(holds, step, 2) for step, holds in enumerate([True, True, True, False, True, True])] == [False, True, False, False, False, True]
    assert streak.since == 4


def test_health_imports_no_torch() -> None:
    program = "import sys, ds_gpt.trainer.health, ds_gpt.trainer.diagnosis; print(sorted({'torch', 'deepspeed'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
