"""The tables and sentences of a report, as text, from records."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.compare import speed_ratio
from benchmarks.ledger_kinds import KINDS
from benchmarks.published import ROWS
from benchmarks.results import Record, communication_overlap, curve_difference, flops_of, peak_bytes
from ds_gpt.model.counts import mfu
from ds_gpt.planner import Prediction

Table = list[list[str]]
_PEERS = {"ddp": "plain PyTorch", "fsdp2": "FSDP2"}
_ON_DEEPSPEED = {"hf_trainer": "Hugging Face Trainer, ", "ds_gpt": ""}
_TRAINERS = (*_PEERS, *_ON_DEEPSPEED)
_MIB = 2**20

ABOUT_TIME = (
    "Seconds of a step by phase, as means over ranks, in steps that wait for the device where a phase ends and take each collective "
    "alone: what overlaps in a timed step is apart here, so a row may be longer than the step of the table above. "
    "'Waiting for ranks' is the time from a rank's arrival at a collective until the last one is there. Bytes and calls are those of a step and rank. "
    "The collectives of DistributedDataParallel are made in C++ and not seen here: they are in its backward."
)
ABOUT_CURVE = (
    "The last column is the largest relative difference of any step's loss or gradient norm from the same run in plain PyTorch: "
    "what is timed here trains right. 'Data wait' is a share of the step."
)
ABOUT_PUBLISHED = "Not measured here, on other machines, with other code: for orientation only, and in none of the tables and pictures above."
ABOUT_SCALING = (
    "The same configuration on more ranks. Efficiency is the ratio as a share of how many times as many ranks there are. "
    "An interval draws repeats and then their steps; where a case was run once it knows the luck of no other run, and is too narrow."
)
ABOUT_PLAIN = (
    "Ratios above 1 are better than PyTorch alone (DistributedDataParallel where there are more ranks): of tokens/s, and of the processor time "
    "that a step takes, which other work on the machine does not distort."
)
ABOUT_GOALS = (
    "What each case should reach, as a multiple of another's tokens/s, and what it does; where the 95% interval holds both, the verdict is open. "
    "The ratio of processor time is that of all ranks for a step, of which other work on the machine takes nothing; a case that leaves half of the "
    "machine idle does not show in it."
)
ABOUT_OVERLAP = (
    "From the profiler, in steps of their own: seconds of a step in which a rank's communication is under way (on a CPU from the issue of a collective "
    "to its end, so waiting for slower ranks is in it; on a GPU its kernels), and the share of it that is hidden, because the rank computes meanwhile. "
    "Collectives that DistributedDataParallel makes are seen here, too."
)
ABOUT_MEMORY = (
    "Bytes of live tensors of the fullest rank, each storage counted once: at the peak of a step, and (last columns) when its gradients are complete, "
    "just before the optimizer steps, where ZeRO's arithmetic applies. 'gathered' are weights that ZeRO-3 makes whole for a while; "
    "'buffers' are those of communication and of the optimizer's arithmetic. The resident set also holds Python, PyTorch and what the allocator keeps."
)


def introduction(records: Sequence[Record]) -> str:
    """What was run, on what, and how quiet the machine was."""
    first = records[0]
    fine = sum(record["status"] == "ok" for record in records)
    repeats = [repeat for record in records for repeat in record["repeats"]]
    commits = sorted({str(repeat["git_commit"])[:10] + ("-dirty" if str(repeat["git_commit"]).endswith("-dirty") else "") for repeat in repeats})
    loads = [repeat["load_average_before"] for repeat in repeats]
    cores = first["host"]["cores"]
    versions = ", ".join(f"{package} {version}" for package, version in first["versions"].items())
    driver = f", driver {first['driver']}" if first["driver"] else ""
    sentences = [
        f"{fine} of {len(records)} cases ran, {_times(records)}, every time in fresh processes.",
        f"Device: {first['device']}{driver}; host: {first['host']['cpu']}, {cores} cores, {first['host']['memory_bytes'] / 2**30:.0f} GiB. "
        f"{versions}. Commit {', '.join(commits)}; {first['date'][:10]}.",
    ]
    if loads and first["driver"] is None:
        noise = f"Load average before the cases: {min(loads):.1f} to {max(loads):.1f}, median {statistics.median(loads):.1f}, on {cores} cores."
        if statistics.median(loads) > 0.7 * cores:
            noise += " The machine was shared with other work: take times as what that left, and ratios with their intervals. "
            noise += "'CPU' is the processor time of all ranks, of which others take nothing; memory does not depend on them either."
        sentences.append(noise)
    return "\n\n".join(sentences)


def _times(records: Sequence[Record]) -> str:
    counts = sorted({len(record["repeats"]) for record in records if record["status"] == "ok"})
    times = " or ".join("once" if count == 1 else "twice" if count == 2 else f"{count} times" for count in counts)
    return f"each {times}" if times else "none to its end"


def by_model(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Cases by the model that they train."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        model, count = record["run"]["model"], record["measured"]["parameters"]
        size = f"{count / 1e6:,.1f}M" if count < 1e9 else f"{count / 1e9:,.3f}B"
        groups.setdefault(f"{size} parameters: {model['layers']} layers, width {model['width']}, context {model['context']}", []).append(record)
    return {name: sorted(group, key=_order) for name, group in groups.items()}


def _order(record: Record) -> tuple[int, str, int, int]:
    definition = record["definition"]
    return _TRAINERS.index(definition["trainer"]), _configuration(record), definition["ranks"], definition["micro_batch"]


def stage(record: Record) -> int:
    """ZeRO stage."""
    return record["deepspeed"]["zero_optimization"]["stage"]


def _configuration(record: Record) -> str:
    definition = record["definition"]
    trainer = definition["trainer"]
    parts = [_PEERS[trainer]] if trainer in _PEERS else [f"{_ON_DEEPSPEED[trainer]}ZeRO {stage(record)}"]
    parts += _task(record["run"])
    if "offload" in definition["deepspeed"] and trainer in _ON_DEEPSPEED:
        parts.append("offload")
    if definition["checkpointing"] != "off":
        parts.append(f"{definition['checkpointing']} ckpt")
    for key, usual in (("precision", "auto"), ("attention", "auto"), ("compile", False)):
        if definition[key] != usual:
            parts.append(str(definition[key]) if key != "compile" else "compiled")
    if (definition["threads"] or 1) > 1:
        parts.append(f"{definition['threads']} threads")
    return ", ".join(parts)


def _task(run: dict[str, Any]) -> list[str]:
    """What is learned, where that is not next tokens by every weight. A record may be older than what it says nothing of."""
    stage, objective = run.get("stage", "pretrain"), run.get("objective", {}).get("name", "next_token").replace("_", " ")
    kinds = [stage] if stage != "pretrain" else [objective] if objective != "next token" else []
    return kinds + ["adapters"] * (run.get("lora", {}).get("rank") is not None)


def label(record: Record) -> str:
    """A case in words: what, on how many ranks; the micro-batch or the global batch where its name has it."""
    ranks = record["definition"]["ranks"]
    sizes = {"-mb": f", micro-batch {record['definition']['micro_batch']}", "-b": f", batch {record['definition']['global_batch']}"}
    size = "".join(words for mark, words in sizes.items() if re.search(rf"{mark}\d", record["case"]))
    kind = next((f"{word}: " for word in ("weak", "strong") if record["case"].startswith(word)), "")
    return f"{kind}{_configuration(record)}{size}, {ranks} rank{'s' if ranks > 1 else ''}"


def findings(group: Sequence[Record]) -> str:
    """The few sentences that a reader would otherwise work out from the tables."""
    leanest = min(group, key=lambda record: peak_bytes(record["measured"]))
    text = f"Least memory: {label(leanest)}, {_mib(peak_bytes(leanest['measured']))} MiB a rank."
    if group[0]["driver"] is None:  # tokens/s of a shared machine crown whoever was alone for a while
        frugal = min(group, key=lambda record: record["measured"]["cpu_step_s"])
        return f"{text} Least processor time: {label(frugal)}, {frugal['measured']['cpu_step_s'] * 1e3:,.1f} ms a step."
    fastest = max(group, key=lambda record: record["measured"]["tokens_per_s"])
    return f"Fastest: {label(fastest)}, {fastest['measured']['tokens_per_s']:,.0f} tokens/s. {text}"


def overview(group: Sequence[Record], everything: Sequence[Record], predict: Callable[[Record], Prediction | None]) -> Table:
    """A row a case."""
    differences, peaks = curve_difference(everything), _peaks(everything)
    foreseen = {record["case"]: predict(record) for record in group}
    planned, priced = any(foreseen.values()), any(record["measured"]["tokens_per_dollar"] for record in group)
    on_gpu = any("allocated_peak_bytes" in record["measured"]["memory"] for record in group)
    head = ["case", "tokens/s", "a rank", "step, ms", "p10 to p90", *(() if on_gpu else ("CPU, ms a step",)), "MFU", "peak, MiB a rank", "reserved" if on_gpu else "resident"]
    head += ["planner: peak", "error", "planner: tokens/s", "error"] if planned else []
    head += ["tokens per dollar"] if priced else []
    table = [[*head, "start-up, s", "data wait", "off the reference curve"]]
    for record in group:
        measured, step = record["measured"], record["measured"]["step_s"]
        memory = measured["memory"]
        row = [label(record), f"{measured['tokens_per_s']:,.0f}", f"{measured['tokens_per_s_per_rank']:,.0f}", f"{step['median'] * 1e3:,.1f}"]
        peak = peaks[record["threads"]]
        flops = flops_of(record)
        utilization = f"{mfu(measured['tokens_per_s_per_rank'], flops, peak):.1%}" if peak else "not known"
        row += [f"{step['p10'] * 1e3:,.1f} to {step['p90'] * 1e3:,.1f}", *(() if on_gpu else (f"{measured['cpu_step_s'] * 1e3:,.1f}",)), utilization]
        row += [_mib(peak_bytes(measured)), _mib(memory.get("reserved_peak_bytes") or memory["resident_peak_bytes"])]
        row += _planned(foreseen[record["case"]], measured) if planned else []
        row += [f"{measured['tokens_per_dollar']:,.0f}" if measured["tokens_per_dollar"] else ""] if priced else []
        difference = differences[record["case"]]
        row += [f"{measured['start_up_s']:.1f}", f"{measured['data_wait_s'] / step['median']:.2%}", "no reference" if difference is None else f"{difference:.0e}"]
        table.append(row)
    return table


def _peaks(records: Sequence[Record]) -> dict[int, float | None]:
    """FLOP/s of a rank by its threads: the datasheet's, or the best that any case saw, since all ran on one device."""
    peaks: dict[int, float | None] = {}
    for record in records:
        found = record["measured"]["peak_flops"]["per_rank"]
        peaks[record["threads"]] = max(found or 0, peaks.get(record["threads"]) or 0) or None
    return peaks


def about_peaks(records: Sequence[Record]) -> str:
    """What MFU is a share of."""
    source = records[0]["measured"]["peak_flops"]["source"]
    peaks = {threads: peak for threads, peak in sorted(_peaks(records).items()) if peak}
    if not peaks:
        return "MFU is not known: the device's peak is in no table of ds_gpt."
    if source == "datasheet":
        return f"MFU is a share of {max(peaks.values()) / 1e12:,.1f} TFLOP/s a device (the datasheet)."
    given = [f"{peak / 1e9:,.0f} GFLOP/s a rank with {threads} thread{'s' if threads > 1 else ''}" for threads, peak in peaks.items()]
    return f"MFU is a share of {', '.join(given)}: the best fp32 matrix product that any of these cases measured."


def _planned(foreseen: Prediction | None, measured: Record) -> list[str]:
    if foreseen is None:
        return [""] * 4
    peak = peak_bytes(measured)
    cells = [_mib(foreseen.peak_bytes), f"{foreseen.peak_bytes / peak - 1:+.1%}"]
    if foreseen.tokens_per_s is None:
        return [*cells, "", ""]
    return [*cells, f"{foreseen.tokens_per_s:,.0f}", f"{foreseen.tokens_per_s / measured['tokens_per_s'] - 1:+.1%}"]


def throughput_bars(group: Sequence[Record]) -> list[tuple[str, int, float, float, float]]:
    """See `plots.throughput`."""
    bars = []
    for record in group:
        step, tokens = record["measured"]["step_s"], record["tokens_per_step"]
        name = label(record).rpartition(", ")[0]
        bars.append((name, record["definition"]["ranks"], tokens / step["median"], tokens / step["p90"], tokens / step["p10"]))
    return bars


def families(group: Sequence[Record]) -> dict[str, list[Record]]:
    """Cases whose names differ in the number of ranks alone ("1r", "8x"), fewest first."""
    found: dict[str, list[Record]] = {}
    for record in group:
        found.setdefault(re.sub(r"-\d+[rx](?=-|$)", "", record["case"]), []).append(record)

    def ranks(record: Record) -> int:
        return record["definition"]["ranks"]

    return {name: sorted(cases, key=ranks) for name, cases in found.items() if len(set(map(ranks, cases))) > 1}


def _family_label(records: Sequence[Record]) -> str:
    return label(records[0]).rpartition(", ")[0]


def one_against_many(found: dict[str, list[Record]]) -> Table:
    """A row for each larger number of ranks."""
    table = [["configuration", "ranks", "tokens/s", "ratio", "95% interval", "efficiency", "peak, MiB a rank", "of the fewest ranks'"]]
    for records in found.values():
        first = records[0]
        for record in records:
            measured, times = record["measured"], record["definition"]["ranks"] / first["definition"]["ranks"]
            row = [_family_label(records), str(record["definition"]["ranks"]), f"{measured['tokens_per_s']:,.0f}"]
            if record is first:
                table.append([*row, "", "", "", _mib(peak_bytes(measured)), ""])
                continue
            ratio, (low, high) = speed_ratio(first, record)
            share = peak_bytes(measured) / peak_bytes(first["measured"])
            table.append([*row, f"{ratio:.2f}", f"{low:.2f} to {high:.2f}", f"{ratio / times:.0%}", _mib(peak_bytes(measured)), f"{share:.0%}"])
    return table


def ratio_bars(found: dict[str, list[Record]]) -> list[tuple[str, float, float, float, int]]:
    """See `plots.ratios`."""
    bars = []
    for records in found.values():
        first, last = records[0], records[-1]
        ratio, (low, high) = speed_ratio(first, last)
        bars.append((_family_label(records), ratio, low, high, last["definition"]["ranks"] // first["definition"]["ranks"]))
    return bars


def scaling_lines(found: dict[str, list[Record]]) -> dict[str, list[tuple[int, float]]]:
    """See `plots.scaling`."""
    return {
        _family_label(records): [(record["definition"]["ranks"], record["measured"]["tokens_per_s"]) for record in records] for records in found.values()
    }


def against_plain(group: Sequence[Record]) -> Table:
    """Each case as a share of plain PyTorch with as many threads in all, where that was run."""
    table = [["case", "against", "tokens/s ratio", "95% interval", "processor time ratio"]]
    for reference in group:
        for record in group:
            if reference["definition"]["trainer"] != "ddp" or record["definition"]["trainer"] == "ddp" or _workers(record) != _workers(reference):
                continue
            ratio, (low, high) = speed_ratio(reference, record)
            frugality = reference["measured"]["cpu_step_s"] / record["measured"]["cpu_step_s"]
            table.append([label(record), label(reference), f"{ratio:.2f}", f"{low:.2f} to {high:.2f}", f"{frugality:.2f}"])
    return table if len(table) > 1 else []


def _workers(record: Record) -> tuple[int, str, int]:
    """How many threads compute, in what precision, how much."""
    return record["definition"]["ranks"] * record["threads"], record["precision"], record["tokens_per_step"]


def goals(records: Sequence[Record]) -> Table:
    """Each case that has goals against the cases that they name, where both were run."""
    found = {record["case"]: record for record in records}
    table = [["case", "against", "tokens/s ratio", "95% interval", "goal", "verdict", "processor time ratio"]]
    for record in records:
        for name, goal in record["definition"].get("goals", {}).items():
            if name not in found:
                continue
            reference = found[name]
            ratio, (low, high) = speed_ratio(reference, record)
            verdict = "reached" if low >= goal else "missed" if high < goal else f"open ({'above' if ratio >= goal else 'below'})"
            frugality = reference["measured"]["cpu_step_s"] / record["measured"]["cpu_step_s"]
            table.append([label(record), label(reference), f"{ratio:.2f}", f"{low:.2f} to {high:.2f}", f"{goal:.2f}", verdict, f"{frugality:.2f}"])
    return table if len(table) > 1 else []


def overlap(group: Sequence[Record]) -> Table:
    """Communication under way while the rank computes, where ranks communicate and the profiler saw it."""
    table = [["case", "communication under way, ms a step", "of that hidden behind computation, ms", "share hidden"]]
    for record in group:
        under_way, hidden = communication_overlap(record)
        if record["definition"]["ranks"] > 1 and under_way:
            table.append([label(record), f"{under_way * 1e3:,.1f}", f"{hidden * 1e3:,.1f}", f"{hidden / under_way:.0%}"])
    return table if len(table) > 1 else []


def memory(group: Sequence[Record]) -> Table:
    """Bytes by kind, in MiB: at the peak, and when the gradients are complete."""
    kept = ("weights", "gradients", "optimizer")
    table = [["MiB a rank", *KINDS, "peak", "resident", *(f"complete: {kind}" for kind in kept)]]
    for record in group:
        found = record["measured"]["memory"]
        if "peak_bytes" in found:
            peak, complete = found["peak_bytes"], found["complete_bytes"]
            row = [label(record), *(_mib(peak[kind]) for kind in KINDS), _mib(sum(peak.values())), _mib(found["resident_peak_bytes"])]
            table.append([*row, *(_mib(complete[kind]) for kind in kept)])
    return table


def phases(record: Record) -> dict[str, float]:
    """See `plots.stacked`."""
    return record["measured"]["breakdown_s"]


def communication(group: Sequence[Record]) -> Table:
    """Calls, MiB and milliseconds a step of each collective."""
    table = [["case", "collective", "calls", "MiB", "ms", "ms waiting"]]
    for record in group:
        for name, count in record["measured"]["communication"].items():
            row = [f"{count['calls']:.0f}", _mib(count["bytes"]), f"{count['seconds'] * 1e3:.1f}", f"{count['wait_s'] * 1e3:.1f}"]
            table.append([label(record), name.replace("_into_tensor", "").replace("_tensor", "").replace("_single", ""), *row])
    return table if len(table) > 1 else []


def failures(records: Sequence[Record]) -> Table:
    """Cases that did not end well, and why."""
    return [["case", "result", "why"], *([record["case"], record["status"].replace("_", " "), record["message"].strip()[:160]] for record in records)]


def published() -> Table:
    """The rows of others."""
    return [["published", "devices", "tokens/s", "peak a device", "what it is"], *([row.what, row.devices, row.tokens_per_s, row.peak, row.note] for row in ROWS)]


def _mib(size: float) -> str:
    return f"{size / _MIB:,.1f}"
