"""Run a suite: every case in turn, a record of each, going on where it stopped."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from benchmarks import launch, machine
from benchmarks.cases import Case, Suite, read_suite
from benchmarks.prediction import predict_case
from benchmarks.records import REPOSITORY, read, require_writable, save, surroundings, versions
from benchmarks.results import Record, peak_bytes, summary
from ds_gpt.config import Composed, ConfigError, Hardware, Problem
from ds_gpt.config.parse import with_vocabulary
from ds_gpt.model.counts import parameters
from ds_gpt.planner.devices import device_named

RECORDS = REPOSITORY / "benchmarks" / "records"
_A_START_S = 12  # a launch, where nothing is known of the case
# Beside ds_gpt's own dependencies, by trainer.
_NEEDED = {"hf_trainer": ("transformers", "accelerate")}
# The same for every step, repeat and rank: kept once, at the top of a record.
_ONCE = ("losses", "grad_norms", "threads", "device", "precision", "run", "deepspeed", "tokens_per_step", "dataset_digest")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of running a suite."""
    parser.add_argument("--suite", metavar="NAME", help="cpu, single_gpu, a100, scaling, peers, device_smoke, or the path of a YAML file")
    parser.add_argument("--records", type=Path, metavar="DIR", help="folder for the records (default: benchmarks/records/SUITE)")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="cases whose name matches; may be repeated")
    parser.add_argument("--skip", action="append", default=[], metavar="PATTERN", help="all but the cases whose name matches")
    parser.add_argument("--dry-run", action="store_true", help="list the cases, with the planner's prediction, and run none")
    parser.add_argument("--device", metavar="NAME", help="with --dry-run: predict for this device (a100-80gb, h100, ...) instead of the suite's own")
    parser.add_argument("--fresh", action="store_true", help="measure again what has a record")
    parser.add_argument("--price-per-hour", type=float, metavar="DOLLARS", help="of all devices together; adds tokens per dollar")


def selected(suite: Suite, only: Sequence[str], skip: Sequence[str]) -> list[Case]:
    """The cases that ``--only`` and ``--skip`` leave. Raises ConfigError where that is none."""
    cases = [case for case in suite.cases if not only or any(fnmatch(case.name, pattern) for pattern in only)]
    cases = [case for case in cases if not any(fnmatch(case.name, pattern) for pattern in skip)]
    if not cases:
        raise ConfigError(Problem(f"no case of suite '{suite.name}' is left by --only and --skip", fix=f"list them: --suite {suite.name} --dry-run"))
    return cases


def digest(case: Case, here: machine.Machine) -> str:
    """What a record must share to stand for this case: its definition, composed configuration, versions and device."""
    composed = case.composed(here.hardware(case.ranks))
    definition = {key: value for key, value in asdict(case).items() if key not in ("name", "deadline_s", "ladder", "goals")}
    parts = [definition, composed.run.model_dump(mode="json"), composed.deepspeed, versions(_NEEDED.get(case.trainer, ())), here.name]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=list).encode()).hexdigest()[:16]


@dataclass
class Run:
    """A suite under way."""

    suite: Suite
    cases: list[Case]
    here: machine.Machine
    folder: Path
    price_per_hour: float | None
    console: Console
    worker: str = "benchmarks.worker"

    def all_cases(self, fresh: bool) -> None:
        """Run what has no record yet, each case once a round, so that a slow hour of the machine meets them all."""
        if fresh:
            for case in self.cases:
                self._path(case).unlink(missing_ok=True)
        turns = [(number, case) for number in range(self.suite.rounds) for case in self.cases]
        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[left]}  {task.description}"))
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_interactive) as progress:
            task = progress.add_task("", total=len(turns), left="")
            for turn, (number, case) in enumerate(turns):
                left = f"about {_minutes(self._remaining_s(turns[turn:]))} left"
                progress.update(task, description=f"{case.name}, round {number + 1} of {self.suite.rounds}", left=left, completed=turn)
                said = self._one(case, number)
                progress.console.print(f"{turn + 1:>3}/{len(turns)}  {case.name:<34} {said:<70} {left}", highlight=False, soft_wrap=True)

    def _one(self, case: Case, number: int) -> str:
        """One repeat of a case, unless its record has it already; in words, what came of it."""
        record = self._existing(case)
        if record and (record["status"] != "ok" or len(record["repeats"]) > number):
            return f"recorded: {_in_words(record)}"
        smaller = self._ran_out(case)
        if smaller:
            return f"not tried: {smaller} ran out of memory already"
        load = os.getloadavg()[0]
        outcome = launch.run(case, self.worker)
        save(self._path(case), self._record(case, outcome, record, load))
        return _in_words(self._existing(case) or {})

    def _existing(self, case: Case) -> Record | None:
        """The case's record, if it is of the same configuration, versions and device. Raises ConfigError where it is damaged."""
        path = self._path(case)
        record = read(path) if path.is_file() else {}
        return record if record.get("digest") == digest(case, self.here) else None

    def _ran_out(self, case: Case) -> str | None:
        """A case with a smaller micro-batch, otherwise the same, that ran out of memory."""
        for other in self.cases:
            if case.ladder and other.ladder == case.ladder and other.micro_batch < case.micro_batch:
                record = self._existing(other)
                if record and record["status"] == "out_of_memory":
                    return other.name
        return None

    def _record(self, case: Case, outcome: launch.Outcome, earlier: Record | None, load: float) -> Record:
        composed = case.composed(self.here.hardware(case.ranks))
        once: Record = {"run": composed.run.model_dump(mode="json"), "deepspeed": composed.deepspeed, "precision": composed.precision}
        repeats = list(earlier["repeats"]) if earlier else []
        if outcome.by_rank:
            once = {key: outcome.by_rank[0][key] for key in _ONCE}
            by_rank = [{key: value for key, value in rank.items() if key not in _ONCE} for rank in outcome.by_rank]
            repeats.append({**surroundings(), "load_average_before": load, "wall_s": outcome.wall_s, "by_rank": by_rank})
        record = {
            "case": case.name,
            "suite": self.suite.name,
            "status": outcome.status,
            "message": outcome.message,
            "command": f"python -m benchmarks --suite {shlex.quote(self.suite.source or self.suite.name)} --only {case.name} --fresh",
            "launch": shlex.join(["python", *(Path(word).name if word.startswith("/") else word for word in outcome.command[1:])]),
            "digest": digest(case, self.here),
            "definition": asdict(case),
            **surroundings(),
            "versions": versions(_NEEDED.get(case.trainer, ())),
            "device": self.here.name,
            "driver": self.here.driver,
            "price_per_hour": self.price_per_hour,
            "wall_s": outcome.wall_s,
            **once,
            "repeats": repeats,
        }
        record["dirty"] = str(record["git_commit"]).endswith("-dirty")
        record["measured"] = summary(record) if outcome.status == "ok" else None
        return record

    def _remaining_s(self, turns: Sequence[tuple[int, Case]]) -> float:
        """From what the cases took before; from the mean of those where it is the first time."""
        known: dict[str, float] = {}
        left: list[str] = []
        for number, case in turns:
            record = self._existing(case)
            if record:
                known[case.name] = record["wall_s"]
            if not record or (record["status"] == "ok" and len(record["repeats"]) <= number):
                left.append(case.name)
        finished = [record["wall_s"] for case in self.cases if (record := self._existing(case))]
        mean = sum(finished) / len(finished) if finished else _A_START_S
        return sum(known.get(name, mean) for name in left)

    def _path(self, case: Case) -> Path:
        return self.folder / f"{case.name}.json"


def run(options: argparse.Namespace, console: Console | None = None) -> Path | None:
    """Run or list a suite; the folder of its records. Raises ConfigError where it cannot be run here."""
    if options.price_per_hour is not None and not 0 <= options.price_per_hour < math.inf:
        raise ConfigError(Problem(f"--price-per-hour {options.price_per_hour} is not a price", fix="give dollars for all devices together, 0 or more"))
    suite = read_suite(options.suite)
    cases = selected(suite, options.only, options.skip)
    console = console or Console(highlight=False)
    if options.dry_run:
        _list(suite, cases, options.device, console)
        return None
    here = machine.here(suite.device)
    machine.check(here, suite.name, suite.device)
    fitting = [case for case in cases if _fits(case, here, console)]
    if not fitting:
        raise ConfigError(Problem("none of the chosen cases can run here", fix="choose others with --only"))
    _compose(fitting, here.hardware)
    folder = options.records or RECORDS / suite.name
    require_writable(folder)
    start = time.monotonic()
    Run(suite, fitting, here, folder, options.price_per_hour, console).all_cases(options.fresh)
    console.print(f"\n{len(fitting)} cases in {_minutes(time.monotonic() - start)}; records in {folder}")
    return folder


def _compose(cases: Sequence[Case], hardware: Callable[[int], Hardware]) -> None:
    """Raise ConfigError with what is wrong with any case, before the first is run."""
    problems: list[Problem] = []
    for case in cases:
        try:
            case.composed(hardware(case.ranks))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def _fits(case: Case, here: machine.Machine, console: Console) -> bool:
    """Whether the machine has what the case needs; says so where it has not."""
    missing = [package for package in _NEEDED.get(case.trainer, ()) if find_spec(package) is None]
    if case.ranks > here.devices:
        console.print(f"left out: {case.name}, with more ranks than the {here.devices} devices of this machine")
    elif missing:
        console.print(f"left out: {case.name}, because {' and '.join(missing)} cannot be imported: pip install -e '.\\[peers]'")
    return case.ranks <= here.devices and not missing


def _list(suite: Suite, cases: Sequence[Case], device: str | None, console: Console) -> None:
    """``--dry-run``."""
    chosen = device_named(device) if device else None
    meant = chosen.name if chosen else suite.devices
    _compose(cases, chosen.hardware if chosen else suite.hardware)
    console.print(f"suite {suite.name}: {len(cases)} cases x {suite.rounds} round{'s' * (suite.rounds > 1)}, predicted for {meant}\n{suite.about}\n", soft_wrap=True)
    head = f"{'case':<34} {'parameters':>10} {'ranks':>5} {'micro x acc':>11} {'checkpointing':<13} {'JSON':<14}"
    console.print(f"{head} {'peak a rank':>12} {'step':>10} {'tokens/s':>12}", soft_wrap=True)
    for case in cases:
        console.print(_listed(case, chosen.hardware(case.ranks) if chosen else suite.hardware(case.ranks)), soft_wrap=True)


def _listed(case: Case, hardware: Hardware) -> str:
    """A case, and what the planner says of it."""
    composed = case.composed(hardware)
    if composed.run.model.vocab_size == "auto":
        composed = _with_typical_vocabulary(composed)
    count = parameters(composed.run.model)
    size = f"{count / 1e6:,.1f}M" if count < 1e9 else f"{count / 1e9:.3f}B"
    foreseen = predict_case(case, composed)
    memory = f"{foreseen.peak_bytes / 2**30:.2f} GiB" if foreseen else "-"
    rate = foreseen.tokens_per_s if foreseen else None
    step, speed = (f"{composed.tokens_per_step / rate * 1e3:,.1f} ms", f"{rate:,.0f}") if rate else ("-", "-")
    json_name = case.deepspeed if case.trainer == "ds_gpt" else f"({case.trainer})"
    batch = f"{composed.micro_batch_size} x {composed.accumulation_steps}"
    return f"{case.name:<34} {size:>10} {case.ranks:>5} {batch:>11} {case.checkpointing:<13} {json_name:<14} {memory:>12} {step:>10} {speed:>12}"


def _with_typical_vocabulary(composed: Composed) -> Composed:
    """A character vocabulary, for counting parameters without reading the corpus."""
    return replace(composed, run=with_vocabulary(composed.run, 100))


def _in_words(record: Record) -> str:
    if record["status"] != "ok":
        return f"{record['status'].replace('_', ' ')}: {record['message'].splitlines()[0][:50]}"
    measured = record["measured"]
    return f"{measured['tokens_per_s']:>11,.0f} tokens/s  peak {peak_bytes(measured) / 2**20:>9,.1f} MiB a rank  ({record['wall_s']:.0f} s)"


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min"
