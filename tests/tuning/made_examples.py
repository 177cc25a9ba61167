"""Small corpora of conversations and of pairs of answers, for the tests of tuning."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tiny import tiny

from ds_gpt.config import Composed
from ds_gpt.config.parse import with_vocabulary
from ds_gpt.data.stages import needed_vocabulary, prepare_stage

ASKED = [f"{a}+{b}" for a in range(10) for b in range(10)]


def write(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def conversations() -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": str(eval(asked))}]}
        for asked in ASKED
    ]


def pairs() -> list[dict[str, Any]]:
    """The preferred answer is the sum, the other one is off by something."""
    return [
        {"prompt": f"{asked}=", "chosen": f"{eval(asked):02d}", "rejected": f"{(eval(asked) + 3) % 20:02d}"}
        for asked in ASKED
    ]


def composed(
    stage: str, corpus: Path, overrides: Iterable[str] = (), deepspeed: str = "zero1", world_size: int = 1
) -> Composed:
    settings = [
        f"stage={stage}",
        f"data.corpus={corpus}",
        "model.context=48",
        "model.vocab_size=auto",
        "sample.tokens=4",
    ]
    return tiny(deepspeed, world_size, [*settings, *overrides])


def settled(run: Any) -> tuple[Any, Any]:
    """The run with its vocabulary, and its data."""
    dataset = prepare_stage(run)
    return with_vocabulary(run, needed_vocabulary(run, dataset)), dataset
