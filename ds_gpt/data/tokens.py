"""The tokens of a corpus: built once per machine, then memory-mapped by every rank."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ds_gpt.config.run import DataConfig
from ds_gpt.data.cache import cache_root, exclusive, replacing, writing_to
from ds_gpt.data.corpora import identify, read_text, synthetic_tokens
from ds_gpt.data.tokenizer import CharTokenizer, SyntheticTokenizer, Tokenizer, token_dtype, tokenizer_from_dict

_FORMAT = 1  # raise when the same corpus would give other tokens, or other files


@dataclass(frozen=True)
class Dataset:
    """A tokenized corpus, split in two at one position: what is validated on was never trained on."""

    tokens: np.ndarray  # [N] uint16 or uint32, a read-only memory map
    tokenizer: Tokenizer
    digest: str  # sha256 (hex) of the tokens and the tokenizer: equal digests are equal data
    val_fraction: float

    @property
    def split(self) -> int:
        """Number of training tokens."""
        return int(len(self.tokens) * (1 - self.val_fraction))

    @property
    def train(self) -> np.ndarray:
        """The first tokens, a view."""
        return self.tokens[: self.split]

    @property
    def val(self) -> np.ndarray:
        """The last tokens, a view."""
        return self.tokens[self.split :]


def prepare(data: DataConfig, seed: int) -> Dataset:
    """The tokens that `data` describes, from the cache folder, where the first caller puts them.

    Needs no process group: all ranks may call at once. One builds, the others wait for the kernel's lock and then
    read. `seed` matters to the synthetic corpus only. Raises ConfigError for a corpus or cache folder that fails.
    """
    root = cache_root(data.cache_dir)
    path = root / "tokens" / _file_name(data, seed)
    # The usual case, and the one that works in a read-only cache folder.
    if (dataset := _read(path, data.val_fraction)) is not None:
        return dataset
    with writing_to(root):
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(path.with_suffix(".lock")):
            if (dataset := _read(path, data.val_fraction)) is not None:
                return dataset
            _build(path, data, seed)
    dataset = _read(path, data.val_fraction)
    assert dataset is not None, f"'{path}' was written a moment ago and cannot be read"
    return dataset


def _file_name(data: DataConfig, seed: int) -> str:
    """A name that changes whenever the tokens may: with the corpus, the tokenizer or the format."""
    key = {"format": _FORMAT, "tokenizer": data.tokenizer, "corpus": identify(data, seed)}
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
        tokenizer = CharTokenizer.from_text(text)
        tokens = tokenizer.encode(text)
    # Ordinary writes: on a full disk they raise an error, where writing through a memory map kills the process.
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.save(file, tokens, allow_pickle=False)
    description = {"digest": _digest(tokens, tokenizer), "tokenizer": tokenizer.to_dict()}
    with replacing(path.with_suffix(".json")) as temporary:
        temporary.write_text(json.dumps(description) + "\n", encoding="ascii")


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
    return Dataset(tokens, tokenizer, digest, val_fraction)


def _digest(tokens: np.ndarray, tokenizer: Tokenizer) -> str:
    content = hashlib.sha256(tokenizer.identity.encode())
    content.update(memoryview(tokens))
    return content.hexdigest()
