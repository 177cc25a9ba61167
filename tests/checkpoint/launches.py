"""``ds_gpt.commands.train`` many times over in one process, which is a rank: starting Python anew would take seconds each time."""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TINY = (
    "model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "model.ffn_width=auto", "model.vocab_size=auto", "model.dropout=0.1",
    "evaluation.every=2", "evaluation.sequences=8", "sample.tokens=4", "logging.every=1", "checkpoints.every=2", "data.corpus=text.txt", "data.cache_dir=cache",
)  # fmt: skip


@dataclass(frozen=True)
class Launched:
    """What a launch printed, and how it was refused if it was."""

    out: str
    error: str

    @property
    def changes(self) -> list[str]:
        """The fields that were named as changed."""
        mark = "changed since it was saved: "
        return [line.removeprefix(mark).partition(":")[0] for line in self.out.splitlines() if line.startswith(mark)]


def write_texts(folder: Path) -> None:
    """``text.txt``; ``anagram.txt``, other text of the same characters; ``digits.txt``, as many other characters."""
    text = "The quick brown fox jumps over the lazy dog. " * 100
    (folder / "text.txt").write_text(text)
    (folder / "anagram.txt").write_text(text[::-1])
    (folder / "digits.txt").write_text(text.replace("z", "7"))


def options(*words: str) -> list[str]:
    """The command line: settings are given as KEY=VALUE, everything else as it is."""
    settings = [*TINY, *(word for word in words if "=" in word)]
    return [*(word for word in words if "=" not in word), *(argument for setting in settings for argument in ("--set", setting))]


def launch(*words: str, alter: float | None = None) -> Launched:
    """Train the tiny model in the working folder, by the command itself; `words` as for `options`, `alter` as below."""
    return launch_as_given(options(*words), alter)


def launch_as_given(arguments: list[str], alter: float | None = None) -> Launched:
    """Train in the working folder, by the command itself.

    Args:
        arguments: the command line.
        alter: what the weights are multiplied by behind the keeper's back, once a checkpoint is loaded.
    """
    from ds_gpt.commands.train import parser, train
    from ds_gpt.config import NeedsAttention
    from ds_gpt.engine.ranks import Ranks
    from ds_gpt.trainer import keeper

    real, printed, error = keeper.load, io.StringIO(), ""

    def load_altered(engine: Any, checkpoint: Path) -> Any:
        loaded = real(engine, checkpoint)
        for parameter in engine.model.parameters():
            parameter.data.mul_(alter)
        return loaded

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        for name in ("connect", "disconnect"):  # the harness has, once; DeepSpeed keeps its groups
            patch.setattr(Ranks, name, lambda ranks: None)
        if alter is not None:
            patch.setattr(keeper, "load", load_altered)
        try:
            train(parser().parse_args(arguments))
        except NeedsAttention as refusal:
            error = str(refusal)
    return Launched(printed.getvalue(), error)


def in_folder(ranks: Any, folder: Path, story: Any) -> Any:
    """Tell `story` in a working folder of its own, by the one rank there is."""
    folder.mkdir()
    os.chdir(folder)
    write_texts(folder)
    return story()
