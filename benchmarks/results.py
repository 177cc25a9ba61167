"""What the records of cases say, recomputed from their raw numbers alone."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import read as read_record
from ds_gpt.config import ConfigError, ModelConfig, Problem, RunConfig
from ds_gpt.model.counts import mfu, parameters, training_flops_per_token

Record = dict[str, Any]
_RESAMPLES = 2000
_NEEDED = ("case", "suite", "status", "message", "device", "definition", "run", "deepspeed", "repeats", "measured")


def read(path: Path) -> list[Record]:
    """The records of cases in a folder, by name, or the one in a file. Raises ConfigError where one is damaged or no such file is."""
    found = []
    for file in [path] if path.suffix == ".json" else sorted(path.glob("*.json")):
        record = read_record(file)
        if "definition" not in record:  # of another measurement than a suite's
            continue
        if missing := [key for key in _NEEDED if key not in record]:
            raise ConfigError(Problem(f"'{file}' is no whole record: it lacks {', '.join(missing)}", fix="restore it, or delete it and measure again"))
        found.append(record)
    return found


def slowest_rank_steps(repeat: Record) -> list[float]:
    """Seconds of each timed step, those of the rank that took longest."""
    return [max(steps) for steps in zip(*(rank["steps_s"] for rank in repeat["by_rank"]), strict=True)]


def step_times(record: Record) -> list[float]:
    """Seconds of every timed step of all repeats."""
    return [seconds for repeat in record["repeats"] for seconds in slowest_rank_steps(repeat)]


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie, interpolated."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def flops_of(record: Record) -> int:
    """What the model of a case needs to train on a token."""
    run = RunConfig(**record["run"])
    return training_flops_per_token(run.model, run.lora, run.stage == "reward")


def summary(record: Record) -> Record:
    """The numbers of a case that ran: time, throughput, memory of the fullest rank, communication, phases."""
    steps, ranks = step_times(record), record["definition"]["ranks"]
    model = ModelConfig(**record["run"]["model"])
    median = statistics.median(steps)
    tokens_per_s = record["tokens_per_step"] / median
    all_ranks = [rank for repeat in record["repeats"] for rank in repeat["by_rank"]]
    # A CPU's peak is measured in every repeat, and the best is what it can do.
    peak = max((rank["peak_flops"] for rank in all_ranks), key=lambda peak: peak["per_rank"] or 0)
    price = record.get("price_per_hour")
    breakdown = [rank["breakdown"] for rank in all_ranks]
    return {
        "steps": len(steps),
        "step_s": {"median": median, "p10": quantile(steps, 0.1), "p90": quantile(steps, 0.9)},
        "cpu_step_s": statistics.median(_cpu_steps(record)),
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_rank": tokens_per_s / ranks,
        "parameters": parameters(model),
        "mfu": mfu(tokens_per_s / ranks, flops_of(record), peak["per_rank"]) if peak["per_rank"] else None,
        "peak_flops": peak,
        "memory": _fullest([rank["memory"] for rank in all_ranks]),
        "start_up_s": statistics.median(rank["start_up_s"] for rank in all_ranks),
        "data_wait_s": statistics.median(seconds for rank in all_ranks for seconds in rank["data_wait_s"]),
        "breakdown_s": _phases(breakdown),
        "communication": _communication(breakdown),
        "tokens_per_dollar": tokens_per_s * 3600 / price if price else None,
    }


def _cpu_steps(record: Record) -> list[float]:
    """Processor seconds of every timed step, all ranks together."""
    return [sum(step) for repeat in record["repeats"] for step in zip(*(rank["cpu_steps_s"] for rank in repeat["by_rank"]), strict=True)]


def peak_bytes(measured: Record) -> int:
    """The peak that stands in tables: what PyTorch allocated on a GPU, live tensors on a CPU."""
    memory = measured["memory"]
    return memory["allocated_peak_bytes"] if "allocated_peak_bytes" in memory else sum(memory["peak_bytes"].values())


def _fullest(by_rank: Sequence[Record]) -> Record:
    """Memory of the rank that held most; its repeats differ by nothing but the resident set."""

    def held(memory: Record) -> int:
        return memory.get("allocated_peak_bytes") or sum(memory["peak_bytes"].values())

    fullest = dict(max(by_rank, key=held))
    for key in ("resident_peak_bytes", "reserved_peak_bytes"):
        if key in fullest:
            fullest[key] = max(memory[key] for memory in by_rank)
    return fullest


def _phases(breakdown: Sequence[Record]) -> dict[str, float]:
    """Mean seconds a step over ranks and repeats, communication and waiting taken out of the phases they fall in."""
    names = dict.fromkeys(name for each in breakdown for name in each["phases_s"])
    phases = {name: statistics.mean(each["phases_s"].get(name, 0.0) for each in breakdown) for name in names}
    for key, kind in (("communication", "seconds"), ("waiting for ranks", "wait_s")):
        phases[key] = statistics.mean(sum(count[kind] for count in each["communication"].values()) for each in breakdown)
    phases["data wait"] = statistics.mean(each["data_wait_s"] for each in breakdown)
    return phases


def _communication(breakdown: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Calls, bytes and seconds a step and rank, by collective."""
    names = sorted({name for each in breakdown for name in each["communication"]})
    empty = {"calls": 0, "bytes": 0, "seconds": 0.0, "wait_s": 0.0}
    return {name: {key: statistics.mean(each["communication"].get(name, empty)[key] for each in breakdown) for key in empty} for name in names}


def communication_overlap(record: Record) -> tuple[float, float]:
    """Seconds a step in which communication is under way, and in which the rank computes meanwhile: means over ranks and repeats.

    Zero in records from before it was measured.
    """
    seen = [rank["overlap"] for repeat in record["repeats"] for rank in repeat["by_rank"] if "overlap" in rank]
    if not seen:
        return 0.0, 0.0
    return statistics.mean(each["communication_s"] for each in seen), statistics.mean(each["hidden_s"] for each in seen)


def interval(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], of: Callable[[list[float], list[float]], float], seed: int = 0
) -> tuple[float, float]:
    """95% bootstrap interval of a statistic of two cases' step times.

    Repeats are drawn first and their steps then: steps of one process share its luck, and to draw them alone would
    claim more than is known. With one repeat only its steps can be drawn.
    """
    draw = random.Random(seed)

    def resampled(repeats: Sequence[Sequence[float]]) -> list[float]:
        chosen = draw.choices(repeats, k=len(repeats))
        return [seconds for steps in chosen for seconds in draw.choices(steps, k=len(steps))]

    values = [of(resampled(first), resampled(second)) for _ in range(_RESAMPLES)]
    return quantile(values, 0.025), quantile(values, 0.975)


def curve_difference(records: Iterable[Record]) -> dict[str, float | None]:
    """Largest relative difference of each case's losses and gradient norms from plain PyTorch's with the same run, by name.

    None where no such baseline was run. Fewer ranks come first: one process is the reference where it is there.
    """
    fine = [record for record in records if record["status"] == "ok"]
    references = sorted((record for record in fine if record["definition"]["trainer"] == "ddp"), key=lambda record: record["definition"]["ranks"])
    differences: dict[str, float | None] = {}
    for record in fine:
        reference = next((other for other in references if _mathematics(other) == _mathematics(record)), None)
        differences[record["case"]] = None if reference is None else _difference(record, reference)
    return differences


def _mathematics(record: Record) -> str:
    """What decides the curve: the run, but for how its batch is cut."""
    run = json.loads(json.dumps(record["run"]))
    run["batch"].pop("micro_batch_size", None)
    return json.dumps([run, record["precision"], record["dataset_digest"]], sort_keys=True)


def _difference(record: Record, reference: Record) -> float:
    worst = 0.0
    for key in ("losses", "grad_norms"):
        for found, wanted in zip(record[key], reference[key], strict=False):
            worst = max(worst, abs(found - wanted) / abs(wanted))
    return worst
