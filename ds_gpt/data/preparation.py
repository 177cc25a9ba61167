"""``ds-gpt prepare``: from sources to token shards, by many processes, each piece of work once.

The work is planned first and the plan is kept: every piece makes one shard of each split, whole or not at all. So a
preparation that was killed goes on with the pieces that are missing, and its result does not depend on how often that
happened, nor on the number of processes.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from ds_gpt.config import ConfigError, Problem
from ds_gpt.data.characters import BETWEEN_DOCUMENTS
from ds_gpt.data.documents import HUGGING_FACE, SPAN_BYTES, Reading, Span, documents, spans
from ds_gpt.data.prepared import PLAN, SPLITS, TOKENIZER, PreparedCorpus, is_prepared, open_prepared, write_manifest
from ds_gpt.data.replacing import replace_text
from ds_gpt.data.shards import Shard, writing_shard
from ds_gpt.data.tokenizer import Tokenizer
from ds_gpt.data.tokenizer_choice import choose_tokenizer, load_tokenizer
from ds_gpt.data.workers import Counters, Counts, Report, each

_FORMAT = 1  # raise when the same sources would give other shards
_BATCH = 1 << 18  # characters tokenized at a time
_CHARACTERS = "characters"


@dataclass(frozen=True)
class Settings:
    """What decides the content of a prepared corpus, besides its sources."""

    tokenizer: str = "gpt2"
    bpe_vocab_size: int = 8192
    bpe_sample_bytes: int = 1 << 28  # text on which a bpe is trained, taken evenly from all over the corpus
    val_fraction: float = 0.01  # of the documents, chosen by a hash of their text: equal documents fall on one side
    reading: Reading = Reading()


@dataclass(frozen=True)
class Work:
    """What a process needs to know besides the spans of its piece."""

    folder: Path
    reading: Reading
    val_fraction: float


def prepare_corpus(folder: Path, sources: Sequence[str], settings: Settings, processes: int, report: Report) -> PreparedCorpus:
    """Make the prepared corpus `folder`, or finish it, or find it finished.

    Args:
        folder: where it is made.
        sources: paths, globs, and hf:NAME.
        settings: how.
        processes: how many work at a time; 1 works in this one.
        report: told now and then how far it is.

    Raises:
        ConfigError: a source that cannot be read, a folder that holds something else or is being prepared already.
    """
    with _claimed(folder):
        for pattern in ("*/.*.partial", ".*.partial"):  # by a preparation that was killed
            for left_over in folder.glob(pattern):
                left_over.unlink()
        plan = _planned(folder, _resolved(sources), settings)
        pieces = [[Span(*span) for span in piece] for piece in plan["pieces"]]
        total = sum(span.n_bytes for piece in pieces for span in piece)
        work = Work(folder, settings.reading, settings.val_fraction)
        if not (folder / TOKENIZER).is_file():
            told = partial(report, "tokenizer", total)
            told(Counts())
            _tokenizer(settings, pieces, work, processes, told).save(folder / TOKENIZER)
        tokenizer = load_tokenizer(folder / TOKENIZER)
        numbered = list(enumerate(pieces))
        found = each(partial(_build, work), numbered, processes, partial(report, "tokens", total))
        shards = {split: [of_piece[split] for of_piece in found] for split in SPLITS}
        _check_documents(shards, settings.val_fraction)
        write_manifest(folder, tokenizer, shards, settings.val_fraction)
    return open_prepared(folder)


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """The folder, for as long as the block runs; the kernel frees it if the process dies. Raises ConfigError."""
    try:
        if folder.exists() and not is_prepared(folder) and not all(map(_left_over, folder.iterdir())):
            raise ConfigError(
                Problem(
                    f"'{folder}' holds something else",
                    "a prepared corpus has a folder of its own",
                    "give another folder, or remove this one",
                )
            )
        for split in SPLITS:
            (folder / split).mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ConfigError(
            Problem(f"'{folder}' cannot be written: {error}", fix="give a folder that this user can write")
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                Problem(f"'{folder}' is being prepared by another process", fix="wait for it, or end it")
            ) from None
        yield
    except OSError as error:  # the disk is full, most often
        raise ConfigError(
            Problem(
                f"'{folder}' cannot be finished: {error}",
                "what is finished of it is kept",
                "make room, and run the same command again",
            )
        ) from error
    finally:
        os.close(lock)


def _left_over(path: Path) -> bool:
    """Whether a preparation that failed before it had a plan left this."""
    if path.name in SPLITS:
        return path.is_dir() and not any(path.iterdir())
    return path.name == ".lock" or path.match(f".{PLAN}.*.partial")


def _resolved(sources: Sequence[str]) -> list[str]:
    """The sources with globs as the files they match, sorted; paths absolute. Raises ConfigError naming all that match nothing."""
    found, problems = [], []
    for source in sources:
        path = os.path.expanduser(source)
        if source.startswith(HUGGING_FACE):
            found.append(source)
        elif matches := [path] if os.path.isfile(path) else sorted(filter(os.path.isfile, glob.glob(path, recursive=True))):
            found += map(os.path.realpath, matches)
        else:
            fix = f"write a glob: '{source.rstrip('/')}/*'" if os.path.isdir(path) else "check the path; text, .jsonl, .parquet, and .gz or .zst of them"
            problems.append(Problem(f"'{source}' is no file" + (", but a folder" if os.path.isdir(path) else ""), fix=fix))
    if problems:
        raise ConfigError(problems)
    return list(dict.fromkeys(found))


def _planned(folder: Path, sources: list[str], settings: Settings) -> dict[str, Any]:
    """The plan that lies in `folder`, or a new one. Raises ConfigError where that one is for something else."""
    stats = {source: os.stat(source) for source in sources if not source.startswith(HUGGING_FACE)}
    stated = {
        "format": _FORMAT,
        "settings": asdict(settings),
        "sources": [[source, *((stats[source].st_size, stats[source].st_mtime_ns) if source in stats else ())] for source in sources],
    }
    try:
        plan = json.loads((folder / PLAN).read_bytes())
    except FileNotFoundError:
        plan = {**stated, "pieces": _grouped(spans(sources, settings.reading, SPAN_BYTES))}
        replace_text(folder / PLAN, json.dumps(plan) + "\n")
        plan = json.loads((folder / PLAN).read_bytes())
    except ValueError as error:
        raise ConfigError(Problem(f"'{folder / PLAN}' cannot be read: {error}", fix="remove the folder and prepare again")) from error
    changed = [key for key, value in stated.items() if plan.get(key) != json.loads(json.dumps(value))]
    if changed and not any(folder.glob("*/*.tokens")):  # a first try that came to nothing
        for name in (PLAN, TOKENIZER):
            (folder / name).unlink(missing_ok=True)
        return _planned(folder, sources, settings)
    if changed:
        raise ConfigError(
            Problem(
                f"'{folder}' was begun with other {' and '.join(changed)}",
                "its shards would be of two kinds",
                "give what it was begun with, or remove the folder, or name another",
            )
        )
    return plan


def _grouped(found: Sequence[Span]) -> list[list[list[Any]]]:
    """Spans as pieces of work: neighbours that are small together, so that many small files do not become as many shards."""
    groups: list[list[Span]] = []
    for span in found:
        if groups and span.n_bytes and all(s.n_bytes for s in groups[-1]) and sum(s.n_bytes for s in groups[-1]) + span.n_bytes <= SPAN_BYTES:
            groups[-1].append(span)
        else:
            groups.append([span])
    return [[[span.source, span.first, span.last, span.n_bytes] for span in group] for group in groups]


def _tokenizer(settings: Settings, pieces: Sequence[Sequence[Span]], work: Work, processes: int, told: Callable[[Counts], None]) -> Tokenizer:
    def characters() -> Iterator[str]:
        yield BETWEEN_DOCUMENTS
        yield from each(partial(_characters, work), list(enumerate(pieces)), processes, told)

    def sample() -> Iterator[str]:
        for piece in pieces:
            left = max(1, settings.bpe_sample_bytes // len(pieces))
            for text in _documents(piece, settings.reading):
                yield text
                left -= len(text)
                if left <= 0:
                    break

    return choose_tokenizer(settings.tokenizer, settings.bpe_vocab_size, characters, sample)


def _characters(work: Work, numbered: tuple[int, Sequence[Span]], counters: Counters) -> str:
    """The distinct characters of a piece."""
    known: set[str] = set()
    for text in _documents(numbered[1], work.reading, counters.source):
        known.update(text)
    return "".join(known)


@lru_cache(maxsize=1)
def _loaded(path: Path) -> Tokenizer:
    return load_tokenizer(path)


def _build(work: Work, numbered: tuple[int, Sequence[Span]], counters: Counters) -> dict[str, Shard]:
    """The shards of a piece, made unless they are there and intact."""
    number, piece = numbered
    paths = {split: work.folder / split / f"{number:06d}.tokens" for split in SPLITS}
    tokenizer = _loaded(work.folder / TOKENIZER)
    if all(path.exists() for path in paths.values()):
        found = {split: Shard.open(path, tokenizer.identity) for split, path in paths.items()}
        for shard in found.values():
            shard.verify()
        counters.source(sum(span.n_bytes for span in piece))
        return found
    facts = tokenizer.vocab_size, tokenizer.identity, tokenizer.separator
    with writing_shard(paths["train"], *facts) as train, writing_shard(paths["val"], *facts) as val:
        for batch in _batches(_documents(piece, work.reading, counters.source)):
            for text, ids in zip(batch, tokenizer.encode_documents(batch), strict=True):
                content = text.encode("utf-8", "surrogatepass")
                (val if _drawn(content, work.val_fraction) else train).add(ids, len(content))
                counters.document(len(content), len(ids))
    return {split: Shard.open(path, tokenizer.identity) for split, path in paths.items()}


def _documents(piece: Sequence[Span], reading: Reading, advance: Callable[[int], None] = lambda n_bytes: None) -> Iterator[str]:
    for span in piece:
        yield from documents(span, reading, advance)


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    length = 0
    for text in texts:
        batch.append(text)
        length += len(text)
        if length >= _BATCH:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _drawn(content: bytes, fraction: float) -> bool:
    """Whether a document is one of the `fraction` that is put aside, by its text alone."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") < fraction * 2**64


def _check_documents(shards: dict[str, list[Shard]], val_fraction: float) -> None:
    n_documents = {split: sum(shard.n_documents for shard in shards[split]) for split in SPLITS}
    if not all(n_documents.values()):
        empty = next(split for split in SPLITS if not n_documents[split])
        raise ConfigError(
            Problem(
                f"of the {sum(n_documents.values())} documents none fell into the {'training' if empty == 'train' else 'validation'} split",
                f"each falls into the validation split with probability {val_fraction}, by a hash of its text",
                "remove the folder and change --val-fraction; a corpus of few documents is better given to training as the text file itself",
            )
        )
