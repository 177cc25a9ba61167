"""The planner against runs that others published: memory, throughput, whether they fit, and how they scale.

``reference/published_runs.csv`` holds the rows with their sources; ``reference/published_runs_left_out.csv`` those
that the planner cannot be asked for, each with the reason. Each row is predicted with the set-up of its own software
(``trainers_published.py``): what is kept of logits, scores, weights and gradients, documented once for a trainer, never for a row.

The few constants of the clock (`Constants`) are fitted on every second size of MPT and checked on the sizes in between, then the
other way round; rows of other software are never fitted.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.trainers_published import REDUCES_AFTERWARDS, TRAINERS
from ds_gpt.config import ModelConfig
from ds_gpt.planner.clock import Constants
from ds_gpt.planner.devices import DEVICES, GIB, Device
from ds_gpt.planner.memory import Memory, memory_of
from ds_gpt.planner.search import CACHED, around_bytes
from ds_gpt.planner.shapes import Shapes
from ds_gpt.planner.speed import speed_of

REFERENCE = Path(__file__).with_name("reference")
FIRST_STEP_GIB = 20.13  # of the 1.011B run, before Adam's moments exist
_GRID = {
    "matrix": (0.70, 0.75, 0.80, 0.85, 0.90, 0.95),
    "half_size": (96.0, 128.0, 192.0, 256.0, 320.0, 384.0, 512.0),
    "attention": (0.20, 0.25, 0.30, 0.35, 0.40, 0.50),
    "bandwidth": (0.60, 0.70, 0.75, 0.80, 0.85, 0.90, 0.95),
    "link": (0.3, 0.4, 0.5, 0.6, 0.7, 0.8),
    "hidden": (0.3, 0.5, 0.75, 1.0),
    "launch_s": (4e-6, 6e-6, 10e-6, 15e-6, 20e-6, 25e-6),
}
# The guesses before any fit: a fit of one half must not start from constants that the other half has shaped.
_START = Constants(matrix=0.80, half_size=96.0, attention=0.50, bandwidth=0.75, launch_s=6e-6, link=0.70, hidden=0.75)
# By the memory that a row states. Those with 16 GB are of one cluster, which has one 100 Gbit/s network for the eight of a node.
_DEVICES = {
    "": DEVICES["a100-80gb"], "80": DEVICES["a100-80gb"], "40": DEVICES["a100-40gb"], "16": replace(DEVICES["v100-16gb"], network=12.5e9 / 8),
}  # fmt: skip
_LLAMA: dict[str, Any] = {"positions": "rotary", "norm": "rmsnorm", "ffn": "swiglu", "bias": False, "tied_head": False}
GOALS = {"memory": (0.06, 0.15), "throughput": (0.10, 0.25)}  # of absolute errors: median, 90th percentile
SCALING_GOAL = 0.03  # from 1 to 8 GPUs: difference of efficiencies


@dataclass(frozen=True)
class Published:
    """One published run, as the planner sees it.

    Attributes:
        name: what ran where.
        family: whose software.
        billions: of parameters, as its name says; None where the row is never fitted.
        shapes: the run as numbers.
        device: what it ran on.
        tokens_per_s: of one GPU.
        peak_bytes: where it was published.
        measured: "allocated" by PyTorch, on the fullest rank or on the last; or taken from the "device", with context, NCCL and fragments.
        speed_unfit: why its time says nothing, where that is so.
    """

    name: str
    family: str
    billions: float | None
    shapes: Shapes
    device: Device
    tokens_per_s: float
    peak_bytes: float | None
    measured: str
    speed_unfit: str

    def error(self, constants: Constants) -> float:
        """Predicted over published tokens a second, less one."""
        return speed_of(self.shapes, self.device, constants).tokens_per_s / self.shapes.devices / self.tokens_per_s - 1

    def memory(self) -> Memory:
        """What the planner says of the rank that was measured."""
        return memory_of(self.shapes, last_stage=self.measured.endswith("last rank"))

    @property
    def on_v100(self) -> bool:
        """Whether it ran on V100s: in 2020 and 2021, by the software of that time."""
        return self.device.key.startswith("v100")

    def memory_error(self, cached: float = CACHED) -> float:
        """Predicted over published peak, less one; `cached`: share beyond what is allocated, where the device's memory was read."""
        assert self.peak_bytes
        predicted = float(self.memory().peak.bytes)
        if self.measured == "device":
            predicted = predicted * (1 + cached) + around_bytes(self.shapes.devices)
        return predicted / self.peak_bytes - 1

    def cached(self) -> float:
        """The share that would have been right."""
        assert self.peak_bytes
        return (self.peak_bytes - around_bytes(self.shapes.devices)) / self.memory().peak.bytes - 1


@dataclass(frozen=True)
class Pair:
    """Two published runs that differ in the number of GPUs alone.

    Attributes:
        few: the run on fewer.
        many: the run on more.
    """

    few: Published
    many: Published

    @property
    def published(self) -> float:
        """Throughput of a GPU among many, over that of one among few."""
        return self.many.tokens_per_s / self.few.tokens_per_s

    @property
    def predicted(self) -> float:
        """The same by the planner."""
        few, many = (speed_of(run.shapes, run.device).tokens_per_s / run.shapes.devices for run in (self.few, self.many))
        return many / few

    @property
    def miss(self) -> float:
        """By how much the prediction is off, as a share."""
        return abs(self.predicted - self.published)

    @property
    def reach(self) -> str:
        """Which of the report's groups it belongs to."""
        if self.many.shapes.devices > self.many.device.per_node:
            return "to other nodes"
        return "from 1 to 8 GPUs" if (self.few.shapes.devices, self.many.shapes.devices) == (1, 8) else "otherwise in a node"


def published() -> list[Published]:
    """The rows of the reference."""
    return [_read(row) for row in _rows("published_runs.csv")]


def left_out() -> list[dict[str, str]]:
    """The rows of the collection that the planner cannot be asked for."""
    return list(_rows("published_runs_left_out.csv"))


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (REFERENCE / name).open(newline="") as file:
        yield from csv.DictReader(file)


def _read(row: dict[str, str]) -> Published:
    keys = ("layers", "hidden", "heads", "seqlen", "vocab", "micro_batch", "num_gpus", "global_batch_tokens", "tensor", "pipeline")
    number = {key: int(float(row[key])) for key in keys}
    model = ModelConfig(
        layers=number["layers"], width=number["hidden"], heads=number["heads"], context=number["seqlen"], vocab_size=number["vocab"],
        dropout=float(row["dropout"]), ffn_width=int(row["ffn"]) if row["ffn"] else "auto", **(_LLAMA if row["architecture"] == "llama" else {}),
        kv_heads=int(row["kv_heads"]) if row["kv_heads"] else "auto",
    )  # fmt: skip
    ranks = number["num_gpus"] // (number["tensor"] * number["pipeline"])
    steps = max(1, round(number["global_batch_tokens"] / (number["micro_batch"] * number["seqlen"] * ranks)))
    buckets = {
        "reduce_bucket_size": 500_000_000, "stage3_prefetch_bucket_size": 50_000_000, "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,  # FSDP gathers each block again in the backward pass and keeps none
    }  # fmt: skip
    precision = row["precision"]
    shapes = Shapes(
        model, int(row["zero_stage"] or 0), ranks, number["micro_batch"], steps, "full" if row["act_ckpt"] == "full" else None, precision,
        4 if precision == "fp32" else 2, precision == "bf16", 2, buckets, row["trainer"] not in REDUCES_AFTERWARDS, True, False, False,
        tensor=number["tensor"], pipeline=number["pipeline"], trainer=TRAINERS[row["trainer"]],
    )  # fmt: skip
    size = re.search(r"(\d+)([mb])", row["model"].lower()) if row["model"].lower().startswith("mpt") else None
    split = "".join(f" {key} {number[key]}" for key in ("tensor", "pipeline") if number[key] > 1)
    name = f"{row['model']}{split} context {number['seqlen']} micro {number['micro_batch']} ZeRO {row['zero_stage'] or 0} on {number['num_gpus']} x {row['gpu_mem_gb'] or 'A100'} GB"
    peak = float(row["peak_gib"]) * GIB if row["peak_gib"] else None
    billions = int(size[1]) * (1 if size[2] == "b" else 1e-3) if size else None
    device = _DEVICES[row["gpu_mem_gb"]]
    return Published(name, row["trainer"], billions, shapes, device, float(row["tok_s_per_gpu"]), peak, row["peak_kind"], row["speed_unfit"])


def fit(runs: Sequence[Published]) -> Constants:
    """The constants of the grid with the least mean absolute error, one at a time, three rounds."""
    best = _START
    least = sum(abs(run.error(best)) for run in runs)
    for _ in range(3):
        for key, values in _GRID.items():
            for value in values:
                tried = replace(best, **{key: value})
                error = sum(abs(run.error(tried)) for run in runs)
                if error < least:
                    best, least = tried, error
    return best


@cache
def held_out() -> tuple[list[tuple[Published, float]], list[Constants]]:
    """Every row's error by constants that no row of its half has shaped, and the constants of the two fits."""
    runs = [run for run in published() if not run.speed_unfit]
    fitted = [run for run in runs if run.billions is not None]
    sizes = sorted({run.billions for run in fitted})
    fits = [fit([run for run in fitted if sizes.index(run.billions) % 2 == half]) for half in (0, 1)]
    found = [(run, run.error(fits[1 - sizes.index(run.billions) % 2])) for run in fitted]
    return found + [(run, run.error(Constants())) for run in runs if run.billions is None], fits


@cache
def memory_held_out() -> tuple[list[tuple[Published, float]], list[float]]:
    """Every peak's error, and the two fits of the only constant, the share that is cached: by the median of every second row that has it, for
    the rows in between. What allocators of 2020 and 2021 kept of a V100's 16 GB shapes neither; there the fits' mean is the share."""
    runs = [run for run in published() if run.peak_bytes]
    fitted = [run for run in runs if run.measured == "device" and not run.on_v100]
    shares = [statistics.median(run.cached() for run in fitted[half::2]) for half in (0, 1)]
    for_v100 = statistics.mean(shares)
    return [(run, run.memory_error(shares[1 - fitted.index(run) % 2] if run in fitted else for_v100)) for run in runs], shares


def median_and_p90(errors: Iterable[float]) -> tuple[float, float]:
    """Of absolute errors."""
    sizes = sorted(map(abs, errors))
    return statistics.median(sizes), sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]


def scaling(runs: Sequence[Published]) -> list[Pair]:
    """Runs that differ in the number of GPUs alone, each with the one on fewest; from one GPU first, few before many."""
    groups: dict[object, list[Published]] = {}
    for run in runs:
        kind = (run.family, run.billions, run.device.key, str(replace(run.shapes, ranks=0, buckets={})))
        groups.setdefault(kind, []).append(run)
    pairs = []
    for group in groups.values():
        few = min(group, key=lambda run: run.shapes.devices)
        pairs += [Pair(few, run) for run in group if run.shapes.devices > few.shapes.devices]
    return sorted(pairs, key=lambda pair: (pair.few.shapes.devices, pair.many.shapes.devices))
