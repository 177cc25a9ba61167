"""The candidates in one picture: memory stacked by kind, with the device's limit as a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ds_gpt.planner.devices import GIB, Device
from ds_gpt.planner.report import label
from ds_gpt.planner.search import Candidate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {
    "weights": "#1f4e8c", "masters": "#4f81bd", "moments": "#a9c4e4", "gradients": "#d9601a", "gathered weights": "#76a5af", "buckets": "#f0b27a",
    "activations": "#2e8b57", "logits and loss": "#8fce9f", "backward temporaries": "#b58fc9",
}  # fmt: skip
_LIMIT, _OTHER = "#c1272d", "#888888"


def plot(shown: Sequence[Candidate], device: Device, path: Path, title: str) -> None:
    """Draw the memory of each candidate.

    Raises:
        OSError: the file cannot be written.
        ValueError: its ending names no image format.
    """
    draw(shown, device, title).savefig(path, dpi=110)


def draw(shown: Sequence[Candidate], device: Device, title: str) -> Figure:
    """The picture itself."""
    from matplotlib.figure import Figure  # without pyplot: no display, no state shared with the caller

    figure = Figure(figsize=(12, 1.8 + 0.36 * len(shown)), layout="constrained")
    axes = figure.subplots()
    places = list(range(len(shown)))
    left = [0.0] * len(shown)
    for kind, colour in _COLOURS.items():
        sizes = [candidate.memory.peak.kinds.get(kind, 0) / GIB for candidate in shown]
        if any(sizes):
            axes.barh(places, sizes, left=left, color=colour, label=kind, height=0.72)
            left = [start + size for start, size in zip(left, sizes, strict=True)]
    around = [candidate.needed_bytes[1] / GIB - start for candidate, start in zip(shown, left, strict=True)]
    axes.barh(places, around, left=left, color="none", edgecolor=_OTHER, hatch="////", linewidth=0.5, label="context, NCCL, fragments: at most", height=0.72)
    limit = device.memory_bytes / GIB
    axes.axvline(limit, color=_LIMIT, linewidth=1.6, label=f"{device.name}: {limit:.1f} GiB")
    widest = max(candidate.needed_bytes[1] / GIB for candidate in shown)
    axes.set_xlim(0, min(1.02 * max(widest, limit), 3 * limit))  # what is far too large is cut
    for place, candidate in zip(places, shown, strict=True):
        said = f"{candidate.speed.tokens_per_s:,.0f} tokens/s" if candidate.fits else "does not fit"
        axes.annotate(said, (1.005, place), xycoords=("axes fraction", "data"), va="center", fontsize=8, color="black" if candidate.fits else _LIMIT)
    axes.set_yticks(places, [label(candidate) for candidate in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("GiB on the fullest device, at the peak of a step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    return figure
