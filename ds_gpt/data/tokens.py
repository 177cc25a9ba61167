"""The tokens of a run: prepared shards, or built once per machine; memory-mapped by every rank either way."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ds_gpt.config import ConfigError, Problem
from ds_gpt.config.run import DataConfig
from ds_gpt.data.cache import cache_root, exclusive, writing_to
from ds_gpt.data.characters import SyntheticTokenizer
from ds_gpt.data.corpora import identify, read_text, synthetic_tokens
from ds_gpt.data.corruption import Corrupted
from ds_gpt.data.prepared import is_prepared, open_prepared
from ds_gpt.data.replacing import replace_text, replacing
from ds_gpt.data.rows import Rows
from ds_gpt.data.split import Split, joined
from ds_gpt.data.tokenizer import Tokenizer, token_dtype
from ds_gpt.data.tokenizer_choice import choose_tokenizer, is_tokenizer, tokenizer_from_dict, tokenizer_key

_FORMAT = 1  # raise when the same corpus would give other tokens, or other files
_VAL_FRACTION = 0.1  # of a corpus that was not prepared, split at one position


@dataclass(frozen=True)
class Dataset:
    """Tokens to train on and tokens to validate on: what is validated on was never trained on."""

    train: Split | Rows | Corrupted
    val: Split | Rows | Corrupted
    tokenizer: Tokenizer
    digest: str  # sha256 (hex) of the tokens and the tokenizer: equal digests are equal data
    notes: tuple[str, ...] = ()  # what was made of it, and left out, a sentence each
    framed: Callable[[str], str] = str  # how a prompt is put to the model

    @classmethod
    def cut(cls, tokens: np.ndarray, val_fraction: float, tokenizer: Tokenizer, digest: str) -> Dataset:
        """One array, [N], split in two at one position: the last tokens are validated on."""
        position = int(len(tokens) * (1 - val_fraction))
        return cls(Split.of(tokens[:position]), Split.of(tokens[position:]), tokenizer, digest)


def prepare(data: DataConfig, seed: int) -> Dataset:
    """The tokens that `data` describes: prepared corpora as they are, others from the cache folder, where the first
    caller puts them.

    Needs no process group: all ranks may call at once. One builds, the others wait for the kernel's lock and then
    read. `seed` matters to the synthetic corpus only. Raises ConfigError for a corpus or cache folder that fails.
    """
    found = [_corpus(data, part.corpus, seed) for part in data.parts]
    dataset = found[0]
    if len(found) > 1:
        _check_one_tokenizer(data, found)
        weights = [part.weight for part in data.parts]
        of_parts = json.dumps([[corpus.digest, weight] for corpus, weight in zip(found, weights, strict=True)])
        digest = hashlib.sha256(of_parts.encode()).hexdigest()
        train, val = (joined([getattr(corpus, split) for corpus in found], weights) for split in ("train", "val"))
        dataset = Dataset(train, val, dataset.tokenizer, digest)
    if not data.attend_across_documents and not (dataset.train.has_documents and dataset.val.has_documents):
        raise ConfigError(
            Problem(
                f"data.attend_across_documents = false, but data.corpus = '{data.title}' does not say where documents end",
                "only a prepared corpus does",
                "give a folder that ds-gpt prepare made, or set it to true",
            )
        )
    return dataset


def _check_one_tokenizer(data: DataConfig, found: Sequence[Dataset]) -> None:
    others = [part.corpus for part, corpus in zip(data.parts, found, strict=True) if corpus.tokenizer.identity != found[0].tokenizer.identity]
    if others:
        raise ConfigError(
            Problem(
                f"data.corpus: the tokenizer of {' and '.join(map(repr, others))} is not that of '{data.parts[0].corpus}'",
                "an id would mean one text in one corpus and another in the next",
                "prepare them by one tokenizer: ds-gpt prepare --tokenizer FIRST/tokenizer.json",
            )
        )


def _corpus(data: DataConfig, corpus: str, seed: int) -> Dataset:
    if is_prepared(path := Path(corpus).expanduser()):
        return _prepared(data, path)
    data = data.model_copy(update={"corpus": corpus})
    root = cache_root(data.cache_dir)
    path = root / "tokens" / _file_name(data, seed)
    val_fraction = _VAL_FRACTION if data.val_fraction == "auto" else data.val_fraction
    # The usual case, and the one that works in a read-only cache folder.
    if (dataset := _read(path, val_fraction)) is not None:
        return dataset
    with writing_to(root):
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(path.with_suffix(".lock")):
            if (dataset := _read(path, val_fraction)) is not None:
                return dataset
            _build(path, data, seed)
    dataset = _read(path, val_fraction)
    assert dataset is not None, f"'{path}' was written a moment ago and cannot be read"
    return dataset


def _prepared(data: DataConfig, path: Path) -> Dataset:
    """A prepared corpus. Raises ConfigError where the run states another tokenizer or validation split than it has."""
    corpus = open_prepared(path)
    problems = []
    if data.val_fraction not in ("auto", corpus.val_fraction):
        what = f"data.val_fraction = {data.val_fraction}, but '{path}' was prepared with {corpus.val_fraction}"
        problems.append(Problem(what, "its documents were divided when it was prepared", "remove data.val_fraction, or prepare it anew"))
    if not is_tokenizer(data.tokenizer, corpus.tokenizer):
        what = f"data.tokenizer = '{data.tokenizer}', but '{path}' was prepared by a tokenizer of its own"
        problems.append(Problem(what, "its tokens are that one's", "remove data.tokenizer (or set it to auto), or prepare it anew"))
    if problems:
        raise ConfigError(problems)
    train, val = (Split((shards,), (1.0,)) for shards in (corpus.train, corpus.val))
    return Dataset(train, val, corpus.tokenizer, corpus.digest)


def _file_name(data: DataConfig, seed: int) -> str:
    """A name that changes whenever the tokens may: with the corpus, the tokenizer or the format."""
    key = {"format": _FORMAT, "tokenizer": tokenizer_key(data.tokenizer, data.bpe_vocab_size), "corpus": identify(data, seed)}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    readable = re.sub(r"[^A-Za-z0-9]+", "_", Path(data.corpus).stem)[:40].strip("_")
    return f"{readable}-{digest[:16]}.npy"


def _build(path: Path, data: DataConfig, seed: int) -> None:
    """Write the tokens to `path` and their description beside it."""
    tokenizer: Tokenizer
    if data.corpus == "synthetic":
        tokenizer = SyntheticTokenizer(data.synthetic.vocab_size)
        tokens = synthetic_tokens(data.synthetic, seed)
    else:
        text = read_text(data)
        tokenizer = choose_tokenizer(data.tokenizer, data.bpe_vocab_size, lambda: [text], lambda: [text])
        tokens = tokenizer.encode(text)
    # Ordinary writes: on a full disk they raise an error, where writing through a memory map kills the process.
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.save(file, tokens, allow_pickle=False)
    description = {"digest": _digest(tokens, tokenizer), "tokenizer": tokenizer.to_dict()}
    replace_text(path.with_suffix(".json"), json.dumps(description) + "\n")


def _read(path: Path, val_fraction: float) -> Dataset | None:
    """The tokens at `path`; None where they are missing or damaged.

    Nothing is trusted: the digest is taken anew from what is there (about a second per gigabyte, once per run).
    """
    try:
        description = json.loads(path.with_suffix(".json").read_bytes())
        tokenizer = tokenizer_from_dict(description["tokenizer"])
        tokens = np.lib.format.open_memmap(path, mode="r")  # never unpickles
    except Exception:  # missing, cut short or not ours: a damaged .npy header alone fails in half a dozen ways
        return None
    if tokens.ndim != 1 or tokens.dtype != token_dtype(tokenizer.vocab_size):
        return None
    digest = _digest(tokens, tokenizer)
    if digest != description.get("digest"):
        return None
    return Dataset.cut(tokens, val_fraction, tokenizer, digest)


def _digest(tokens: np.ndarray, tokenizer: Tokenizer) -> str:
    content = hashlib.sha256(tokenizer.identity.encode())
    content.update(memoryview(tokens))
    return content.hexdigest()
