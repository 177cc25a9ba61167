"""Diagnosis of histories with one known fault each: exactly that is found; and nothing where there is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_gpt.trainer.diagnosis import Finding, diagnose
from ds_gpt.trainer.metrics_history import Facts, History, summary
from ds_gpt.trainer.plots import draw, plot

FACTS = Facts(vocab_size=65, total_steps=3000, warmup_steps=60, evaluate_every=250)
Lines = list[dict[str, Any]]


def healthy(stride: int = 10, steps: int = 3000, seed: int = 0) -> Lines:
    """A run that goes as it should: 300 lines, noise in everything."""
    random = np.random.default_rng(seed)
    lines: Lines = []
    for step in range(stride, steps + 1, stride):
        loss = 1.2 + 3.0 * step**-0.25
        line = {
            "step": step,
            "tokens": 2048 * step,
            "loss": loss + random.normal(0, 0.04),
            "lr": 1e-3 * min(step / 60, 0.55 + 0.45 * math.cos(math.pi * step / steps)),
            "grad_norm": random.lognormal(0, 0.3),
            "step_s": 0.1,
            "tokens_per_s": 20_000 * random.lognormal(0, 0.03),
            "mfu": None,
            "peak_bytes": 1,
        }
        if step % 250 == 0:
            line["val_loss"] = loss + 0.05
        lines.append(line)
    return lines


def found(lines: Lines, facts: Facts = FACTS, events: Lines = []) -> list[Finding]:
    return diagnose(History.of(lines, events, facts))


def kinds(lines: Lines, facts: Facts = FACTS, events: Lines = []) -> list[str]:
    return [finding.kind for finding in found(lines, facts, events)]


@pytest.mark.parametrize("stride", [1, 10])
def test_nothing_is_found_in_a_healthy_run(stride: int) -> None:
    for seed in range(10):
        lines = healthy(stride, 3000 if stride == 10 else 600, seed)
        assert kinds(lines, Facts(65, lines[-1]["step"], 60, 250)) == []
        assert kinds(lines, Facts()) == [], "from the metrics alone"
        assert kinds(lines[: len(lines) // 2], Facts(65, lines[-1]["step"], 60, 250)) == [], "while it runs"


def change(**columns: Callable[[int, Any], Any]) -> Callable[[Lines], Lines]:
    """Give keys other values: a function of (step, value), None where the key is to go."""

    def changed(lines: Lines) -> Lines:
        for line in lines:
            for key, function in columns.items():
                line[key] = function(line["step"], line.get(key))
        return lines

    return changed


def between(first: int, last: int, inside: Callable[[Any], Any]) -> Callable[[int, Any], Any]:
    return lambda step, value: inside(value) if first <= step <= last else value


# Fault -> how it is made, the kinds that are found, and words that the text has to say.
FAULTS: dict[str, tuple[Callable[[Lines], Lines], list[str], list[str]]] = {
    "a spike": (change(loss=between(1200, 1250, lambda loss: loss + 3)), ["loss_spike"], ["1 loss spike", "step 1200", "back at step 1260"]),
    "two spikes": (
        lambda lines: change(loss=between(2000, 2020, lambda loss: loss + 2))(change(loss=between(900, 930, lambda loss: loss + 2))(lines)),
        ["loss_spike"],
        ["2 loss spikes", "step 900", "step 2000"],
    ),
    "a rise that stays": (change(loss=between(2900, 3000, lambda loss: loss + 0.4)), ["loss_spike"], ["not back since"]),
    "divergence": (change(loss=between(2000, 3000, lambda loss: loss + 4)), ["divergence"], ["after step 19", "and is 5"]),
    "plateau": (change(loss=lambda step, loss: max(loss, 1.9) if step > 900 else loss, lr=lambda step, lr: 1e-3 * min(1, step / 60), val_loss=lambda *_: None), ["plateau", "no_validation"], []),
    "overfitting": (change(val_loss=lambda step, value: value and 1.7 + abs(step - 1500) / 1500), ["overfitting"], ["best, 1.7, at step 1500", "step 3000"]),
    "never learned": (change(loss=lambda step, loss: 4.17 + (loss - 1.2 - 3.0 * step**-0.25), val_loss=lambda step, value: value and 4.2), ["never_learned"], ["ln V = 4.1744"]),
    "exploding gradient": (change(grad_norm=between(2000, 3000, lambda norm: 30 * norm)), ["exploding_gradient"], ["steps 2000-3000"]),
    "a gradient spike": (change(grad_norm=between(1500, 1500, lambda norm: 200.0)), ["exploding_gradient"], ["up to 200", "step 1500"]),
    "vanishing gradient": (change(grad_norm=between(2000, 3000, lambda norm: 0.001 * norm)), ["vanishing_gradient"], ["steps 2000-3000"]),
    "NaN loss": (change(loss=between(1500, 1520, lambda loss: None), grad_norm=between(1500, 1520, lambda norm: None)), ["non_finite"], ["steps 1500-1520", "3 of 300"]),
    "NaN gradient": (change(grad_norm=between(500, 500, lambda norm: None), skipped=between(500, 500, lambda _: 1)), ["non_finite"], ["the gradient", "step 500"]),
    "no validation": (change(val_loss=lambda *_: None), ["no_validation"], ["300 lines"]),
    "throughput dips": (change(tokens_per_s=lambda step, speed: speed / 3 if step % 500 == 0 else speed), ["throughput_dips"], ["every 500 steps", "6,"]),
    "throughput falls": (change(tokens_per_s=between(1810, 3000, lambda speed: 0.6 * speed)), ["slower"], ["about step 1810", "-40%"]),
    "straggler": (
        change(straggler=lambda step, _: 3 if step % 100 else 1, straggler_slowdown=lambda step, _: 1.3),
        ["straggler"],
        ["rank 3", "270 of 300", "1.30 times"],
    ),
    "loss scale collapse": (
        change(loss_scale=lambda step, _: 2.0 ** max(0, 14 - step // 100), skipped=lambda step, _: int(step % 100 == 0)),
        ["loss_scale"],
        ["from 16384 to 1"],
    ),
    "skips under fp16": (change(loss_scale=lambda *_: 1024.0, skipped=lambda step, _: int(step % 100 == 0)), ["skipped_steps"], ["30 of 300"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_exactly_this_fault_is_found(fault: str) -> None:
    make, expected, words = FAULTS[fault]
    findings = found(make(healthy()))
    assert [finding.kind for finding in findings] == expected
    for word in words:
        assert word in findings[0].what, findings[0].what
    assert all(finding.remedy for finding in findings)


def test_the_gravest_comes_first() -> None:
    lines = change(loss=between(2000, 3000, lambda loss: loss + 4), val_loss=lambda *_: None)(healthy())
    assert kinds(lines) == ["divergence", "no_validation"]


def test_warm_up() -> None:
    rising = change(lr=lambda step, _: 1e-6 * step)
    assert kinds(rising(healthy())) == ["never_warmed_up"]
    assert kinds(rising(healthy()), Facts(65, 6000, 4000, 250)) == [], "it is still warming up"
    assert kinds(rising(healthy()), Facts(65, 6000, 6000, 250)) == ["never_warmed_up"]
    full = change(lr=lambda *_: 1e-3)
    assert kinds(full(healthy()), Facts(65, 3000, 0, 250)) == ["no_warmup"]
    assert kinds(full(healthy(1, 600)), Facts()) == ["no_warmup"], "from the metrics alone"
    assert kinds(full([line for line in healthy() if line["step"] > 1000]), Facts()) == [], "its start is not in the file"


def test_fp16_that_searches_and_rarely_overflows_is_healthy() -> None:
    lines = healthy(1, 600)
    for line, power in zip(lines, range(16, 10, -1)):
        line |= {"loss_scale": 2.0**power, "skipped": 1, "grad_norm": None}
    for line in lines[6:]:
        line["loss_scale"] = 1024.0
    lines[400] |= {"skipped": 1, "grad_norm": None}
    assert kinds(lines, Facts(65, 600, 60, 250)) == []


def test_a_flat_loss_at_a_low_learning_rate_is_the_end_of_a_run_and_no_plateau() -> None:
    lines = change(loss=lambda step, loss: max(loss, 1.75), lr=lambda step, lr: 1e-5 if step > 2000 else 1e-3 * min(1, step / 60))(healthy())
    assert kinds(lines) == []


def test_resumed_and_rolled_back_runs() -> None:
    """Lines that were done again do not count, even if they were sick; the rollback itself is told."""
    lines = healthy()
    sick = change(loss=between(1560, 1600, lambda loss: 50.0))(healthy())
    again = lines[150:]  # from step 1510 on
    history = History.of(sick[:160] + again, (), FACTS)
    assert diagnose(history) == [] and history.returns == ((1600, 1510),)
    assert [line["step"] for line in history.lines] == list(range(10, 3001, 10)) and len(history.superseded) == 10
    event = {"step": 1600, "event": "rollback", "to_step": 1500, "text": "..."}
    (finding,) = diagnose(History.of(sick[:160] + again, [event], FACTS))
    assert (finding.kind, finding.severity) == ("rolled_back", "note") and "from step 1600 to 1500" in finding.what
    again[0]["rolled_back_from"] = 1600
    (finding,) = diagnose(History.of(sick[:160] + again, (), FACTS))
    assert finding.kind == "rolled_back" and "from step 1600" in finding.what
    assert kinds(healthy()[:160], FACTS, [{"step": 1600, "event": "save_failed", "text": "disk full"}]) == ["save_failed"]


def test_unknown_keys_and_events_do_no_harm() -> None:
    lines = change(rack=lambda *_: {"x": [1]}, moon=lambda *_: "full", mfu=lambda *_: "high", straggler=lambda *_: None)(healthy())
    lines.insert(50, {"step": 500, "event": "note"})
    assert kinds(lines, events=[{"step": 1, "event": "saved"}]) == []


@pytest.mark.parametrize("count", [1, 2, 5, 20])
def test_a_few_lines_are_no_error(count: int) -> None:
    assert kinds(healthy()[:count]) == []
    assert kinds([{"step": step, "loss": None} for step in range(1, count + 1)], Facts()) == ["non_finite"]
    assert kinds([{"step": step, "loss": 3.0} for step in range(1, count + 1)], Facts(evaluate_every=100)) in ([], ["never_learned"])


@pytest.mark.parametrize("fault", ["none", "divergence", "overfitting", "NaN loss", "exploding gradient"])
def test_every_history_can_be_drawn(fault: str, tmp_path: Path) -> None:
    lines = healthy() if fault == "none" else FAULTS[fault][0](healthy())
    history = History.of([*lines[:200], *lines[180:]], (), FACTS)
    plot(history, diagnose(history), tmp_path / "x.png", fault)
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_bare_histories_can_be_drawn(tmp_path: Path) -> None:
    for lines in ([{"step": 1, "loss": None}], [{"step": 1, "loss": 2.0}], [{"step": step, "loss": 2.0, "val_loss": None} for step in range(9)]):
        plot(History.of(lines), [], tmp_path / "x.png", "bare")


RUINED = [
    {"step": 10, "loss": 9.911, "lr": 0.4, "grad_norm": 7.65},
    {"step": 19, "loss": 24.53, "lr": 0.76, "grad_norm": 22.5},
    {"step": 20, "loss": 43.65, "lr": 0.8, "grad_norm": 18.2, "val_loss": 43.58},
]
SPIKED = {"step": 19, "event": "gradient_spike", "since": 17, "text": "gradient norm 22.5 at step 19, above 10 for 3 steps."}
SHORT = Facts(vocab_size=103, total_steps=20, warmup_steps=50, evaluate_every=500)


def test_a_run_ruined_within_its_first_lines() -> None:
    worse, gradient = found(RUINED, SHORT, [SPIKED])
    assert (worse.kind, worse.severity) == ("worse_than_guessing", "problem")
    assert "ln V = 4.6347" in worse.what and "validation loss is 43.58 (step 20)" in worse.what and "training loss is 43.65" in worse.what
    assert "lower optimizer.lr" in worse.remedy
    assert (gradient.kind, gradient.severity, gradient.spans) == ("exploding_gradient", "warning", ((17, 19),)) and "gradient norm 22.5 at step 19" in gradient.what
    assert kinds(RUINED[:2], SHORT) == ["worse_than_guessing"], "while it runs"


def test_worse_than_guessing_by_a_little_is_told_once_it_had_time_to_learn() -> None:
    fresh = [{"step": step, "loss": 4.8} for step in (1, 2, 3)]
    assert kinds(fresh, Facts(103, 900, 50, 500)) == [] and kinds(fresh, Facts(103, 900, 0, 500)) == []
    assert kinds(fresh, Facts(103, 3, 50, 500)) == ["worse_than_guessing"], "it ended so"
    assert kinds([{"step": 60, "loss": 4.8}], Facts(103, 900, 50, 500)) == ["worse_than_guessing"]
    assert kinds([{"step": 60, "loss": 4.5}], Facts(103, 900, 50, 500)) == []
    assert kinds(fresh, Facts()) == [], "without a vocabulary nothing is known"


def test_only_the_validation_worse_than_guessing_has_another_remedy() -> None:
    (finding,) = found([{"step": 300, "loss": 1.0, "val_loss": 6.0}], Facts(103, 900, 50, 500))
    assert finding.kind == "worse_than_guessing" and "validation text" in finding.remedy and "training" not in finding.what


def test_a_loss_far_above_guessing_that_came_back_is_told() -> None:
    lines = [{"step": 1, "loss": 6.0}, {"step": 5, "loss": 170.2}, {"step": 10, "loss": 12.0}, {"step": 20, "loss": 4.3}]
    (finding,) = found(lines, Facts(103, 900, 50, 500))
    assert (finding.kind, finding.severity) == ("far_above_guessing", "warning") and "2 of 4 lines, up to 170.2: steps 5-10" in finding.what


@pytest.mark.parametrize(
    ("event", "kind", "severity"),
    [
        ("gradient_spike", "exploding_gradient", "warning"), ("loss_spike", "loss_spike", "warning"), ("divergence", "divergence", "problem"),
        ("non_finite", "non_finite", "warning"), ("skipped_steps", "skipped_steps", "warning"), ("loss_scale", "loss_scale", "warning"),
    ],
)  # fmt: skip
def test_events_tell_what_the_lines_missed(event: str, kind: str, severity: str) -> None:
    seen = {"step": 1505, "event": event, "since": 1503, "text": "seen at step 1505"}
    (finding,) = found(healthy(), events=[seen, {**seen, "step": 1705, "since": 1705}, {"step": 2000, "event": "saved"}])
    assert (finding.kind, finding.severity, finding.spans) == (kind, severity, ((1503, 1505), (1705, 1705)))
    assert "seen at step 1505 and 1 more: step 1705" in finding.what and finding.remedy
    assert kinds(healthy(), events=[seen, {"step": 1510, "event": "rollback", "to_step": 1500}]) == ["rolled_back"], "done again"
    assert kinds(healthy(), events=[seen, {"step": 1400, "event": "saved"}]) == [], "done again after a resume"


def test_events_that_the_lines_show_are_told_once() -> None:
    lines = FAULTS["a spike"][0](healthy())
    assert [f.what[:12] for f in found(lines, events=[{"step": 1205, "since": 1203, "event": "loss_spike", "text": "..."}])] == ["1 loss spike"]
    assert kinds(lines, events=[{"step": 2505, "event": "loss_spike"}]) == ["loss_spike", "loss_spike"]


def test_the_summary_has_the_losses_that_were_logged() -> None:
    lines = healthy()
    lines[0]["loss"], lines[-1]["loss"] = 4.0317, 1.9385
    assert (summary(History.of(lines))["loss_start"], summary(History.of(lines))["loss_end"]) == (4.0317, 1.9385)
    assert summary(History.of(lines[:150]))["loss_start"] == 4.0317, "and the start is what it was"


@pytest.mark.parametrize("best", [250, 1500, 3000])
def test_the_best_validation_loss_is_written_within_the_axes(best: int) -> None:
    history = History.of(change(val_loss=lambda step, value: value and 1.7 + abs(step - best) / 9000)(healthy()), (), FACTS)
    figure = draw(history, [], "x")
    figure.draw_without_rendering()
    axes = figure.axes[0]
    (label,) = [text for text in axes.texts if text.get_text().startswith("best ")]
    inside, text = axes.get_window_extent(), label.get_window_extent()
    assert inside.x0 <= text.x0 and text.x1 <= inside.x1 and inside.y0 <= text.y0 and text.y1 <= inside.y1


def test_the_best_of_a_single_evaluation_is_within_the_axes() -> None:
    for lines in ([{"step": 20, "loss": 2.0, "val_loss": 2.0}], [{"step": 1, "loss": 2.0}, {"step": 20, "loss": 1.8, "val_loss": 1.697}]):
        figure = draw(History.of(lines), [], "x")
        figure.draw_without_rendering()
        inside, text = figure.axes[0].get_window_extent(), figure.axes[0].texts[0].get_window_extent()
        assert inside.x0 <= text.x0 and text.x1 <= inside.x1
