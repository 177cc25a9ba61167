"""A prepared corpus: a folder of token shards, with what they were made from and by which tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_gpt.config import ConfigError, Problem
from ds_gpt.data.replacing import replace_text
from ds_gpt.data.shards import Shard
from ds_gpt.data.tokenizer import Tokenizer
from ds_gpt.data.tokenizer_choice import load_tokenizer

MANIFEST, PLAN, TOKENIZER = "corpus.json", "plan.json", "tokenizer.json"
SPLITS = ("train", "val")
_FORMAT = 1


@dataclass(frozen=True)
class PreparedCorpus:
    """A prepared corpus, its shards opened: their headers are read and checked, their content is not."""

    path: Path
    tokenizer: Tokenizer
    train: tuple[Shard, ...]
    val: tuple[Shard, ...]
    val_fraction: float  # share of the documents that was put aside for validation
    digest: str  # sha256 (hex) of tokenizer and shards: equal digests are equal data

    def verify(self) -> None:
        """Read every shard and compare it with its checksum. Raises ConfigError naming the damaged ones."""
        problems: list[Problem] = []
        for shard in (*self.train, *self.val):
            try:
                shard.verify()
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)


def is_prepared(path: Path) -> bool:
    """Whether `path` is a folder that `prepare` made, finished or not."""
    return (path / MANIFEST).is_file() or (path / PLAN).is_file()


def write_manifest(path: Path, tokenizer: Tokenizer, shards: dict[str, Sequence[Shard]], val_fraction: float) -> None:
    """Finish a prepared corpus: from now on it can be opened. Shards without a document are left out."""
    described = {
        split: [[shard.path.name, shard.n_tokens, shard.n_documents, shard.n_text_bytes, shard.digest] for shard in of_split if shard.n_documents]
        for split, of_split in shards.items()
    }
    content = {
        "format": _FORMAT,
        "tokenizer_identity": tokenizer.identity,
        "val_fraction": val_fraction,
        "shards": described,  # of each: name, tokens, documents, bytes of text, sha256 of what follows the header
    }
    replace_text(path / MANIFEST, json.dumps(content, indent=1) + "\n")


def open_prepared(path: Path) -> PreparedCorpus:
    """Open a prepared corpus; some 30 microseconds a shard. Raises ConfigError naming what is damaged, foreign or missing."""
    if not is_prepared(path):
        raise ConfigError(Problem(f"'{path}' is not a folder that ds-gpt prepare made", "it has no plan and no list of shards", "check the path"))
    if not (path / MANIFEST).is_file():
        raise ConfigError(
            Problem(f"the corpus '{path}' is not fully prepared", "ds-gpt prepare was interrupted", "run the same ds-gpt prepare again: it goes on from there")
        )
    try:
        content = json.loads((path / MANIFEST).read_bytes())
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {_FORMAT}")
        identity, val_fraction = str(content["tokenizer_identity"]), float(content["val_fraction"])
        listed = {split: [(str(name), str(digest)) for name, *_, digest in content["shards"][split]] for split in SPLITS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            Problem(f"'{path / MANIFEST}' cannot be read: {error!r}", "it lists the shards of the corpus", "prepare the corpus again")
        ) from error
    tokenizer = load_tokenizer(path / TOKENIZER)
    if tokenizer.identity != identity:
        raise ConfigError(
            Problem(f"'{path / TOKENIZER}' is not the tokenizer of the corpus", "its ids would mean other text", "put back the one it was prepared with")
        )
    shards: dict[str, tuple[Shard, ...]] = {split: _open(path / split, listed[split], identity) for split in SPLITS}
    of_shards = [[split, digest] for split in SPLITS for _, digest in listed[split]]
    digest = hashlib.sha256(json.dumps([identity, of_shards]).encode()).hexdigest()
    return PreparedCorpus(path, tokenizer, shards["train"], shards["val"], val_fraction, digest)


def _open(folder: Path, listed: Sequence[tuple[str, str]], identity: str) -> tuple[Shard, ...]:
    shards, problems = [], []
    for name, digest in listed:
        try:
            shard = Shard.open(folder / name, identity)
        except ConfigError as error:
            problems += error.problems
            continue
        if shard.digest != digest:
            problems.append(
                Problem(f"'{shard.path}' is not the shard that the corpus lists", "it holds other tokens", "copy it anew from where the corpus is intact")
            )
        shards.append(shard)
    if problems:
        raise ConfigError(problems)
    return tuple(shards)
