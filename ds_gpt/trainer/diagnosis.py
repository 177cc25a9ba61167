"""What a run's metrics say about it, read afterwards or while it goes on. Imports no torch and needs no run folder.

A line of metrics is an object with "step" and "loss"; everything else in it is optional, null where a number was not
finite, and unknown keys do no harm. A line without "loss" is an event. Where the steps go back (a resume from an earlier
checkpoint, a rollback) the later lines count and the earlier ones are superseded.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ds_gpt.config import ConfigError, Problem
from ds_gpt.trainer.health import DIVERGED, LONE_SPIKE, MAX_GRADIENT, MIN_GRADIENT, MIN_HISTORY, MIN_LOSS_SCALE, PROGRESS, Level

Line = dict[str, Any]

WINDOW, SPIKE_MADS = 64, 6.0  # as health's defaults, but of logged lines
LEARNED = 0.1  # nats below where it started, or below ln V: less is no learning
DIP, FELL = 0.7, 0.8  # of the usual throughput: for a moment, and for good
DIP_COST = 0.01  # of the run's time; dips that cost less are not worth a word
FIRST_STEPS = 20  # a large model's gradients may be large in them, and its speed is not yet its speed


@dataclass(frozen=True)
class Facts:
    """What the run's configuration says, where it is at hand."""

    vocab_size: int | None = None
    total_steps: int | None = None
    warmup_steps: int | None = None
    evaluate_every: int | None = None


@dataclass(frozen=True)
class Finding:
    """Something a good engineer would say.

    Attributes:
        kind: one word for programs.
        severity: "problem" costs the run, "warning" costs time or quality, "note" is good to know.
        what: what is seen, with steps and numbers.
        remedy: what to do.
        spans: (first, last) steps where it shows.
    """

    kind: str
    severity: Literal["problem", "warning", "note"]
    what: str
    remedy: str
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class History:
    """The metrics of a run.

    Attributes:
        lines: one for each logged step that counts, in their order.
        superseded: lines whose steps were done again after a resume or a rollback.
        events: lines with an event, or with no loss.
        returns: (from step, to step) of each time the steps went back.
        unreadable: lines that are no JSON object: cut off by a crash.
        facts: from the run's configuration.
    """

    lines: tuple[Line, ...]
    superseded: tuple[Line, ...] = ()
    events: tuple[Line, ...] = ()
    returns: tuple[tuple[int, int], ...] = ()
    unreadable: int = 0
    facts: Facts = Facts()

    def column(self, key: str) -> np.ndarray:
        """The numbers under `key`, NaN where there is none."""
        return np.array([_number(line.get(key)) for line in self.lines], dtype=np.float64)

    @property
    def steps(self) -> np.ndarray:
        """The logged steps."""
        return np.array([line["step"] for line in self.lines], dtype=np.int64)

    @property
    def ended(self) -> bool:
        """Whether the last step was reached, as far as is known."""
        return self.facts.total_steps is None or bool(self.steps[-1] >= self.facts.total_steps)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def read_metrics(path: Path, facts: Facts = Facts()) -> History:
    """Read a ``metrics.jsonl``; a last line that is still being written is left out.

    Raises:
        ConfigError: it cannot be read, is empty, or holds no metrics.
    """
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise ConfigError(Problem(f"metrics '{path}' cannot be read: {error.strerror}", fix="give a run folder or its metrics.jsonl")) from None
    lines, superseded, events, returns, unreadable = [], [], [], [], 0
    for number, text in enumerate(texts, 1):
        line = _parsed(text)
        if line is None:
            unreadable += bool(text.strip()) and number < len(texts)
            continue
        if "rolled_back_to" in line or "event" in line or "loss" not in line:
            events.append(line)
        if "loss" not in line:
            continue
        if lines and line["step"] <= lines[-1]["step"]:
            returns.append((lines[-1]["step"], line["step"]))
            while lines and lines[-1]["step"] >= line["step"]:
                superseded.append(lines.pop())
        lines.append(line)
    if not lines:
        found = "is empty" if not any(text.strip() for text in texts) else 'holds no line with "step" and "loss"'
        fix = "wait for the first logged step, or give a run folder or its metrics.jsonl"
        raise ConfigError(Problem(f"metrics '{path}' {found}", "there is nothing to say about it", fix))
    return History(tuple(lines), tuple(superseded), tuple(events), tuple(returns), unreadable, facts)


def _parsed(text: str) -> Line | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    step = line.get("step") if isinstance(line, dict) else None
    return line if isinstance(step, int) and not isinstance(step, bool) else None


def diagnose(history: History) -> list[Finding]:
    """Everything worth saying, the gravest first; an empty list where nothing is wrong."""
    checks: tuple[Callable[[History], Iterator[Finding]], ...] = (
        _non_finite, _loss_scale, _learning, _spikes, _overfitting, _plateau, _gradients, _learning_rate, _throughput, _stragglers, _rollbacks, _validation,
    )  # fmt: skip
    findings = [finding for check in checks for finding in check(history)]
    return sorted(findings, key=lambda finding: ("problem", "warning", "note").index(finding.severity))


def smooth(values: np.ndarray, half: int) -> np.ndarray:
    """Median over `half` neighbours to each side, without NaN; NaN where there are none."""
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return np.array([np.median(known) if len(known := window[np.isfinite(window)]) else math.nan for window in windows])


def loss_curve(history: History) -> np.ndarray:
    """The training loss, smoothed over an amount that suits the number of lines."""
    return smooth(history.column("loss"), half=min(MIN_HISTORY // 2, len(history.lines) // 20))


def _stretches(history: History, flags: np.ndarray) -> tuple[tuple[int, int], ...]:
    """(first, last) step of each run of lines that are flagged."""
    groups = (list(group) for flag, group in groupby(zip(flags, history.steps.tolist()), key=lambda pair: bool(pair[0])) if flag)
    return tuple((group[0][1], group[-1][1]) for group in groups)


def _where(spans: tuple[tuple[int, int], ...]) -> str:
    shown = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans[:6])
    return ("step " if len(spans) == 1 and spans[0][0] == spans[0][1] else "steps ") + shown + (f" and {len(spans) - 6} more places" if len(spans) > 6 else "")


def _non_finite(history: History) -> Iterator[Finding]:
    """Steps without an update, or without a loss. Under fp16 those with a loss are `_loss_scale`'s."""
    fp16 = np.isfinite(history.column("loss_scale"))
    lost = ~np.isfinite(history.column("loss"))
    skipped = (history.column("skipped") > 0) & ~fp16
    if (spans := _stretches(history, lost | skipped)):
        what = f"NaN or infinity in {'the loss' if lost.any() else 'the gradient'} in {int((lost | skipped).sum())} of {len(lost)} logged steps: {_where(spans)}"
        yield Finding("non_finite", "problem", what, "look at the batches of these steps; lower optimizer.lr, set gradient_clipping", spans)


def _loss_scale(history: History) -> Iterator[Finding]:
    scale, skipped = history.column("loss_scale"), (history.column("skipped") > 0) & np.isfinite(history.column("loss"))
    if not np.isfinite(scale).any():
        return
    lowest = np.minimum.accumulate(np.where(np.isfinite(scale), scale, math.inf))
    searching = scale < np.concatenate([[math.inf], lowest[:-1]])  # each skip of the first search finds a new lowest
    often = skipped & ~searching
    remedy = "bf16 where the device has it; else lower optimizer.lr or a longer schedule.warmup_steps"
    if (scale <= MIN_LOSS_SCALE).any():
        spans = _stretches(history, scale <= MIN_LOSS_SCALE)
        what = f"the fp16 loss scale collapsed from {np.nanmax(scale):g} to {np.nanmin(scale):g} ({_where(spans)}): small gradients round to zero"
        yield Finding("loss_scale", "problem", what, remedy, spans)
    if often.sum() > max(2, 0.02 * len(often)):
        spans = _stretches(history, often)
        yield Finding("skipped_steps", "warning", f"{often.sum()} of {len(often)} logged steps were skipped for overflow: {_where(spans)}", remedy, spans)


def _learning(history: History) -> Iterator[Finding]:
    """A run that never learned anything, or lost again what it had learned."""
    loss, steps, facts = loss_curve(history), history.steps, history.facts
    if np.isfinite(loss).sum() < MIN_HISTORY:
        return
    best, last = int(np.nanargmin(loss)), loss[np.isfinite(loss)][-1]
    guessing = math.log(facts.vocab_size) if facts.vocab_size else loss[np.isfinite(loss)][0] if steps[0] <= 5 * FIRST_STEPS else math.inf
    if loss[best] > guessing - LEARNED and steps[-1] > (facts.warmup_steps or 0):
        start = f"ln V = {guessing:.4f}, which is guessing" if facts.vocab_size else f"{guessing:.4f}, where it started"
        what = f"it never learned: the loss at step {steps[-1]} is {last:.4f}, and never was {LEARNED} below {start}"
        lr = np.nanmax(history.column("lr")) if np.isfinite(history.column("lr")).any() else math.nan
        yield Finding("never_learned", "problem", what, f"raise optimizer.lr (its peak so far is {lr:.2g}); look whether inputs and targets belong together")
    elif last > loss[best] + DIVERGED:
        since = steps[np.flatnonzero(loss <= loss[best] + DIVERGED)[-1]]
        what = f"it diverged: the loss was {loss[best]:.4f} at step {steps[best]} and is {last:.4f} at step {steps[-1]}, after step {since}"
        remedy = f"go back to a checkpoint before step {since}; lower optimizer.lr, a longer schedule.warmup_steps, gradient_clipping 1.0"
        yield Finding("divergence", "problem", what, remedy, ((int(since), int(steps[-1])),))


def _spikes(history: History) -> Iterator[Finding]:
    level, spikes, above = Level(WINDOW, SPIKE_MADS), [], []  # a spike: (line, usual loss, limit) of each of its lines
    loss, steps = history.column("loss"), history.steps
    for i in np.flatnonzero(np.isfinite(loss)).tolist():
        limit = level.limit()
        if limit and loss[i] > limit[1]:
            above.append((i, *limit))
            if len(above) < WINDOW:
                continue
            level.forget_after(-1)  # it does not come back: this is the level now
        elif above:
            spikes.append((above, i))
            above = []
        level.admit(int(steps[i]), float(loss[i]))
    if above:
        spikes.append((above, None))
    enough, texts, spans = 3 if len(steps) < 2 or np.median(np.diff(steps)) == 1 else 2, [], []
    diverged = any(finding.kind == "divergence" for finding in _learning(history))
    for lines, back in spikes:
        peak, usual, limit = max(lines, key=lambda line: loss[line[0]])
        if (len(lines) < enough and loss[peak] - usual <= LONE_SPIKE * (limit - usual)) or (back is None and (diverged or len(lines) < enough)):
            continue
        spans.append((int(steps[lines[0][0]]), int(steps[lines[-1][0]])))
        ends = f"back at step {steps[back]}" if back is not None else "not back since"
        texts.append(f"step {spans[-1][0]} ({usual:.2f} -> {loss[peak]:.2f}, {ends})")
    if texts:
        more = f" and {len(texts) - 6} more" if len(texts) > 6 else ""
        what = f"{len(texts)} loss spike{'s' * (len(texts) > 1)}: {', '.join(texts[:6])}{more}"
        remedy = "health.action: rollback skips such data by itself; where they come often: lower optimizer.lr, longer warm-up, betas[1] 0.95, gradient_clipping"
        yield Finding("loss_spike", "warning", what, remedy, tuple(spans))


def _evaluations(history: History) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Step, validation loss and smoothed training loss at each evaluation."""
    values = history.column("val_loss")
    known = np.isfinite(values)
    return history.steps[known], values[known], loss_curve(history)[known]


def _overfitting(history: History) -> Iterator[Finding]:
    steps, values, training = _evaluations(history)
    best = int(np.argmin(values)) if len(values) else 0
    if len(values) - best < 3 or values[-1] < values[best] + 2 * PROGRESS or not training[-1] < training[best] - PROGRESS:
        return
    what = (
        f"it overfits: validation loss was best, {values[best]:.4f}, at step {steps[best]} and is {values[-1]:.4f} at step {steps[-1]},"
        f" while training loss fell from {training[best]:.4f} to {training[-1]:.4f}"
    )
    remedy = f"use the checkpoint of step {steps[best]} (or nearest); train no longer than that, or on more data, with dropout or more weight_decay"
    yield Finding("overfitting", "warning", what, remedy, ((int(steps[best]), int(steps[-1])),))


def _plateau(history: History) -> Iterator[Finding]:
    """No progress in the last quarter, while the learning rate was still high: low, and flat is what it should be."""
    loss, lr, steps, quarter = history.column("loss"), history.column("lr"), history.steps, len(history.lines) // 4
    if quarter < MIN_HISTORY or any(finding.kind in ("never_learned", "divergence") for finding in _learning(history)) or any(_overfitting(history)):
        return
    before, after = np.nanmedian(loss[-2 * quarter : -quarter]), np.nanmedian(loss[-quarter:])
    at, values, _ = _evaluations(history)
    early, late = values[at < steps[-quarter]], values[at >= steps[-quarter]]
    validation_falls = len(early) and len(late) and late.min() < early.min() - PROGRESS
    if before - after >= PROGRESS or validation_falls or np.nanmean(lr[-quarter:]) < 0.5 * np.nanmax(lr):
        return
    what = f"plateau: the loss was {before:.4f} before step {steps[-quarter]} and {after:.4f} from there to step {steps[-1]}, at a learning rate still near its peak"
    yield Finding("plateau", "warning", what, "decay the learning rate now, or lower its peak; else a larger model", ((int(steps[-quarter]), int(steps[-1])),))
