"""The planner's clock against published throughput: ``python -m benchmarks.planner`` prints the errors, row by row with --rows.

The rows are LLM-Foundry's and MosaicML's (``reference/published_throughput.csv``, each with its source): MPT from 125M to 70B
on 8 to 256 A100, FSDP's full sharding, which sends what ZeRO 3 does. The MPT block is ours but for its biases. Of the other rows of
the collection none is used: tensor or pipeline parallel, blocks that ds_gpt cannot build, fused kernels that it does not
have, or a shape or micro-batch that was not published. So this checks one family of software, on one kind of GPU.

Constants are fitted on every second model size and checked on the sizes in between, then the other way round.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ds_gpt.config import ModelConfig
from ds_gpt.planner.devices import DEVICES, Device
from ds_gpt.planner.shapes import Shapes
from ds_gpt.planner.speed import Constants, speed_of

REFERENCE = Path(__file__).with_name("reference") / "published_throughput.csv"
_GRID = {
    "matrix": (0.70, 0.75, 0.80, 0.85, 0.90),
    "half_size": (96.0, 128.0, 192.0, 256.0, 320.0, 384.0),
    "attention": (0.20, 0.25, 0.30, 0.35, 0.40, 0.50),
    "bandwidth": (0.60, 0.70, 0.75, 0.80, 0.85, 0.90),
    "link": (0.3, 0.5, 0.7, 0.8),
    "hidden": (0.3, 0.5, 0.75, 1.0),
    "launch_s": (4e-6, 6e-6, 10e-6, 15e-6, 20e-6),
}
# The guesses before any fit: a fit of one half must not start from constants that the other half has shaped.
_START = Constants(matrix=0.80, half_size=96.0, attention=0.50, bandwidth=0.75, launch_s=6e-6, link=0.70, hidden=0.75)
# FSDP gathers each block again in the backward pass and keeps none.
_FSDP = {
    "reduce_bucket_size": 100_000_000,
    "stage3_prefetch_bucket_size": 100_000_000,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}


@dataclass(frozen=True)
class Published:
    """One published run, as the planner sees it."""

    name: str
    billions: float
    shapes: Shapes
    device: Device
    tokens_per_s: float  # of one GPU

    def error(self, constants: Constants) -> float:
        """Predicted over published tokens a second, less one."""
        predicted = speed_of(self.shapes, self.device, constants).tokens_per_s / self.shapes.ranks
        return predicted / self.tokens_per_s - 1


def published() -> list[Published]:
    """The rows of the reference."""
    with REFERENCE.open(newline="") as file:
        return [_read(row) for row in csv.DictReader(file)]


def _read(row: dict[str, str]) -> Published:
    number = {key: int(float(row[key])) for key in ("layers", "hidden", "heads", "seqlen", "vocab", "micro_batch", "num_gpus", "global_batch_tokens")}
    model = ModelConfig(layers=number["layers"], width=number["hidden"], heads=number["heads"], context=number["seqlen"], vocab_size=number["vocab"])
    steps = max(1, round(number["global_batch_tokens"] / (number["micro_batch"] * number["seqlen"] * number["num_gpus"])))
    policy = "full" if row["act_ckpt"] == "full" else None
    shapes = Shapes(model, 3, number["num_gpus"], number["micro_batch"], steps, policy, "bf16", 2, True, 2, _FSDP, True, True, False, False)
    size, unit = re.search(r"(\d+)([mb])", row["model"].lower()).groups()  # type: ignore[union-attr]
    name = f"{row['model']} context {number['seqlen']} micro {number['micro_batch']} on {number['num_gpus']} x {row['gpu_mem_gb']} GB"
    return Published(name, int(size) * (1 if unit == "b" else 1e-3), shapes, DEVICES[f"a100-{row['gpu_mem_gb']}gb"], float(row["tok_s_per_gpu"]))


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


def summary(errors: Iterable[float]) -> str:
    """Median, 90th percentile and worst of absolute errors."""
    sizes = sorted(map(abs, errors))
    return f"median {statistics.median(sizes):.1%}, p90 {sizes[int(0.9 * len(sizes))]:.1%}, worst {sizes[-1]:.1%} of {len(sizes)}"


def main() -> None:
    """Fit on one half, check on the other, both ways; then the constants as they are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description="The planner's clock against published throughput.")
    parser.add_argument("--rows", action="store_true", help="print every row's error")
    options = parser.parse_args()
    runs = published()
    sizes = sorted({run.billions for run in runs})
    for half in (0, 1):
        fitted = fit([run for run in runs if sizes.index(run.billions) % 2 == half])
        print("fitted on", ", ".join(f"{size:g}B" for size in sizes[half::2]), "->", fitted)
        print("  checked on the others:", summary(run.error(fitted) for run in runs if sizes.index(run.billions) % 2 != half))
    print("as shipped:", summary(run.error(Constants()) for run in runs))
    for run in sorted(runs, key=lambda run: -abs(run.error(Constants())))[: None if options.rows else 6]:
        print(f"  {run.error(Constants()):+7.1%}  {run.name}, published {run.tokens_per_s:,.0f} tokens/s a GPU")


if __name__ == "__main__":
    main()
