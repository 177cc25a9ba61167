"""``deepspeed ds_gpt/train.py`` and ``ds-gpt train``."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds_gpt.commands.arguments import Parser, add_config_arguments
from ds_gpt.commands.failure import run_or_fail

if TYPE_CHECKING:
    from ds_gpt.checkpoint.initial import Initial
    from ds_gpt.config import Composed
    from ds_gpt.data import Dataset
    from ds_gpt.engine.ranks import Ranks


def parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The command line of training."""
    result = Parser(prog=prog, description="Train a GPT through DeepSpeed.", allow_abbrev=False)
    resumed = "or that of the run to resume"
    add_config_arguments(result, f"quickstart.yaml, {resumed}", f"zero1.json, {resumed}")
    result.add_argument("--run-dir", metavar="DIR", help="folder of the run (default: runs/NAME, or NAME-2, ... if taken)")
    result.add_argument(
        "--resume", metavar="PATH", nargs="?", const="auto",
        help="go on with a run (its folder; alone: the newest run of this name), or start a new one from a checkpoint folder",
    )  # fmt: skip
    result.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # from the deepspeed launcher
    result.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # the flag other DeepSpeed scripts take
    return result


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Parse the command line and train; ends the process, with status 2 on bad input and 1 on any other error."""
    # A launcher that leaves it to the ranks started them without. Until they train, and can save, it is to end them.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run_or_fail(lambda: train(parser(prog).parse_args(arguments)))
    # Not by returning: gloo's threads may still be freeing the last collective's tensors, and one that asks for the
    # interpreter while it shuts down aborts the process, so that a run that ended well is reported as failed.
    with contextlib.suppress(OSError):  # nobody reads any more
        sys.stdout.flush()
    os._exit(0)


def train(options: argparse.Namespace) -> None:
    """One rank's whole run. Bad input is refused before DeepSpeed is imported and before any rank waits for another.

    Raises:
        ConfigError: bad input of any kind.
        RunStopped: the run is sick, or cannot be saved.
    """
    from ds_gpt.engine.ranks import Ranks
    from ds_gpt.trainer.start import check_start

    ranks = Ranks.from_environment()
    composed, dataset, initial = settle(options, ranks)
    if ranks.is_first:
        check_start(options.run_dir, options.resume, composed.run.name)

    from ds_gpt.checkpoint.resume import require_intact
    from ds_gpt.checkpoint.run_state import RunState
    from ds_gpt.engine.engine import Engine, check_deepspeed_config
    from ds_gpt.trainer.console import Console
    from ds_gpt.trainer.loop import Trainer
    from ds_gpt.trainer.out_of_memory import explained
    from ds_gpt.trainer.run_folder import RunFolder
    from ds_gpt.trainer.start import find_checkpoint, make_start

    check_deepspeed_config(composed)
    start, console = None, None
    if ranks.is_first:
        start = make_start(options.run_dir, options.resume, composed, dataset)
        claim = RunFolder(start.folder).claim()  # noqa: F841  held until this process ends
        console = Console(composed.run.training.steps)
        console.summary(composed, str(start.folder), f"{composed.run.data.title}: {len(dataset.train) + len(dataset.val):,} tokens, {len(dataset.train):,} to train on")
    ranks.connect()
    check_same_tokens(dataset, composed, ranks)
    start = ranks.agree(start)
    checkpoint = find_checkpoint(start, composed, dataset, ranks, console.say if console else lambda text: None)
    folder = RunFolder(start.folder)
    with explained(composed, ranks.rank):
        if initial is not None:
            require_intact(initial.checkpoint, ranks)
        engine = Engine(composed, ranks, initial.read if initial else None)
        pretraining = watched(composed, initial, dataset) if initial is not None else None
        trainer = Trainer(composed, dataset, engine, folder, console, pretraining)
        state = trainer.resume(checkpoint) if checkpoint else RunState()
        if state.step >= composed.run.training.steps:
            trainer.recorder.say(f"step {state.step} is past training.steps = {composed.run.training.steps}: nothing to do (--set training.steps=N trains on)")
            return
        if start.continues and ranks.is_first:
            folder.continue_from(state.step, composed, dataset.tokenizer, dataset.digest)
        trainer.train(state)
    ranks.disconnect()


def settle(options: argparse.Namespace, ranks: Ranks) -> tuple[Composed, Dataset, Initial | None]:
    """What is to be run, the data of it, and what it starts from; nothing is trained or written yet but the cache.

    Raises:
        ConfigError: bad input of any kind.
    """
    from dataclasses import replace

    import psutil

    from ds_gpt.checkpoint.initial import find_initial, started_from
    from ds_gpt.config import load
    from ds_gpt.config.parse import with_vocabulary
    from ds_gpt.data.rows import Rows
    from ds_gpt.data.stages import needed_vocabulary, prepare_stage
    from ds_gpt.engine.grid import said_apart
    from ds_gpt.trainer.out_of_memory import check_host_memory
    from ds_gpt.trainer.start import configuration

    files = configuration(options.config, options.deepspeed_config, options.overrides, options.run_dir, options.resume)
    composed = load(*files, ranks.hardware(), options.overrides)
    initial = find_initial(composed.run)
    if initial is not None:
        composed = replace(composed, run=started_from(composed.run, initial))
    dataset = prepare_stage(composed.run)
    run = with_vocabulary(composed.run, needed_vocabulary(composed.run, dataset))
    # On nodes of one size; `ds-gpt doctor` asks them.
    apart = said_apart(run.parallel, [rank // ranks.local_world_size for rank in range(ranks.world_size)])
    notes = (*composed.notes, *dataset.notes, *filter(None, [apart]))
    item_tokens = dataset.train.item_tokens if isinstance(dataset.train, Rows) else None
    composed = replace(composed, run=run, notes=notes, item_tokens=item_tokens)
    check_lengths(composed, dataset)
    check_host_memory(composed, ranks.local_world_size, psutil.virtual_memory().total)
    return composed, dataset, initial


def watched(composed: Composed, initial: Initial, dataset: Dataset) -> Dataset | None:
    """The data of the pre-training that a tuned model may forget; None where it is not at hand, or not to be watched."""
    from ds_gpt.checkpoint.initial import pretraining_of
    from ds_gpt.config import ConfigError
    from ds_gpt.data import prepare

    run = composed.run
    data = pretraining_of(initial)
    if data is None or not run.generates or run.stage == "pretrain" or run.evaluation.pretraining_sequences == 0:
        return None
    try:
        found = prepare(data, run.seed)
        found.val.evaluation_windows(run.model.context, run.evaluation.pretraining_sequences)
    except ConfigError:  # its files need not be on this machine
        return None
    return found if found.tokenizer.identity == dataset.tokenizer.identity else None


def check_lengths(composed: Composed, dataset: Dataset) -> None:
    """Refuse a context that the text cannot fill, before any rank waits for another.

    Raises:
        ConfigError: a split is shorter than one window.
    """
    run = composed.run
    dataset.train.sampler(run.model.context, run.batch.global_batch_size, run.seed)
    dataset.val.evaluation_windows(run.model.context, run.evaluation.sequences)


def check_same_tokens(dataset: Dataset, composed: Composed, ranks: Ranks) -> None:
    """Refuse to train on tokens that differ between ranks; every rank must call it.

    Raises:
        ConfigError: on every rank.
    """
    from ds_gpt.config import ConfigError, Problem

    differs = ranks.agree(dataset.digest) != dataset.digest
    (differing,) = ranks.sum([float(differs)])  # so that all ranks fail alike, where one alone would leave the others waiting
    if differing:
        raise ConfigError(
            Problem(
                f"data.corpus = '{composed.run.data.title}' has other tokens on {differing:.0f} of the {ranks.world_size} ranks than on rank 0",
                "each node tokenizes its own copy; these copies, or the Python versions that ship them, differ",
                "give every node the same file",
            )
        )
