"""The real Trainer on the harness's tiny run."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from tiny import VOCABULARY, tiny_tokens

from ds_gpt.config import Composed
from ds_gpt.data import Dataset, Split, SyntheticTokenizer, Tokenizer

KEYS = ["step", "tokens", "loss", "lr", "grad_norm", "step_s", "tokens_per_s", "mfu", "peak_bytes"]
STRAGGLER = ["straggler", "straggler_slowdown"]  # with more than one rank


class TinyDataset(Dataset):
    """Trains on all of the harness's tokens, as ``tiny.train_curve`` does, and validates on the last of them."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        tokenizer = tokenizer or SyntheticTokenizer(VOCABULARY)
        super().__init__(Split.of(tiny_tokens()), Dataset.cut(tiny_tokens(), 0.1, tokenizer, "tiny").val, tokenizer, "tiny")


@dataclass(frozen=True)
class Ran:
    """What a rank's run came to; `console` is what rank 0 printed into a log."""

    step: int
    tokens: int
    val_loss: float
    interrupted: bool
    console: str


def train(ranks: Any, composed: Composed, dataset: Dataset, folder: Path) -> Ran:
    """One rank's run, wired as ``ds_gpt.commands.train`` wires it. Called on every rank."""
    from ds_gpt.engine.engine import Engine
    from ds_gpt.trainer.console import Console
    from ds_gpt.trainer.loop import Trainer
    from ds_gpt.trainer.run_folder import RunFolder

    folder.mkdir(parents=True, exist_ok=True)
    printed = io.StringIO()
    console = Console(composed.run.training.steps, RichConsole(file=printed, width=80)) if ranks.is_first else None
    engine = Engine(composed, ranks)
    outcome = Trainer(composed, dataset, engine, RunFolder(folder), console).train()
    engine.close()
    val_loss = math.nan if outcome.val_loss is None else outcome.val_loss  # an interrupted run saves at once
    return Ran(outcome.state.step, outcome.state.tokens, val_loss, outcome.interrupted, printed.getvalue())


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Each line of ``metrics.jsonl``, read as strict JSON: NaN and Infinity are none."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (folder / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Every TensorBoard scalar of a run: tag, step, value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
