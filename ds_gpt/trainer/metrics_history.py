"""The metrics of a run as it wrote them: found, read, and put in order. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ds_gpt.config import ConfigError, Problem, RunConfig

Line = dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """What the run's configuration says, where it is at hand."""

    vocab_size: int | None = None
    total_steps: int | None = None
    warmup_steps: int | None = None
    evaluate_every: int | None = None


@dataclass(frozen=True)
class History:
    """The metrics of a run.

    Attributes:
        lines: one for each logged step that counts, in their order.
        superseded: lines whose steps were done again after a resume or a rollback.
        returns: (from step, to step) of each time the steps went back.
        events: what else happened, where the run folder has it.
        facts: from the run's configuration.
    """

    lines: tuple[Line, ...]
    superseded: tuple[Line, ...] = ()
    returns: tuple[tuple[int, int], ...] = ()
    events: tuple[Line, ...] = ()
    facts: Facts = Facts()

    @classmethod
    def of(cls, metrics: Iterable[Line], events: Iterable[Line] = (), facts: Facts = Facts()) -> History:
        """Put lines, each with a "step", in order. Those without "loss" are events; without any loss there are no `lines`."""
        lines: list[Line] = []
        superseded, returns, happened = [], [], list(events)
        for line in metrics:
            if "loss" not in line:
                happened.append(line)
                continue
            if lines and line["step"] <= lines[-1]["step"]:
                returns.append((lines[-1]["step"], line["step"]))
            while lines and lines[-1]["step"] >= line["step"]:
                superseded.append(lines.pop())
            lines.append(line)
        return cls(tuple(lines), tuple(superseded), tuple(returns), tuple(happened), facts)

    def column(self, key: str) -> np.ndarray:
        """The numbers under `key`, NaN where there is none."""
        return np.array([_number(line.get(key)) for line in self.lines], dtype=np.float64)

    @property
    def steps(self) -> np.ndarray:
        """The logged steps."""
        return np.array([line["step"] for line in self.lines], dtype=np.int64)

    def standing(self, kind: str) -> list[tuple[int, int, str]]:
        """(first step, last step, text) of the events of a kind, without those whose steps were done again."""
        found: list[tuple[int, int, str]] = []
        for event in self.events:
            name, step, since, to_step = event.get("event"), event["step"], event.get("since"), event.get("to_step")
            if name in ("rollback", "saved"):  # these say where the run stands
                found = [earlier for earlier in found if earlier[1] <= (to_step if isinstance(to_step, int) else step)]
            elif name == kind:
                found.append((min(since, step) if isinstance(since, int) else step, step, str(event.get("text") or f"{kind} at step {step}")))
        return found

    @property
    def ended(self) -> bool:
        """Whether the last step was reached, as far as is known."""
        return self.facts.total_steps is None or bool(self.steps[-1] >= self.facts.total_steps)


def summary(history: History) -> dict[str, Any]:
    """The run in a few numbers, None where they are not known."""
    loss, validation, speed = history.column("loss"), history.column("val_loss"), history.column("tokens_per_s")
    best = int(np.nanargmin(validation)) if np.isfinite(validation).any() else None
    numbers = {
        "first_step": history.lines[0]["step"],
        "last_step": history.lines[-1]["step"],
        "total_steps": history.facts.total_steps,
        "lines": len(history.lines),
        "tokens": history.lines[-1].get("tokens"),
        "loss_start": loss[0],
        "loss_end": loss[-1],
        "val_loss_best": None if best is None else validation[best],
        "val_loss_best_step": None if best is None else history.lines[best]["step"],
        "tokens_per_s": np.median(speed[np.isfinite(speed)]) if np.isfinite(speed).any() else None,
        "went_back": [list(pair) for pair in history.returns],
    }
    return {key: _plain(value) for key, value in numbers.items()}


def _plain(value: Any) -> Any:
    """Without numpy's types and without NaN, for which JSON has no word."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def locate(path: Path) -> Path:
    """The metrics file of a run folder, or the file itself.

    Raises:
        ConfigError: there is none.
    """
    if path.is_dir():
        path = path / "metrics.jsonl"
        if not path.exists():
            raise _problem(f"'{path.parent}' holds no metrics.jsonl", "a run folder (runs/NAME) that has logged a step, or a metrics.jsonl")
    elif not path.exists():
        beside = [str(found.parent) for found in sorted(path.parent.glob("*/metrics.jsonl"))][:5]
        raise _problem(f"'{path}' does not exist", "one of " + ", ".join(beside) if beside else "a run folder (runs/NAME), or a metrics.jsonl")
    return path


def read(path: Path) -> tuple[History, int]:
    """The metrics in a file, with what the run folder around it knows, and how many lines are cut off in their midst.

    A crash leaves such lines. The last line may be half written: the run goes on.

    Raises:
        ConfigError: it cannot be read, is empty, or holds no metrics.
    """
    try:
        parsed, empty = _lines(path)
    except OSError as error:
        raise _problem(f"metrics '{path}' cannot be read: {error.strerror}", "a run folder or its metrics.jsonl") from None
    if empty:
        raise _problem(f"metrics '{path}' is empty", "a run that has logged a step")
    lines, unreadable = [line for line in parsed if line is not None], parsed[:-1].count(None)
    try:
        events = [line for line in _lines(path.with_name("events.jsonl"))[0] if line is not None]
    except OSError:
        events = []
    history = History.of(lines, events, _facts(path.parent))
    if not history.lines or unreadable > len(lines):
        found = f"{len(history.lines)} of its lines are objects with step and loss"
        raise _problem(f"'{path}' is no metrics file: {found}", "a run folder or its metrics.jsonl")
    return history, unreadable


def _lines(path: Path) -> tuple[list[dict[str, Any] | None], bool]:
    """The objects in a file, a line each, None where a line is no object with a step; and whether there is nothing in it."""
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    texts = [text for text in texts[:-1] if text.strip()] + texts[-1:]
    return [_line(text) for text in texts], not any(text.strip() for text in texts)


def _line(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    step = line.get("step") if isinstance(line, dict) else None
    return line if isinstance(step, int) and not isinstance(step, bool) and abs(step) < 2**63 else None


def _facts(folder: Path) -> Facts:
    """What the run's configuration beside the metrics says, as far as there is one and it can be read."""
    try:
        run_config = RunConfig.model_validate(yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError):  # none, or one of another version: the metrics speak for themselves
        return Facts()
    vocab_size = run_config.model.vocab_size
    return Facts(
        vocab_size if vocab_size != "auto" else None, run_config.training.steps, run_config.schedule.warmup_steps, run_config.evaluation.every
    )


def _problem(what: str, fix: str) -> ConfigError:
    return ConfigError(Problem(what, "there is nothing to diagnose", f"give {fix}"))
