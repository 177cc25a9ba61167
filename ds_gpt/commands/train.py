"""``deepspeed ds_gpt/train.py`` and ``ds-gpt train``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ds_gpt.commands.arguments import add_config_arguments
from ds_gpt.commands.failure import run_or_fail

if TYPE_CHECKING:
    from ds_gpt.config import Composed
    from ds_gpt.data import Dataset


def parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The command line of training."""
    result = argparse.ArgumentParser(prog=prog, description="Train a GPT through DeepSpeed.", allow_abbrev=False)
    add_config_arguments(result)
    result.add_argument("--run-dir", metavar="DIR", help="folder of the run (default: runs/NAME, or NAME-2, ... if taken)")
    result.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # from the deepspeed launcher
    result.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # the flag other DeepSpeed scripts take
    return result


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Parse the command line and train; ends the process with status 1 on an error."""
    options = parser(prog).parse_args(arguments)
    run_or_fail(lambda: train(options))


def train(options: argparse.Namespace) -> None:
    """One rank's whole run. Bad input is refused before DeepSpeed is imported and before any rank waits for another.

    Raises:
        ConfigError: bad input of any kind.
    """
    from dataclasses import replace

    from ds_gpt.config import ConfigError, Problem, load
    from ds_gpt.config.parse import with_vocabulary
    from ds_gpt.data import prepare
    from ds_gpt.engine.ranks import Ranks
    from ds_gpt.trainer.run_folder import RunFolder

    ranks = Ranks.from_environment()
    composed = load(options.config, options.deepspeed_config, ranks.hardware(), options.overrides)
    dataset = prepare(composed.run.data, composed.run.seed)
    composed = replace(composed, run=with_vocabulary(composed.run, dataset.tokenizer.vocab_size))
    check_lengths(composed, dataset)
    folder = RunFolder.new(composed.run.name, options.run_dir) if ranks.is_first else None

    from ds_gpt.engine.engine import Engine, check_deepspeed_config
    from ds_gpt.trainer.console import Console
    from ds_gpt.trainer.loop import Trainer

    check_deepspeed_config(composed)
    console = None
    if folder is not None:
        folder.create(composed, dataset.tokenizer, dataset.digest)
        console = Console(composed.run.training.steps)
        console.summary(composed, str(folder.path), f"{composed.run.data.corpus}: {len(dataset.tokens):,} tokens, {len(dataset.train):,} to train on")
    ranks.connect()
    if ranks.agree(dataset.digest) != dataset.digest:
        raise ConfigError(
            Problem(
                f"rank {ranks.rank} has other tokens for data.corpus = '{composed.run.data.corpus}' than rank 0",
                "each node tokenizes its own copy; these copies, or the Python versions that ship them, differ",
                "give every node the same file",
            )
        )
    folder = RunFolder(Path(ranks.agree(str(folder.path) if folder else "")))
    Trainer(composed, dataset, Engine(composed, ranks), folder, console).train()
    ranks.disconnect()


def check_lengths(composed: Composed, dataset: Dataset) -> None:
    """Refuse a context that the text cannot fill, before any rank waits for another.

    Raises:
        ConfigError: a split is shorter than one window.
    """
    from ds_gpt.data import WindowSampler, evaluation_windows

    run = composed.run
    WindowSampler(len(dataset.train), run.model.context, run.batch.global_batch_size, run.seed)
    evaluation_windows(len(dataset.val), run.model.context, run.evaluation.sequences)
