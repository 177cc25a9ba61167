"""Faults at chosen steps of a run, for the ranks of the tests."""

from __future__ import annotations

import json
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def at_steps(actions: dict[int, Callable[[], object]]) -> Iterator[None]:
    """Do something on this rank once so many steps are completed and whatever was to be saved then was."""
    from ds_gpt.engine.engine import Engine

    real = Engine.step

    def step(self: Any, step: int, *arguments: Any) -> Any:
        actions.get(step, int)()
        return real(self, step, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", step)
        yield


def limit_files(size_bytes: int | None) -> None:
    """Let this process write no file longer than this: to it the disk is full."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size_bytes is None else size_bytes, hard))


@contextmanager
def slow_writes(seconds: float) -> Iterator[None]:
    """Every shard takes that much longer."""
    from ds_gpt.checkpoint import saver

    real = saver.write_shard

    def write_shard(*arguments: Any) -> Any:
        time.sleep(seconds)
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "write_shard", write_shard)
        yield


def writing_threads() -> list[str]:
    """Names of the threads that write checkpoints."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


def events(run: Path, *names: str) -> list[tuple[int, str]]:
    """(step, event) of a run's events of these names."""
    path = run / "events.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(line["step"], line["event"]) for line in lines if line["event"] in names]
