"""A run's curves in one picture: loss, learning rate, gradient norm, throughput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ds_gpt.trainer.diagnosis import Finding, loss_curve, smooth
from ds_gpt.trainer.health import MAX_GRADIENT, MIN_GRADIENT
from ds_gpt.trainer.metrics_history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MEASURED, _SMOOTH, _VALIDATION, _MARK, _QUIET = "#a9c4e4", "#1f4e8c", "#d9601a", "#c1272d", "#888888"
# In which panel a finding is marked.
_PANEL = {"exploding_gradient": "grad_norm", "vanishing_gradient": "grad_norm", "slower": "tokens_per_s", "throughput_dips": "tokens_per_s"}


def plot(history: History, findings: Sequence[Finding], path: Path, title: str) -> None:
    """Draw the curves, with the findings marked where they show.

    Raises:
        OSError: the file cannot be written.
        ValueError: its ending names no image format.
    """
    draw(history, findings, title).savefig(path, dpi=110)


def draw(history: History, findings: Sequence[Finding], title: str) -> Figure:
    """The picture itself."""
    from matplotlib.figure import Figure  # without pyplot: no display, no state shared with the caller

    figure = Figure(figsize=(11, 10), layout="constrained")
    panels = dict(zip(("loss", "lr", "grad_norm", "tokens_per_s"), figure.subplots(4, 1, sharex=True, height_ratios=[3, 1, 1.6, 1.3]), strict=True))
    _loss(panels["loss"], history)
    _learning_rate(panels["lr"], history)
    _gradient(panels["grad_norm"], history)
    _throughput(panels["tokens_per_s"], history)
    for finding in findings:
        _mark(panels[_PANEL.get(finding.kind, "loss")], finding, history)
    for axes in panels.values():
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False, fontsize=8.5, ncols=7, loc="lower right", bbox_to_anchor=(1, 0.99), borderpad=0.1, columnspacing=1.2)
    panels["tokens_per_s"].set_xlabel("step")
    kinds = ", ".join(finding.kind.replace("_", " ") for finding in findings) or "nothing is wrong"
    figure.suptitle(f"{title}: {kinds}", fontsize=11, x=0.01, ha="left", wrap=True)
    return figure


def _loss(axes: Axes, history: History) -> None:
    """The loss on a scale that its ordinary values fill; what is above is marked at the upper edge."""
    steps, loss, validation = history.steps, history.column("loss"), history.column("val_loss")
    curve, evaluated = loss_curve(history), np.isfinite(validation)
    if history.superseded:
        gone = [(line["step"], line["loss"]) for line in history.superseded if isinstance(line["loss"], float)]
        axes.plot(*zip(*gone, strict=True), ".", color=_QUIET, markersize=2, label="done again after going back") if gone else None
    axes.plot(steps, loss, color=_MEASURED, linewidth=0.8, label="training")
    axes.plot(steps, curve, color=_SMOOTH, linewidth=1.6, label="training, smoothed")
    if evaluated.any():
        axes.plot(steps[evaluated], validation[evaluated], "o-", color=_VALIDATION, markersize=4, linewidth=1.2, label="validation")
        best = int(np.nanargmin(validation))
        along = (steps[best] - steps[0]) / max(1, steps[-1] - steps[0])
        side = "left" if along < 0.1 else "right" if along > 0.9 else "center"  # within the axes wherever it is
        axes.annotate(f"best {validation[best]:.4g}", (steps[best], validation[best]), (0, -14), textcoords="offset points", color=_VALIDATION, ha=side)
    shown = np.concatenate([curve[np.isfinite(curve)], validation[evaluated]])
    if len(shown):
        low, high, start = min(shown.min(), np.nanmin(loss)) if np.isfinite(loss).any() else shown.min(), shown.max(), shown[0]
        if history.facts.vocab_size:
            guessing = math.log(history.facts.vocab_size)
            axes.axhline(guessing, color=_QUIET, linestyle=":", linewidth=1, label=f"guessing: ln V = {guessing:.2f}")
            high, start = max(high, guessing), max(start, guessing)
        high = min(high, 2 * start)  # of a run that diverged one wants to see what was before
        top = high + 0.15 * max(high - low, 0.1)
        axes.set_ylim(low - 0.08 * max(top - low, 0.1), top)
        above = loss > top
        if above.any():
            axes.plot(steps[above], np.full(above.sum(), top), "^", color=_MARK, markersize=5, clip_on=False, label=f"above, up to {np.nanmax(loss):.3g}")
    for step in steps[~np.isfinite(loss)]:
        axes.axvline(step, color=_MARK, linewidth=0.8)
    for _, again in history.returns:
        axes.axvline(again, color=_QUIET, linestyle="--", linewidth=1)
    axes.set_ylabel("loss, nats a token")


def _learning_rate(axes: Axes, history: History) -> None:
    axes.plot(history.steps, history.column("lr"), color=_SMOOTH, linewidth=1.6)
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    axes.set_ylabel("learning rate")


def _gradient(axes: Axes, history: History) -> None:
    norms, steps = history.column("grad_norm"), history.steps
    axes.axhspan(0.1, MAX_GRADIENT, color="#2e8b57", alpha=0.08, label="usual, 0.1 to 10")
    if (norms < 10 * MIN_GRADIENT).any():
        axes.axhline(MIN_GRADIENT, color=_QUIET, linestyle=":", linewidth=1)
    axes.plot(steps, norms, color=_SMOOTH, linewidth=0.9)
    if (skipped := ~np.isfinite(norms) | (history.column("skipped") > 0)).any():
        axes.plot(steps[skipped], np.full(skipped.sum(), MAX_GRADIENT), "x", color=_MARK, markersize=6, label=f"{skipped.sum()} steps not finite or skipped")
    axes.set_yscale("log")
    axes.set_ylabel("gradient norm")


def _throughput(axes: Axes, history: History) -> None:
    speed = history.column("tokens_per_s")
    axes.plot(history.steps, speed, color=_MEASURED, linewidth=0.8)
    axes.plot(history.steps, smooth(speed, half=4), color=_SMOOTH, linewidth=1.6)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel("tokens/s")


def _mark(axes: Axes, finding: Finding, history: History) -> None:
    """Shade where a finding shows; a place narrower than the eye sees is widened."""
    width = 0.004 * (history.steps[-1] - history.steps[0])
    for number, (first, last) in enumerate(finding.spans):
        missing = max(0.0, width - (last - first)) / 2
        axes.axvspan(first - missing, last + missing, color=_MARK, alpha=0.12, linewidth=0, label=finding.kind.replace("_", " ") if number == 0 else None)
