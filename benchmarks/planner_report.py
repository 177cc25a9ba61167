"""Check the planner against published runs: memory, throughput, fit, scaling; errors by software, and every row that is left out."""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from benchmarks.planner import (
    FIRST_STEP_GIB,
    GOALS,
    SCALING_GOAL,
    Pair,
    Published,
    held_out,
    left_out,
    median_and_p90,
    memory_held_out,
    published,
    scaling,
)
from ds_gpt.planner.clock import Constants
from ds_gpt.planner.devices import GIB
from ds_gpt.planner.search import CACHED, judge
from ds_gpt.planner.speed import RANGE, speed_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its only option."""
    parser.add_argument("--rows", action="store_true", help="also print every row's errors")


def run(options: argparse.Namespace) -> None:
    """Print the report."""
    print("\n".join(report(options.rows)))


def report(rows: bool = False) -> Iterator[str]:
    """The report, line by line; `rows`: with every row's errors."""
    runs = published()
    speeds, fits = held_out()
    yield "# Memory: predicted over published peak"
    memories, shares = memory_held_out()
    yield from _by_family("memory", memories)
    for what, errors in _by_reading(memories).items():
        yield f"  {what:<24} {len(errors):>3} rows  median {median_and_p90(errors)[0]:.1%}  p90 {median_and_p90(errors)[1]:.1%}"
    yield from _verdict("memory", "but V100s", [error for run, error in memories if not run.on_v100])
    yield f"what the allocator keeps cached, fitted on either half of those read off an A100: {shares[0]:.2f}, {shares[1]:.2f}; shipped: {CACHED}"
    yield "\n# Throughput: predicted over published tokens/s, by constants that the row's half has not shaped"
    yield from _by_family("throughput", speeds)
    for number, constants in enumerate(fits):
        yield f"fitted on half {number + 1} of MPT: {_numbers(constants)}"
    yield f"shipped: {_numbers(Constants())}"
    ratios = sorted(1 + error for _, error in speeds)
    share = sum(RANGE[0] <= ratio <= RANGE[1] for ratio in ratios) / len(ratios)
    yield f"a step took between {ratios[int(0.05 * len(ratios))]:.2f} and {ratios[int(0.95 * len(ratios))]:.2f} of what is predicted in nine of ten; stated: {RANGE}, which holds {share:.0%}"
    yield "\n# Fit: every run here ran"
    refused = [run for run in runs if not judge("", (), run.shapes, run.device).fits]
    yield f"{len(runs) - len(refused)} of {len(runs)} are predicted to fit" + ("".join(f"\n  refused: {run.name}" for run in refused))
    yield from _scaling(scaling(runs))
    yield from _the_1b_run(runs)
    if rows:
        yield "\n# Rows"
        memory_errors = {run.name: error for run, error in memories}
        for run, error in sorted(speeds, key=lambda row: -abs(row[1])):
            memory = f"{memory_errors[run.name]:+7.1%}" if run.name in memory_errors else " " * 7
            yield f"  speed {error:+7.1%}  memory {memory}  {run.name} ({run.family})"
        yield from (f"  speed   none   memory {error:+7.1%}  {run.name} ({run.family}: {run.speed_unfit})" for run, error in memories if run.speed_unfit)
    yield from _left_out()


def _by_reading(memories: Sequence[tuple[Published, float]]) -> dict[str, list[float]]:
    """Errors of peak memory, by where it was read."""
    result: dict[str, list[float]] = {"counted by the allocator": [], "read off an A100": [], "read off a 16 GB V100": []}
    for run, error in memories:
        off = "read off a 16 GB V100" if run.on_v100 else "read off an A100"
        result["counted by the allocator" if run.measured.startswith("allocated") else off].append(error)
    return result


def _numbers(constants: Constants) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in vars(constants).items())


def _by_family(what: str, found: Sequence[tuple[Published, float]]) -> Iterator[str]:
    families: dict[str, list[float]] = defaultdict(list)
    for published_run, error in found:
        families[published_run.family].append(error)
    for family, errors in families.items():
        yield f"  {family:<20} {len(errors):>3} rows  median {median_and_p90(errors)[0]:.1%}  p90 {median_and_p90(errors)[1]:.1%}  mean {sum(errors) / len(errors):+.1%}"
    yield from _verdict(what, "all", [error for _, error in found])


def _verdict(what: str, which: str, errors: Sequence[float]) -> Iterator[str]:
    median, p90 = median_and_p90(errors)
    (goal, goal_p90), verdicts = GOALS[what], ("met", "missed")
    yield (
        f"  {which:<20} {len(errors):>3} rows  median {median:.1%} (goal {goal:.0%}: {verdicts[median > goal]})  "
        f"p90 {p90:.1%} (goal {goal_p90:.0%}: {verdicts[p90 > goal_p90]})"
    )


def _scaling(pairs: Sequence[Pair]) -> Iterator[str]:
    yield "\n# Scaling: throughput of a GPU among many, over that among few"
    for reach in ("from 1 to 8 GPUs", "otherwise in a node", "to other nodes"):
        group = [pair for pair in pairs if pair.reach == reach]
        misses = [pair.miss for pair in group]
        within = sum(miss <= SCALING_GOAL for miss in misses)
        yield (
            f"  {reach}: {len(group)} pairs, {within} within {100 * SCALING_GOAL:.0f} points; "
            f"off by {100 * statistics.median(misses):.1f} points in the median, {100 * max(misses):.1f} at most"
        )
        yield from (
            f"    published {pair.published:6.1%}, predicted {pair.predicted:6.1%}: {pair.few.name} -> {pair.many.shapes.devices} ({pair.few.family})"
            for pair in group
        )


def _the_1b_run(runs: Sequence[Published]) -> Iterator[str]:
    run = next(run for run in runs if run.family == "plain ddp")
    after = run.memory().peak
    first = (after.bytes - after.kinds["moments"]) / GIB
    assert run.peak_bytes
    step_s, was_s = speed_of(run.shapes, run.device).step_s, 131072 / (run.tokens_per_s * run.shapes.devices)
    yield "\n# The 1.011B run: plain DDP, fp32 weights, bf16 autocast, full checkpointing, attention written out"
    yield f"  first step  published {FIRST_STEP_GIB:.2f} GiB, predicted {first:.2f} ({first / FIRST_STEP_GIB - 1:+.1%})"
    yield f"  afterwards  published {run.peak_bytes / GIB:.2f} GiB, predicted {after.bytes / GIB:.2f} ({run.memory_error():+.1%}), in {after.phase}"
    yield f"  a step      published {was_s * 1e3:,.0f} ms, predicted {step_s * 1e3:,.0f} ms ({step_s / was_s - 1:+.1%})"


def _left_out() -> Iterator[str]:
    reasons: dict[str, list[str]] = defaultdict(list)
    for row in left_out():
        name = " ".join(filter(None, (row["model"], row["parallelism"], f"on {row['num_gpus']}" if row["num_gpus"] else "")))
        reasons[row["reason"]].append(name)
    yield f"\n# Left out: {sum(map(len, reasons.values()))} rows of the collection"
    for reason, names in reasons.items():
        yield f"  {reason}: {'; '.join(names)}"


def table() -> str:
    """What the README says of it, as a Markdown table."""
    runs = published()
    speeds, _ = held_out()
    rows = [(f"peak memory, {what}", "memory", len(errors), median_and_p90(errors)) for what, errors in _by_reading(memory_held_out()[0]).items()]
    rows.append(("tokens/s, rows that no constant was fitted to", "throughput", len(speeds), median_and_p90(error for _, error in speeds)))
    lines = ["| predicted | published runs | median error | p90 | goal |", "|---|---|---|---|---|"]
    lines += [f"| {name} | {count} | {errors[0]:.1%} | {errors[1]:.1%} | {GOALS[key][0]:.0%}, {GOALS[key][1]:.0%} |" for name, key, count, errors in rows]
    fit = sum(judge("", (), run.shapes, run.device).fits for run in runs)
    misses = [100 * pair.miss for pair in scaling(runs) if pair.reach == "from 1 to 8 GPUs"]
    points, most = median_and_p90(misses)
    lines.append(f"| throughput of a GPU among 8, over that of one alone | {len(misses)} pairs | {points:.1f} points | {most:.1f} points | {100 * SCALING_GOAL:.0f} points |")
    return "\n".join([*lines, f"| that a run which ran fits | {len(runs)} | {len(runs) - fit} wrong | | none |"]) + "\n"
