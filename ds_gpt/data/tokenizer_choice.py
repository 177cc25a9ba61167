"""Which tokenizer: by name, from a file, or as a run saved it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from ds_gpt.config import ConfigError, Problem
from ds_gpt.config.errors import did_you_mean
from ds_gpt.data.byte_pairs import BpeTokenizer, Gpt2Tokenizer
from ds_gpt.data.characters import CharTokenizer, SyntheticTokenizer
from ds_gpt.data.tokenizer import Tokenizer

_NAMED = {"char": CharTokenizer, "gpt2": Gpt2Tokenizer, "bpe": BpeTokenizer}
_CLASSES = {"char": CharTokenizer, "gpt2": Gpt2Tokenizer, "synthetic": SyntheticTokenizer}


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer saved at `path`: a run's, a prepared corpus's, or any tokenizer.json of Hugging Face's `tokenizers`.

    Raises ConfigError where there is none.
    """
    try:
        return tokenizer_from_dict(json.loads(Path(path).read_bytes()))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not JSON, not UTF-8, not a tokenizer
        raise ConfigError(
            Problem(
                what=f"'{path}' is not a tokenizer that can be read: {error}",
                why="without the tokenizer of its training a model's ids have no meaning",
                fix="restore the file from the run that trained the model, or give another run",
            )
        ) from error


def tokenizer_from_dict(fields: object) -> Tokenizer:
    """The tokenizer that `to_dict` described. Raises ValueError on anything else."""
    if isinstance(fields, dict) and "kind" not in fields and "model" in fields:
        return BpeTokenizer.from_dict(fields)
    kind = fields.get("kind") if isinstance(fields, dict) else None
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise ValueError(f"'kind' is {kind!r}, not {' or '.join(map(repr, _CLASSES))}")
    return _CLASSES[kind].from_dict(fields)


def choose_tokenizer(
    name: str,
    bpe_vocab_size: int,
    characters: Callable[[], Iterable[str]],
    sample: Callable[[], Iterable[str]],
) -> Tokenizer:
    """The tokenizer `name`: char, gpt2, bpe, or a file. Raises ConfigError where there is none.

    Args:
        name: ``auto`` is char; a path that ends in ``.tiktoken`` is a file of mergeable ranks, any other a tokenizer.json.
        bpe_vocab_size: of a bpe.
        characters: every character of the corpus, in strings of any length; called for char only.
        sample: texts to train a bpe on; called for bpe only.
    """
    match name:
        case "auto" | "char":
            return CharTokenizer("".join(sorted(set().union(*map(set, characters())))))
        case "gpt2":
            return Gpt2Tokenizer.published()
        case "bpe":
            return BpeTokenizer.train(sample(), bpe_vocab_size)
    return _from_file(name)


def is_tokenizer(name: str, tokenizer: Tokenizer) -> bool:
    """Whether `tokenizer` may be what `name` says, as far as can be told without a corpus. Raises ConfigError."""
    if name == "auto":
        return True
    if name in _NAMED:
        return isinstance(tokenizer, _NAMED[name])
    return _from_file(name).identity == tokenizer.identity


def tokenizer_key(name: str, bpe_vocab_size: int) -> str:
    """What tells one choice of `choose_tokenizer` from another, for the same corpus. Raises ConfigError."""
    if name in ("auto", "char"):
        return "char"
    if name in _NAMED:
        return f"bpe {bpe_vocab_size}" if name == "bpe" else name
    return _from_file(name).identity


def _from_file(name: str) -> Tokenizer:
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(
            Problem(
                what=f"tokenizer {name!r} is neither known nor a file",
                why="a tokenizer is char, gpt2, bpe (trained on the corpus), or the path of a tokenizer.json or *.tiktoken",
                fix=did_you_mean(name, _NAMED) if "/" not in name else "check the path",
            )
        )
    return Gpt2Tokenizer.from_file(path) if path.suffix == ".tiktoken" else load_tokenizer(path)
