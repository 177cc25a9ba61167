"""Compare two records, or two folders of them: the ratio of their speeds with an interval, and a status for CI."""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path

from benchmarks.results import Record, interval, peak_bytes, read, slowest_rank_steps, summary
from ds_gpt.config import ConfigError, Problem


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two sides and the thresholds."""
    parser.add_argument("before", type=Path, metavar="A", help="a record, or a folder of records")
    parser.add_argument("after", type=Path, metavar="B", help="the same, measured later")
    parser.add_argument("--threshold", type=_share, default=0.95, help="fail where B's tokens/s are below this share of A's (default: 0.95)")
    parser.add_argument("--memory-threshold", type=_share, default=1.05, help="fail where B's peak memory is above this multiple of A's (default: 1.05)")


def run(options: argparse.Namespace) -> int:
    """Print the comparison. 0: no case is worse than the thresholds; 1: one is. Raises ConfigError where nothing is comparable."""
    before, after = _read(options.before), _read(options.after)
    pairs = [(before[name], after[name]) for name in before if name in after]
    if options.before.is_file() and options.after.is_file():  # two files were named: their cases may have other names
        pairs = [(*before.values(), *after.values())]
    if not pairs:
        raise ConfigError(Problem(f"'{options.before}' and '{options.after}' have no case in common", fix="give two records, or two folders of one suite"))
    print(f"{'case':<34} {'tokens/s A':>12} {'tokens/s B':>12} {'B / A':>7}  {'95% interval':<16} {'peak B / A':>10}  verdict")
    verdicts = [_compare(first, second, options.threshold, options.memory_threshold) for first, second in pairs]
    for name in sorted(set(before) ^ set(after)) if len(pairs) > 1 else []:
        print(f"{name:<34} only in {'A' if name in before else 'B'}")
    worse = sum(verdicts)
    print(f"\n{worse} of {len(pairs)} cases worse" if worse else f"\nnone of {len(pairs)} cases worse")
    return int(worse > 0)


def speed_ratio(before: Record, after: Record) -> tuple[float, tuple[float, float]]:
    """Tokens a second of `after` over `before`, and its 95% interval."""

    def ratio(first: list[float], second: list[float]) -> float:
        return (after["tokens_per_step"] / statistics.median(second)) / (before["tokens_per_step"] / statistics.median(first))

    sides = [[slowest_rank_steps(repeat) for repeat in record["repeats"]] for record in (before, after)]
    whole = [[seconds for steps in repeats for seconds in steps] for repeats in sides]
    return ratio(*whole), interval(*sides, ratio)


def _compare(before: Record, after: Record, threshold: float, memory_threshold: float) -> bool:
    """Print a line; whether it is worse."""
    for key in ("device", "run", "deepspeed"):
        if before[key] != after[key]:
            print(f"note: {after['case']}: '{key}' differs between the two records")
    if before["status"] != "ok" or after["status"] != "ok":
        worse = before["status"] == "ok"
        verdict = "WORSE: it ran before" if worse else "no measurement"
        print(f"{after['case']:<34} {before['status']:>12} {after['status']:>12} {'':>37}  {verdict}")
        return worse
    first, second = summary(before), summary(after)
    ratio, (low, high) = speed_ratio(before, after)
    memory = peak_bytes(second) / peak_bytes(first)
    # Below the threshold and, with its whole interval, slower: noise alone does not fail a build.
    slower = ratio < threshold and high < 1
    larger = memory > memory_threshold
    verdict = "WORSE: " + " and ".join(word for word, on in (("slower", slower), ("more memory", larger)) if on) if slower or larger else "fine"
    speeds = f"{first['tokens_per_s']:>12,.0f} {second['tokens_per_s']:>12,.0f} {ratio:>7.3f}  {f'{low:.3f} to {high:.3f}':<16}"
    print(f"{after['case']:<34} {speeds} {memory:>10.3f}  {verdict}")
    return slower or larger


def _read(path: Path) -> dict[str, Record]:
    records = read(path)
    if not records:
        raise ConfigError(Problem(f"'{path}' holds no record of a suite's case", fix="give a JSON file of benchmarks/records/SUITE, or that folder"))
    return {record["case"]: record for record in records}


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share < math.inf:  # against NaN nothing would ever be worse
        raise ValueError
    return share
