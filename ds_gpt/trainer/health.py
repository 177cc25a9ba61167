"""Is the run well? A pure judgement over what each step reported: no torch, no clock, no random numbers.

Every rank feeds the same numbers, so every rank comes to the same verdict without a word to the others. What it needs
to go on judging after a resume is saved with a checkpoint: a run that was saved inside a spike is not to be resumed with
the spike for its usual level.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from ds_gpt.config.run import HealthConfig

Severity = Literal["ok", "warn", "rollback"]
Kind = Literal[
    "healthy", "non_finite", "loss_scale", "skipped_steps", "loss_spike", "divergence", "gradient_spike", "vanishing_gradient", "plateau", "overfitting"
]

MIN_HISTORY = 16  # steps before a loss is judged: a median and MAD of fewer are noise themselves
SPIKE_FLOOR = 0.2  # nats; below it a rise is no spike however quiet the run: perplexity times 1.22
LONE_SPIKE = 2.0  # times the limit: a single step that is reported; noise with long tails passes the limit itself now and then
DIVERGED = 0.5  # nats above the best; perplexity times 1.65
PROGRESS = 0.01  # nats; less is within the noise of a median over a window
MAX_GRADIENT, MIN_GRADIENT = 10.0, 0.01  # of the norm before clipping; 0.1 to 10 is usual
GRADIENT_JUMP = 10.0  # times the median: a single step that is reported by itself
MIN_LOSS_SCALE = 1.0  # below it fp16 loses what it is scaled for
HISTORY_STEPS = 4096  # remembered, so that a rollback finds the losses from before the checkpoint
_MAD_TO_SIGMA = 1.4826  # makes the MAD of Gaussian noise its standard deviation (Rousseeuw and Croux 1993)


@dataclass(frozen=True)
class Verdict:
    """What a step says about the run.

    Attributes:
        kind: what is wrong, or "healthy".
        severity: "rollback" where the weights or the data at hand cannot be trusted.
        message: what was seen, with the numbers.
        remedy: what a person would do about it.
        step: the step that was judged.
        since: the first step at which it showed.
        good_step: the newest step whose checkpoint can be trusted. A loss is measured before its step's update, so a
            loss that is bad at `since` may be the doing of update `since` - 1: the step before that is sound.
    """

    kind: Kind
    severity: Severity
    message: str
    remedy: str
    step: int
    since: int
    good_step: int


def spike_limit(values: Sequence[float], mads: float, floor: float = SPIKE_FLOOR) -> tuple[float, float]:
    """Median of `values`, and the value from which on it is a spike: `mads` scaled MADs above, and `floor` at least."""
    middle = median(values)
    mad = median(abs(value - middle) for value in values)
    return middle, middle + max(mads * _MAD_TO_SIGMA * mad, floor)


class Level:
    """The losses that a loss is compared with: recent ones, none of them from a spike.

    While fewer than twice `window` are known, the later half of them: the steep first steps would widen the spread.
    """

    def __init__(self, window: int, mads: float) -> None:
        self._window, self._mads = window, mads
        self._history: deque[tuple[int, float]] = deque(maxlen=HISTORY_STEPS)

    def admit(self, step: int, loss: float) -> None:
        """Take in a loss that is no spike."""
        self._history.append((step, loss))

    def forget_after(self, step: int) -> None:
        """Forget the losses after `step`."""
        while self._history and self._history[-1][0] > step:
            self._history.pop()

    def steps(self) -> list[tuple[int, float]]:
        """All that is remembered, oldest first."""
        return list(self._history)

    def limit(self) -> tuple[float, float] | None:
        """Median and the loss from which on it is a spike, or None while too few losses are known."""
        known = len(self._history)
        if known < MIN_HISTORY:
            return None
        used = min(self._window, max(MIN_HISTORY, known // 2))
        return spike_limit([self._history[-back][1] for back in range(1, used + 1)], self._mads)


class Streak:
    """Consecutive steps of one kind. Says once that there are enough, until the streak has ended."""

    def __init__(self) -> None:
        self.since, self.length = 0, 0

    def reaches(self, holds: bool, step: int, enough: int) -> bool:
        """Count a step; whether it is the one that makes `enough`."""
        self.length = self.length + 1 if holds else 0
        if self.length == 1:
            self.since = step
        return holds and self.length == enough


class HealthMonitor:
    """Judges a run step by step.

    Args:
        config: thresholds and patience.
        vocab_size: V, where known. A model that has learned and is then worse than guessing, at ln V, has diverged.
    """

    def __init__(self, config: HealthConfig, vocab_size: int | None = None) -> None:
        self._config = config
        self._guessing = math.log(vocab_size) if vocab_size else math.inf
        self._level = Level(config.window, config.spike_mads)
        self._evaluations: list[tuple[int, float, float]] = []  # step, validation loss, training loss
        self._start_over()

    def _start_over(self) -> None:
        self._best: tuple[int, float] | None = None  # lowest median of a window, and its step
        self._improved: tuple[int, float] | None = None  # the same, moved only by progress that counts
        self._stopped, self._stuck, self._spiking, self._diverging = Streak(), Streak(), Streak(), Streak()
        self._exploding, self._vanishing, self._flat, self._overfitting, self._at_minimum = Streak(), Streak(), Streak(), Streak(), Streak()
        self._recent: deque[float] = deque(maxlen=MIN_HISTORY)
        self._gradients: deque[float] = deque(maxlen=self._config.window)
        self._gradient_reported, self._large_at = False, 0
        self._skips: deque[bool] = deque(maxlen=self._config.window)
        self._skips_reported = False
        self._loss_scale = math.inf
        self._lowest_scale = math.inf

    @property
    def suspect(self) -> bool:
        """Whether something may be under way that is not confirmed yet: what is saved now may not be worth keeping.

        Where it was confirmed and the run went on all the same, as ``action: warn`` has it, saving goes on too.
        """
        patience, window = self._config.patience, self._config.window
        streaks = ((self._spiking, patience), (self._stopped, patience), (self._stuck, patience), (self._diverging, window))
        return any(0 < streak.length < enough for streak, enough in streaks)

    def memory(self) -> dict[str, Any]:
        """What `remember` needs to judge as this monitor would: enough losses for the level, and the best ones."""
        return {
            "losses": self._level.steps()[-2 * self._config.window :],
            "best": self._best,
            "improved": self._improved,
            "evaluation": min(self._evaluations, key=lambda entry: entry[1], default=None),
        }

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Go on where the monitor stood that gave `memory`, which may have been JSON meanwhile."""
        for step, loss in memory["losses"]:
            self._admit(step, loss)
        self._best, self._improved = (tuple(memory[key]) if memory[key] else None for key in ("best", "improved"))
        self._evaluations = [tuple(memory["evaluation"])] if memory["evaluation"] else []

    def observe(
        self, step: int, loss: float, grad_norm: float, applied: bool = True, loss_scale: float | None = None, val_loss: float | None = None
    ) -> Verdict:
        """Judge a step. Losses in nats a token.

        Args:
            step: optimizer steps completed, this one included.
            loss: training loss, over all ranks.
            grad_norm: of the whole gradient, before clipping.
            applied: whether the weights changed.
            loss_scale: fp16's loss scale after the step; None in other precisions.
            val_loss: validation loss, at a step that was evaluated.
        """
        verdicts: list[Verdict | None] = []
        if self._config.enabled:
            verdicts.append(self._non_finite(step, loss, grad_norm, applied, loss_scale))
            if loss_scale is not None:
                verdicts.append(self._scale(step, applied, loss_scale))
            verdicts.append(self._skipped(step, applied, loss_scale))
            if math.isfinite(loss):
                verdicts += [self._diverged(step, loss), self._spike(step, loss)]
            if math.isfinite(grad_norm):
                verdicts.append(self._gradient(step, grad_norm))
            verdicts += [self._plateau(step), self._overfit(step, val_loss)]
        found = [verdict for verdict in verdicts if verdict]
        gravest = next((verdict for verdict in found if verdict.severity == "rollback"), None)
        return gravest or (found[0] if found else Verdict("healthy", "ok", "", "", step, step, step))

    def rolled_back(self, to_step: int) -> None:
        """The run stands at `to_step` again: forget what came after."""
        self._level.forget_after(to_step)
        kept, evaluations = self._level.steps(), self._evaluations
        self._level = Level(self._config.window, self._config.spike_mads)
        self._start_over()
        for step, loss in kept:
            self._admit(step, loss)
        self._evaluations = [entry for entry in evaluations if entry[0] <= to_step]

    def _non_finite(self, step: int, loss: float, grad_norm: float, applied: bool, loss_scale: float | None) -> Verdict | None:
        """NaN or infinity. Under fp16 a gradient that overflows is how the loss scale is found; `_scale` judges that."""
        sound = math.isfinite(loss) and math.isfinite(grad_norm)
        searching = loss_scale is not None and not applied and math.isfinite(loss)
        confirmed = self._stopped.reaches(not searching and (not sound or not applied), step, self._config.patience)
        confirmed |= self._stopped.length == self._config.window  # once more: nobody went back, and nothing is learned any more
        seen = f"loss {loss:.4g}, gradient norm {grad_norm:.4g} at step {step}"
        if applied and not sound:  # the engine skips such a step; if one ever gets through, nothing afterwards is worth a thing
            return self._rollback("non_finite", f"{seen}, and the weights took it", "go back: the weights hold numbers that are not finite", step, step)
        if confirmed:
            message = f"{seen}: the {self._stopped.length}. step in a row without an update"
            return self._rollback("non_finite", message, "skip these batches; if it comes back: lower lr, bf16 rather than fp16", step, self._stopped.since)
        if self._stopped.length == 1:
            return self._warn("non_finite", f"{seen}; the step was skipped", "nothing, where it stays at one; else look at this batch", step, step)
        return None

    def _scale(self, step: int, applied: bool, loss_scale: float) -> Verdict | None:
        """A loss scale that has nowhere left to fall, or does not fall while steps are skipped."""
        fell = loss_scale < self._loss_scale
        self._loss_scale = loss_scale
        # DeepSpeed's hysteresis of 2 spares the scale once at the first overflow: hence patience, not one step.
        if self._stuck.reaches(not applied and not fell, step, self._config.patience):
            message = f"loss scale {loss_scale:g} and still overflowing: {self._stuck.length} steps in a row skipped at steps {self._stuck.since}-{step}"
            return self._rollback("loss_scale", message, "go back; then bf16, or a lower lr", step, self._stuck.since)
        if self._at_minimum.reaches(loss_scale <= MIN_LOSS_SCALE, step, 1):
            message = f"loss scale fell to {loss_scale:g} at step {step}: small gradients round to zero in fp16"
            return self._warn("loss_scale", message, "bf16, or a lower lr: gradients this large are no accident", step, step)
        return None

    def _skipped(self, step: int, applied: bool, loss_scale: float | None) -> Verdict | None:
        """Skips that come back. Those that lead fp16's scale to a new lowest are its search, and not counted."""
        searching = loss_scale is not None and loss_scale < self._lowest_scale
        self._lowest_scale = min(self._lowest_scale, math.inf if loss_scale is None or applied else loss_scale)
        self._skips.append(not applied and not searching)
        often, count = 2 * self._config.patience, sum(self._skips)
        if count < often // 2:
            self._skips_reported = False
        if count < often or self._skips_reported:
            return None
        self._skips_reported = True
        message = f"{count} of the last {len(self._skips)} steps skipped up to step {step}: their gradients were not finite"
        return self._warn("skipped_steps", message, "lower lr or a longer warm-up; bf16 rather than fp16", step, step)

    def _spike(self, step: int, loss: float) -> Verdict | None:
        config, level = self._config, self._level.limit()
        above = level is not None and loss > level[1]
        confirmed = self._spiking.reaches(above, step, config.patience)
        if level is None or not above:
            self._admit(step, loss)
            return None
        if self._spiking.length >= config.window:  # reported, and nobody went back: this is the level now
            self._level.forget_after(-1)
            self._spiking = Streak()
            return None
        message = f"loss {loss:.4f} at step {step}, {loss - level[0]:+.4f} on the median {level[0]:.4f} of recent steps (limit {level[1]:.4f})"
        if confirmed:
            message += f", for {self._spiking.length} steps"
            return self._rollback("loss_spike", message, "go back before it, skip its batches, lower lr for a while", step, self._spiking.since)
        if self._spiking.length == 1 and loss - level[0] > LONE_SPIKE * (level[1] - level[0]):
            return self._warn("loss_spike", message, f"nothing yet: it counts once it has lasted {config.patience} steps", step, step)
        return None

    def _admit(self, step: int, loss: float) -> None:
        """A good loss: the level moves, and with it the best one."""
        self._level.admit(step, loss)
        if (level := self._level.limit()) is not None:
            if self._best is None or level[0] < self._best[1]:
                self._best = (step, level[0])
            if self._improved is None or level[0] < self._improved[1] - PROGRESS:
                self._improved = (step, level[0])

    def _diverged(self, step: int, loss: float) -> Verdict | None:
        self._recent.append(loss)
        if self._best is None:
            return None
        best_step, best = self._best
        limit = min(best + DIVERGED, max(self._guessing, best + SPIKE_FLOOR))
        smooth = median(self._recent)  # of all recent losses, the spike's too: noise must not end the streak
        if not self._diverging.reaches(smooth > limit, step, self._config.window):
            return None
        message = f"loss {smooth:.4f} up to step {step}: above {limit:.4f} for {self._config.window} steps, and its best was {best:.4f} at step {best_step}"
        return Verdict("divergence", "rollback", message, "go back to the best step; lower lr, a longer warm-up", step, self._diverging.since, best_step)

    def _gradient(self, step: int, grad_norm: float) -> Verdict | None:
        usual = median(self._gradients) if len(self._gradients) >= MIN_HISTORY else None
        self._gradients.append(grad_norm)
        large = usual is not None and grad_norm > MAX_GRADIENT  # the first steps of a large model may well be above
        lasting = self._exploding.reaches(large, step, self._config.patience)
        if not large:
            self._gradient_reported &= step - self._large_at < MIN_HISTORY  # one report for a burst, however it flickers
        else:
            self._large_at = step
        remedy = "clipping bounds the update (gradient_clipping 1.0); where it lasts: lower lr, a longer warm-up"
        if lasting and not self._gradient_reported:
            self._gradient_reported = True
            message = f"gradient norm {grad_norm:.3g} at step {step}, above {MAX_GRADIENT:g} for {self._exploding.length} steps"
            return self._warn("gradient_spike", message, remedy, step, self._exploding.since)
        if large and not self._gradient_reported and usual is not None and grad_norm > GRADIENT_JUMP * usual:
            self._gradient_reported = True
            return self._warn("gradient_spike", f"gradient norm {grad_norm:.3g} at step {step}; its median was {usual:.3g}", remedy, step, step)
        if self._vanishing.reaches(grad_norm < MIN_GRADIENT, step, MIN_HISTORY):
            message = f"gradient norm {grad_norm:.2g} at step {step}, below {MIN_GRADIENT:g} for {MIN_HISTORY} steps"
            remedy = "look whether the loss still falls; else the initialization, lr, or fp16"
            return self._warn("vanishing_gradient", message, remedy, step, self._vanishing.since)
        return None

    def _plateau(self, step: int) -> Verdict | None:
        """No progress for ten windows and a quarter of the run: learning slows with time, so what is long grows with it."""
        if self._improved is None:
            return None
        since, loss = self._improved
        if not self._flat.reaches(step - since >= max(10 * self._config.window, step / 4), step, 1):
            return None
        message = f"loss {loss:.4f} since step {since}: not {PROGRESS:g} nats better in the {step - since} steps up to {step}"
        return self._warn("plateau", message, "decay lr, or stop here; else a larger model or batch", step, since)

    def _overfit(self, step: int, val_loss: float | None) -> Verdict | None:
        """Validation above its best at `patience` evaluations in a row, while the training loss fell."""
        level = self._level.limit()
        if val_loss is None or level is None or not math.isfinite(val_loss):
            return None
        self._evaluations.append((step, val_loss, level[0]))
        best_step, best, training = min(self._evaluations, key=lambda entry: entry[1])
        apart = val_loss > best + PROGRESS and level[0] < training - PROGRESS
        if not self._overfitting.reaches(apart, step, self._config.patience):
            return None
        message = (
            f"validation loss {val_loss:.4f} at step {step}, {val_loss - best:+.4f} on its best {best:.4f} at step {best_step},"
            f" while the training loss fell by {training - level[0]:.4f}"
        )
        return self._warn("overfitting", message, "take the checkpoint of the best step; more data, dropout, weight decay", step, best_step)

    def _warn(self, kind: Kind, message: str, remedy: str, step: int, since: int) -> Verdict:
        return Verdict(kind, "warn", message, remedy, step, since, max(0, since - 2))

    def _rollback(self, kind: Kind, message: str, remedy: str, step: int, since: int) -> Verdict:
        return Verdict(kind, "rollback", message, remedy, step, since, max(0, since - 2))
