"""The pictures of a report, each as PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

_BY_RANKS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3")
_KINDS = {
    "weights": "#4c72b0",
    "gathered": "#92b4e3",
    "gradients": "#dd8452",
    "optimizer": "#55a868",
    "activations": "#c44e52",
    "buffers": "#9a9a9a",
}
_PHASES = {
    "forward": "#4c72b0",
    "backward": "#dd8452",
    "optimizer": "#55a868",
    "communication": "#c44e52",
    "waiting for ranks": "#e8a9ab",
    "data wait": "#8172b3",
    "bookkeeping": "#9a9a9a",
}
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "figure.dpi": 110,
}


def throughput(title: str, bars: Sequence[tuple[str, int, float, float, float]]) -> bytes:
    """Tokens a second by configuration, a bar for each number of ranks.

    Args:
        title: of the picture.
        bars: (configuration, ranks, tokens/s at the median step, at the 90th percentile, at the 10th).
    """
    labels = list(dict.fromkeys(label for label, *_ in bars))
    ranks = sorted({count for _, count, *_ in bars})
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(max(6.5, 0.95 * len(labels) + 2), 4.2))
        width = 0.8 / len(ranks)
        for index, count in enumerate(ranks):
            chosen = [bar for bar in bars if bar[1] == count]
            places = [labels.index(bar[0]) + (index - (len(ranks) - 1) / 2) * width for bar in chosen]
            heights = [bar[2] for bar in chosen]
            below, above = [bar[2] - bar[3] for bar in chosen], [bar[4] - bar[2] for bar in chosen]
            look = {"color": _BY_RANKS[index % 4], "label": _ranks(count), "capsize": 2, "ecolor": "#444444", "error_kw": {"lw": 1}}
            axes.bar(places, heights, width * 0.94, yerr=(below, above), **look)
            for place, height in zip(places, heights, strict=True):
                text = f"{height / 1000:,.1f}k" if height >= 1000 else f"{height:,.0f}"
                axes.text(place, height * 0.02, text, ha="center", va="bottom", fontsize=8, color="white", rotation=90 if width < 0.3 else 0)
        axes.set_xticks(range(len(labels)), [label.replace(", ", "\n") for label in labels], fontsize=8.5)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_ylabel("tokens/s, all ranks")
        axes.set_title(title)
        _legend(axes, len(ranks))
        axes.set_xlabel("whiskers: 10th to 90th percentile of the steps", fontsize=8, color="#666666")
        return _png(figure)


def stacked(title: str, rows: Sequence[tuple[str, Mapping[str, float]]], what: str) -> bytes:
    """Horizontal stacked bars, a row a case: ``memory`` in MiB or GiB, or ``time`` in milliseconds a step."""
    colours = _KINDS if what == "memory" else _PHASES
    largest = max(sum(parts.values()) for _, parts in rows)
    unit, scale = "ms a step", 1e-3
    if what == "memory":
        unit, scale = ("GiB a rank", 2**30) if largest > 4 * 2**30 else ("MiB a rank", 2**20)
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(9, 0.36 * len(rows) + 1.7))
        left = [0.0] * len(rows)
        for kind, colour in colours.items():
            values = [parts.get(kind, 0.0) / scale for _, parts in rows]
            if max(values) <= 0.001 * largest / scale:
                continue
            axes.barh(range(len(rows)), values, 0.74, left=left, color=colour, label=kind)
            left = [start + value for start, value in zip(left, values, strict=True)]
        for place, total in enumerate(left):
            axes.text(total + 0.01 * largest / scale, place, f"{total:,.1f}" if total < 1000 else f"{total:,.0f}", va="center", fontsize=8.5)
        axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=9)
        axes.invert_yaxis()
        axes.set_xlim(0, largest / scale * 1.1)
        axes.set_xlabel(unit)
        axes.set_title(title, pad=26)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=len(colours), frameon=False, fontsize=8.5, handlelength=1, columnspacing=1.1)
        return _png(figure)


def scaling(title: str, lines: Mapping[str, Sequence[tuple[int, float]]]) -> bytes:
    """Efficiency over the number of ranks: tokens a second as a share of ideal, that is of ranks times the smallest run's."""
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(7.5, 4.2))
        counts = sorted({count for points in lines.values() for count, _ in points})
        axes.axhline(1.0, color="#444444", linestyle="--", linewidth=1, label="ideal")
        for index, (name, points) in enumerate(lines.items()):
            first_count, first_speed = points[0]
            shares = [speed / first_speed * first_count / count for count, speed in points]
            axes.plot([count for count, _ in points], shares, marker="os^Dv<>p"[index % 8], color=plt.get_cmap("tab10")(index % 10), label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.set_xlim(counts[0] * 0.9, counts[-1] * 1.1)
        axes.set_ylim(0, max(1.15, axes.get_ylim()[1]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        axes.set_xlabel("ranks")
        axes.set_ylabel("efficiency")
        axes.set_title(title)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
        return _png(figure)


def ratios(title: str, bars: Sequence[tuple[str, float, float, float, int]]) -> bytes:
    """Many ranks against the fewest: ratio of tokens a second with its interval, and the ideal.

    Args:
        title: of the picture.
        bars: (configuration, ratio, low and high end of its interval, times as many ranks).
    """
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(max(6.0, 0.8 * len(bars) + 2), 4.0))
        places = range(len(bars))
        values = [bar[1] for bar in bars]
        errors = ([max(0.0, bar[1] - bar[2]) for bar in bars], [max(0.0, bar[3] - bar[1]) for bar in bars])
        axes.bar(places, values, 0.62, color=_BY_RANKS[1], yerr=errors, capsize=3, ecolor="#444444", error_kw={"lw": 1})
        for place, bar in zip(places, bars, strict=True):
            axes.text(place, 0.03 * max(values), f"{bar[1]:.2f} x", ha="center", fontsize=9, color="white")
            axes.hlines(bar[4], place - 0.38, place + 0.38, color="#444444", linestyle="--", linewidth=1, label="ideal" if place == 0 else None)
        axes.set_xticks(places, [bar[0].replace(", ", "\n") for bar in bars], fontsize=8.5)
        axes.set_ylabel("tokens/s, times that of one rank")
        axes.set_ylim(0, max(max(bar[4], bar[3]) for bar in bars) * 1.12)
        axes.set_title(title)
        axes.set_xlabel("whiskers: 95% bootstrap interval", fontsize=8, color="#666666")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
        return _png(figure)


def _legend(axes: Axes, entries: int) -> None:
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=entries, frameon=False, fontsize=9)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    metadata: dict[str, Any] = {"Software": None}  # the same picture, the same bytes
    figure.savefig(buffer, format="png", bbox_inches="tight", metadata=metadata)
    plt.close(figure)
    return buffer.getvalue()
