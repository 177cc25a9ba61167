"""``ds-gpt prepare``: text, JSONL, Parquet and data sets of Hugging Face to token shards."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_gpt.commands.arguments import Parser
from ds_gpt.commands.failure import run_or_fail

if TYPE_CHECKING:
    from ds_gpt.data.prepared import PreparedCorpus
    from ds_gpt.data.workers import Counts


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Parse the command line and prepare; ends the process with status 2 on bad input."""
    parser = Parser(prog=prog, description="Make a corpus into token shards. Run it again to go on after an interruption.", allow_abbrev=False)
    parser.add_argument("out", metavar="OUT", help="folder of the prepared corpus, to be given to training as data.corpus")
    parser.add_argument(
        "sources", metavar="SOURCE", nargs="*",
        help="a file or a glob: text, .jsonl, .parquet, and .gz or .zst of the first two; or hf:NAME, a data set of Hugging Face",
    )  # fmt: skip
    parser.add_argument("--tokenizer", default="gpt2", metavar="NAME", help="gpt2, char, bpe (trained on the corpus), or a tokenizer.json or *.tiktoken (default: gpt2)")
    parser.add_argument("--bpe-vocab-size", type=int, default=8192, metavar="N", help="ids of a trained bpe (default: 8192)")
    parser.add_argument("--bpe-sample-mib", type=int, default=256, metavar="N", help="text that a bpe is trained on, from all over the corpus (default: 256)")
    parser.add_argument("--val-fraction", type=float, default=0.01, metavar="F", help="share of the documents to validate on (default: 0.01)")
    parser.add_argument("--field", default="text", metavar="NAME", help="the text of a JSONL record or Parquet row (default: text)")
    parser.add_argument("--document-separator", metavar="TEXT", help="what stands between the documents of a text file, for example '<|endoftext|>' (default: a file is one document, cut at line ends where it is long)")
    parser.add_argument("--hf-config", metavar="NAME", help="configuration of the data set, for example sample-10BT")
    parser.add_argument("--hf-split", default="train", metavar="NAME", help="its split (default: train)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="how many tokenize at a time (default: one a core)")
    parser.add_argument("--verify", action="store_true", help="without sources: read all of OUT and compare it with its checksums")
    run_or_fail(lambda: run(parser.parse_args(arguments)))


def run(options: argparse.Namespace) -> None:
    """Prepare or verify, and say what there is. Raises ConfigError."""
    from ds_gpt.data.documents import Reading
    from ds_gpt.data.preparation import Settings, prepare_corpus
    from ds_gpt.data.prepared import open_prepared

    _check(options)
    out = Path(options.out)
    if options.verify:
        corpus = open_prepared(out)
        corpus.verify()
        print(f"{_described(corpus)}: intact")
        return
    settings = Settings(
        tokenizer=options.tokenizer,
        bpe_vocab_size=options.bpe_vocab_size,
        bpe_sample_bytes=options.bpe_sample_mib << 20,
        val_fraction=options.val_fraction,
        reading=Reading(options.field, options.document_separator, options.hf_config, options.hf_split),
    )
    with _Bar() as bar:
        corpus = prepare_corpus(out, options.sources, settings, options.processes, bar.show)
    print(f"{_described(corpus)}\n{bar.speed()}\ntrain on it: --set data.corpus={out}")


def _check(options: argparse.Namespace) -> None:
    """Refuse what cannot be, all at once. Raises ConfigError."""
    from ds_gpt.config import ConfigError, Problem

    problems = []
    if options.verify == bool(options.sources):
        problems.append(Problem("--verify and sources exclude each other, and one is needed", fix="give sources to prepare, or --verify alone"))
    if not 0 < options.val_fraction < 1:
        problems.append(Problem(f"--val-fraction {options.val_fraction} is not between 0 and 1", fix="for example 0.01"))
    if options.document_separator == "":
        problems.append(Problem("--document-separator is empty", fix="give a text, or leave it out"))
    if options.bpe_vocab_size < 257:
        problems.append(Problem(f"--bpe-vocab-size {options.bpe_vocab_size} is below 257", "the 256 bytes and end of text are ids already", "for example 8192"))
    problems += [
        Problem(f"--{name.replace('_', '-')} {getattr(options, name)} should be 1 or more", fix="correct it")
        for name in ("bpe_sample_mib", "processes")
        if getattr(options, name) < 1
    ]
    if problems:
        raise ConfigError(problems)


def _described(corpus: PreparedCorpus) -> str:
    shards = (*corpus.train, *corpus.val)
    tokens, documents, text_bytes = (sum(getattr(shard, name) for shard in shards) for name in ("n_tokens", "n_documents", "n_text_bytes"))
    validation = sum(shard.n_tokens for shard in corpus.val)
    return (
        f"{corpus.path}: {tokens:,} tokens ({validation:,} to validate on) of a vocabulary of {corpus.tokenizer.vocab_size:,}, "
        f"{documents:,} documents, {text_bytes / tokens:.2f} bytes of text a token, {len(shards)} shards"
    )


class _Bar:
    """A progress bar on a terminal; elsewhere only the last line is printed."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"), TextColumn("ETA"), TimeRemainingColumn())
        self._progress = Progress(*columns)
        self._task: Any = None
        self._what = ""
        self._last: Counts | None = None

    def __enter__(self) -> _Bar:
        if self._progress.console.is_interactive:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._seconds = time.monotonic() - self._started if self._what else 0.0
        if self._progress.console.is_interactive:  # elsewhere it never started, and stopping it prints an empty line
            self._progress.stop()

    def show(self, what: str, total_bytes: int, counts: Counts) -> None:
        """Move the bar; `total_bytes` 0: nobody knows how far it goes."""
        if what != self._what:
            self._what, self._started = what, time.monotonic()
            self._task = self._progress.add_task(what, total=total_bytes or None, done="")
        self._last = counts
        self._progress.update(self._task, completed=counts.source_bytes, done=self._done(counts, time.monotonic() - self._started))

    def speed(self) -> str:
        """What was done, and how fast."""
        if self._last is None or not self._last.documents:
            return "nothing was left to do"
        return f"in {self._seconds:.1f} s: {self._done(self._last, self._seconds)}"

    def _done(self, counts: Counts, seconds: float) -> str:
        rate = counts.text_bytes / 1e6 / max(seconds, 1e-9)
        return f"{counts.text_bytes / 1e6:,.1f} MB of text, {counts.tokens:,} tokens, {rate:.1f} MB/s"
