"""What a run's metrics say about it, read afterwards or while it goes on. Imports no torch and needs no run folder.

A line of metrics is an object with "step" and "loss"; everything else in it is optional, null where a number was not
finite, and unknown keys do no harm. Where the steps go back (a resume from an earlier checkpoint, a rollback) the later
lines count and the earlier ones are superseded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from ds_gpt.trainer.finding import Finding
from ds_gpt.trainer.health import DIVERGED, GRADIENT_JUMP, LONE_SPIKE, MAX_GRADIENT, MIN_GRADIENT, MIN_HISTORY, MIN_LOSS_SCALE, PROGRESS, Level, spike_limit
from ds_gpt.trainer.metrics_history import History

WINDOW, SPIKE_MADS = 64, 6.0  # as health's defaults, but of logged lines
LEARNED = 0.1  # nats below where it started, or below ln V: less is no learning
DIP, FELL = 0.7, 0.8  # of the usual throughput: less is a dip, or for good a fall
DIP_COST = 0.01  # of the run's time; dips that cost less are not worth a word
APART = 8  # lines between two places; nearer, they are one
FIRST_STEPS = 20  # a large model's gradients may be large in them, and its speed is not yet its speed


def diagnose(history: History) -> list[Finding]:
    """Everything worth saying, the gravest first; an empty list where nothing is wrong."""
    checks: tuple[Callable[[History], Iterator[Finding]], ...] = (
        _non_finite, _loss_scale, _learning, _guessing, _spikes, _overfitting, _plateau, _gradients, _learning_rate, _throughput, _stragglers, _rollbacks, _validation,
        _forgetting,
    )  # fmt: skip
    findings = [finding for check in checks for finding in check(history)]
    findings += _unlogged(history, findings)
    return sorted(findings, key=lambda finding: ("problem", "warning", "note").index(finding.severity))


def smooth(values: np.ndarray, half: int) -> np.ndarray:
    """Median over `half` neighbours to each side, without NaN; NaN where there are none."""
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return np.array([np.median(known) if len(known := window[np.isfinite(window)]) else math.nan for window in windows])


def loss_curve(history: History) -> np.ndarray:
    """The training loss, smoothed over an amount that suits the number of lines."""
    return smooth(history.column("loss"), half=min(MIN_HISTORY // 2, len(history.lines) // 20))


def _stretches(history: History, flags: np.ndarray, at_least: int = 1) -> tuple[tuple[int, int], ...]:
    """(first, last) step of each place with `at_least` flagged lines; a few lines between do not make two places of it."""
    flagged, steps = np.flatnonzero(flags), history.steps
    places = np.split(flagged, np.flatnonzero(np.diff(flagged) > APART) + 1)
    return tuple((int(steps[place[0]]), int(steps[place[-1]])) for place in places if len(place) >= at_least)


def _where(spans: tuple[tuple[int, int], ...]) -> str:
    shown = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans[:6])
    return ("step " if len(spans) == 1 and spans[0][0] == spans[0][1] else "steps ") + shown + (f" and {len(spans) - 6} more places" if len(spans) > 6 else "")


def _non_finite(history: History) -> Iterator[Finding]:
    """Steps without an update, or without a loss. Under fp16 those with a loss are `_loss_scale`'s."""
    fp16 = np.isfinite(history.column("loss_scale"))
    lost = ~np.isfinite(history.column("loss"))
    skipped = (history.column("skipped") > 0) & ~fp16
    if spans := _stretches(history, lost | skipped):
        what = f"NaN or infinity in the {'loss' if lost.any() else 'gradient'} in {(lost | skipped).sum()} of {len(lost)} lines: {_where(spans)}"
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
    elif often.sum() > max(2, 0.02 * len(often)):
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
        start = f"ln V = {guessing:.5g}, which is guessing" if facts.vocab_size else f"{guessing:.5g}, where it started"
        what = f"it never learned: the smoothed loss at step {steps[-1]} is {last:.5g}, never {LEARNED} nats below {start}"
        lr = np.nanmax(history.column("lr")) if np.isfinite(history.column("lr")).any() else math.nan
        remedy = f"raise optimizer.lr (its peak so far is {lr:.2g}); look whether inputs and targets belong together"
        yield Finding("never_learned", "problem", what, remedy)
    elif last > loss[best] + DIVERGED:
        since = steps[np.flatnonzero(loss <= loss[best] + DIVERGED)[-1]]
        what = f"it diverged: the smoothed loss was {loss[best]:.5g} at step {steps[best]} and is {last:.5g} at step {steps[-1]}, after step {since}"
        remedy = f"go back to a checkpoint before step {since}; lower optimizer.lr, a longer schedule.warmup_steps, gradient_clipping 1.0"
        yield Finding("divergence", "problem", what, remedy, ((int(since), int(steps[-1])),))


def _guessing(history: History) -> Iterator[Finding]:
    """A loss that is worse than guessing, or was after the first update. Needs no history, only the size of the vocabulary."""
    facts, steps, loss, validation = history.facts, history.steps, history.column("loss"), history.column("val_loss")
    if facts.vocab_size is None or facts.vocab_size < 2 or any(_learning(history)):
        return
    guessing = math.log(facts.vocab_size)
    trained = facts.total_steps is not None and history.ended or steps[-1] > max(facts.warmup_steps or 0, FIRST_STEPS)
    allowed = guessing + (0.0 if trained else DIVERGED)  # fresh weights are somewhat worse than guessing
    ends = [(name, int(np.flatnonzero(known)[-1]), values) for name, values in (("validation", validation), ("training", loss)) if (known := np.isfinite(values)).any()]
    worse = [(name, i, values[i]) for name, i, values in ends if values[i] > allowed]
    only_validation = [name for name, *_ in worse] == ["validation"]
    if worse and not (only_validation and any(_overfitting(history))):
        said = " and ".join(f"the last {name} loss is {value:.5g} (step {steps[i]})" for name, i, value in worse)
        far = max(value for *_, value in worse) > guessing + DIVERGED
        remedy = "lower optimizer.lr, a longer schedule.warmup_steps, gradient_clipping 1.0" if far else "train for more steps, past the warm-up"
        if only_validation:
            remedy = "look whether the validation text is of the same kind; more data, dropout, or an earlier checkpoint if it learned by heart"
        yield Finding("worse_than_guessing", "problem", f"worse than guessing, which is ln V = {guessing:.5g}: {said}", remedy)
        return
    far_above = (loss > guessing + 2 * DIVERGED) & (steps > 1)
    for spike in _spikes(history):
        for first, last in spike.spans:
            far_above &= (steps < first) | (steps > last)
    if spans := _stretches(history, far_above):
        what = f"far worse than guessing, which is ln V = {guessing:.5g}, in {far_above.sum()} of {len(loss)} lines, up to {loss[far_above].max():.5g}: {_where(spans)}"
        yield Finding("far_above_guessing", "warning", what, "lower optimizer.lr, a longer schedule.warmup_steps, gradient_clipping 1.0", spans)


# Kinds of health's events that a line for each few steps can miss: the finding that says the same, and what to do.
_MISSED = {
    "divergence": ("divergence", "go back to a checkpoint before it; lower optimizer.lr, a longer schedule.warmup_steps"),
    "non_finite": ("non_finite", "nothing, where it stays at one; else look at the batches of these steps, lower optimizer.lr"),
    "loss_scale": ("loss_scale", "bf16 where the device has it; else lower optimizer.lr"),
    "skipped_steps": ("skipped_steps", "bf16 where the device has it; else lower optimizer.lr or a longer schedule.warmup_steps"),
    "loss_spike": ("loss_spike", "a rollback (health.action) skips such data; where they come often: lower optimizer.lr"),
    "gradient_spike": ("exploding_gradient", "gradient_clipping 1.0 bounds the update; where it goes on: lower optimizer.lr, a longer schedule.warmup_steps"),
    "vanishing_gradient": ("vanishing_gradient", "if the loss still falls, nothing; else look at the initialization, a frozen parameter"),
}


def _unlogged(history: History, findings: list[Finding]) -> Iterator[Finding]:
    """What health saw, which looks at every step, and the logged lines do not show."""
    near = APART * int(np.median(np.diff(history.steps))) if len(history.steps) > 1 else 0
    for kind, (same, remedy) in _MISSED.items():
        told = [finding.spans for finding in findings if finding.kind == same]
        missed = [
            (first, last, text)
            for first, last, text in history.standing(kind)
            if not any(not spans or any(a - near <= last and first <= b + near for a, b in spans) for spans in told)
        ]
        if missed:
            spans = tuple((first, last) for first, last, _ in missed)
            more = f" and {len(missed) - 1} more: {_where(spans[1:])}" if len(missed) > 1 else ""
            yield Finding(same, "problem" if kind == "divergence" else "warning", f"health saw, at every step: {missed[0][2]}{more}", remedy, spans)


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
            spikes, above = [*spikes, (above, None)], []
        elif above and i - above[-1][0] > APART:  # a moment below the limit is not its end
            spikes, above = [*spikes, (above, above[-1][0] + 1)], []
        level.admit(int(steps[i]), float(loss[i]))
    if above:
        spikes.append((above, None))
    enough, texts, spans = 3 if len(steps) < 2 or np.median(np.diff(steps)) == 1 else 2, [], []
    lost = min((finding.spans[0][0] for finding in _learning(history) if finding.kind == "divergence"), default=math.inf)
    for lines, back in spikes:
        peak, usual, limit = max(lines, key=lambda line: loss[line[0]])
        confirmed = len(lines) >= enough or (back is not None and loss[peak] - usual > LONE_SPIKE * (limit - usual))
        if not confirmed or steps[lines[-1][0]] >= lost:
            continue
        spans.append((int(steps[lines[0][0]]), int(steps[lines[-1][0]])))
        ends = f"back at step {steps[back]}" if back is not None else "not back since"
        texts.append(f"step {spans[-1][0]} ({usual:.2f} -> {loss[peak]:.4g}, {ends})")
    if texts:
        more = f" and {len(texts) - 6} more" if len(texts) > 6 else ""
        what = f"{len(texts)} loss spike{'s' * (len(texts) > 1)}: {', '.join(texts[:6])}{more}"
        remedy = "a rollback (health.action) skips such data; where they come often: lower optimizer.lr, a longer warm-up, gradient_clipping 1.0"
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
        f"it overfits: validation loss was best, {values[best]:.5g}, at step {steps[best]} and is {values[-1]:.5g} at step {steps[-1]},"
        f" while the smoothed training loss fell from {training[best]:.5g} to {training[-1]:.5g}"
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
    what = f"plateau: the loss is {after:.5g} since step {steps[-quarter]} and was {before:.5g} before, at a learning rate near its peak"
    spans = ((int(steps[-quarter]), int(steps[-1])),)
    yield Finding("plateau", "warning", what, "decay the learning rate now, or lower its peak; else a larger model", spans)


def _gradients(history: History) -> Iterator[Finding]:
    norms, late = history.column("grad_norm"), history.steps > FIRST_STEPS
    known = norms[late & np.isfinite(norms)]
    if len(known) < MIN_HISTORY:
        return
    usual, large = float(np.median(known)), late & (norms > MAX_GRADIENT)
    lasting = np.convolve(large, np.ones(3), "same") >= 2
    if spans := _stretches(history, large & (lasting | (norms > GRADIENT_JUMP * usual))):
        share = large[-(len(large) // 4) :].mean()
        counts = f"above {MAX_GRADIENT:g} in {large.sum()} of {len(norms)} lines"
        what = f"gradient norm up to {np.nanmax(norms[late]):.3g} where {usual:.2g} is usual; {counts}: {_where(spans)}"
        remedy = "gradient_clipping 1.0 bounds the update; where it goes on: lower optimizer.lr, a longer schedule.warmup_steps"
        yield Finding("exploding_gradient", "problem" if share > 0.2 else "warning", what, remedy, spans)
    if spans := _stretches(history, norms < MIN_GRADIENT, at_least=MIN_HISTORY):
        what = f"gradient norm down to {np.nanmin(norms):.2g}, below {MIN_GRADIENT:g}: {_where(spans)}"
        remedy = "if the loss still falls, nothing; else look at the initialization, a frozen parameter, the fp16 loss scale"
        yield Finding("vanishing_gradient", "warning", what, remedy, spans)


def _learning_rate(history: History) -> Iterator[Finding]:
    lr, steps, facts = history.column("lr"), history.steps, history.facts
    if len(lr) < 6 or not np.isfinite(lr).all():
        return
    endless = None not in (facts.warmup_steps, facts.total_steps) and facts.warmup_steps >= facts.total_steps
    if (np.diff(lr[-6:]) > 0).all() and lr[-1] == lr.max() and (history.ended or endless):
        what = f"the learning rate was still rising at step {steps[-1]}, the last one: it never left its warm-up (now {lr[-1]:.3g})"
        yield Finding("never_warmed_up", "warning", what, "schedule.warmup_steps of 1 to 5% of training.steps; most is learned after it")
    elif facts.warmup_steps == 0 or (facts.warmup_steps is None and steps[0] <= FIRST_STEPS and lr[0] >= 0.99 * lr.max()):
        what = f"no warm-up: the learning rate was at its peak, {lr.max():.3g}, from step {steps[0]} on"
        yield Finding("no_warmup", "note", what, "Adam's second moments are noise at first: schedule.warmup_steps of 1 to 5% of training.steps")


def _throughput(history: History) -> Iterator[Finding]:
    """A lasting fall, found where the cumulated deviation turns (CUSUM, Page 1954); and dips, as outliers of the time a token takes."""
    speed, steps = history.column("tokens_per_s"), history.steps
    settled = (speed > 0) & (steps > FIRST_STEPS) & ~np.isin(steps, [steps[0], *(step for _, step in history.returns)])  # they hold compilation
    speed, steps = speed[settled], steps[settled]
    if len(speed) < 2 * MIN_HISTORY:
        return
    turn = int(np.argmax(np.cumsum(speed - speed.mean()))) + 1
    before, after = speed[:turn], speed[turn:]
    # The second condition: where the speed is noisy anyway, a fall is not news.
    if len(after) >= MIN_HISTORY // 2 and (now := np.median(after)) < min(FELL * (usual := np.median(before)), np.quantile(before, 0.1)):
        what = f"throughput fell from {usual:,.0f} to {now:,.0f} tokens/s ({now / usual - 1:+.0%}) at about step {steps[turn]}, and stayed there"
        remedy = "look for another job on the machine, a hot GPU (nvidia-smi -q -d PERFORMANCE), fewer ranks after a resume, a slower disk"
        yield Finding("slower", "warning", what, remedy, ((int(steps[turn]), int(steps[-1])),))
        speed, steps = before, steps[:turn]
    usual, limit = spike_limit((1 / speed).tolist(), SPIKE_MADS, floor=(1 / DIP - 1) * float(np.median(1 / speed)))
    slow = 1 / speed > limit
    lost = float(np.sum(1 / speed[slow] - usual) / np.sum(1 / speed))  # of the time that these steps took
    if lost > DIP_COST:
        spans, worst = _stretches(History(tuple({"step": int(step)} for step in steps)), slow), int(np.argmin(speed))
        gaps = np.diff([first for first, _ in spans])
        periodic = f", every {np.median(gaps):.0f} steps" if len(gaps) >= 3 and gaps.std() < 0.1 * gaps.mean() else ""
        what = f"throughput dips{periodic}: down to {speed[worst]:,.0f} tokens/s at step {steps[worst]} where {1 / usual:,.0f} is usual; {slow.sum()} of"
        remedy = "what else ran then: another job, data from a slow disk, a hot GPU; evaluation and saving are not in these figures"
        yield Finding("throughput_dips", "warning", f"{what} {len(slow)} lines, {lost:.0%} of the time: {_where(spans)}", remedy, spans)


def _stragglers(history: History) -> Iterator[Finding]:
    """`straggler`: the slowest rank, or null; `straggler_slowdown`: its time over the others' median."""
    named = [line["straggler"] for line in history.lines if "straggler" in line]
    rank, count = next(iter(Counter(rank for rank in named if isinstance(rank, int)).most_common(1)), (None, 0))
    if count < 5 or count < 0.5 * len(named):
        return
    slowdown = history.column("straggler_slowdown")[history.column("straggler") == rank]
    by = f", {np.nanmedian(slowdown):.2f} times as long as the others" if np.isfinite(slowdown).any() else ""
    what = f"rank {rank} was the slowest in {count} of {len(named)} lines{by}: all others wait for it"
    yield Finding("straggler", "warning", what, f"look at the device of rank {rank}: temperature, clocks, another process, its link")


def _rollbacks(history: History) -> Iterator[Finding]:
    """From the run's events; from the metrics alone, where a line says ``rolled_back_from``."""
    back = [f"from step {event['step']} to {event.get('to_step')}" for event in history.events if event.get("event") == "rollback"]
    back = back or [f"from step {line['rolled_back_from']}" for line in history.lines + history.superseded if "rolled_back_from" in line]
    if back:
        remedy = "one is an accident of the data; several: lower optimizer.lr, a longer schedule.warmup_steps, and look at the skipped batches"
        what = f"rolled back {len(back)} time{'s' * (len(back) > 1)}: {', '.join(back[:6])}"
        yield Finding("rolled_back", "note" if len(back) == 1 else "warning", what, remedy)
    for kind, remedy in (("no_rollback", "set checkpoints.every, or keep more of them"), ("save_failed", "free some space; the checkpoint before it is intact")):
        for event in [event for event in history.events if event.get("event") == kind][-1:]:
            yield Finding(kind, "warning", f"at step {event['step']}: {event.get('text', '')}", remedy)


def _validation(history: History) -> Iterator[Finding]:
    every, lines = history.facts.evaluate_every, len(history.lines)
    due = history.steps[-1] > every if every else lines >= 2 * MIN_HISTORY
    if due and not np.isfinite(history.column("val_loss")).any():
        what = f"no validation loss in {lines} lines up to step {history.steps[-1]}: overfitting would not be seen"
        yield Finding("no_validation", "warning", what, "evaluation.every, of 1 to 5% of training.steps")


def _forgetting(history: History) -> Iterator[Finding]:
    """What a tuned model has lost of its pre-training: its learning rate is too high for tuning."""
    losses, before = history.column("val_pretraining_loss"), history.column("pretraining_loss_before")
    known, start = np.flatnonzero(np.isfinite(losses)), before[np.isfinite(before)]
    if len(known) and len(start) and losses[known[-1]] > start[0] + DIVERGED:
        now = f"{losses[known[-1]]:.5g} at step {history.steps[known[-1]]}"
        what = f"it forgets: loss on the text of its pre-training was {start[0]:.5g} and is {now}"
        remedy = "lower optimizer.lr (a tenth), fewer steps, or lora, if it is to keep what it knew"
        yield Finding("forgetting", "warning", what, remedy)
