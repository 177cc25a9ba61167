"""Where text comes from: a known name, a file, or a glob. And the synthetic corpus, which is tokens from the start."""

from __future__ import annotations

import glob
import hashlib
import io
import os
import platform
import sysconfig
import tokenize
import urllib.request
from http.client import HTTPException
from math import gcd, log
from pathlib import Path

import numpy as np

from ds_gpt.config import ConfigError, Problem
from ds_gpt.config.errors import did_you_mean
from ds_gpt.config.run import DataConfig, SyntheticConfig
from ds_gpt.data.cache import cache_root, writing_to
from ds_gpt.data.characters import BETWEEN_DOCUMENTS
from ds_gpt.data.permutation import random_bits
from ds_gpt.data.replacing import replacing
from ds_gpt.data.tokenizer import token_dtype

KNOWN_CORPORA = ("python_docs", "python_source", "synthetic", "tinyshakespeare")

_TINYSHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
_TINYSHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
_DOWNLOAD_TIMEOUT_S = 10
_CHUNK = 1 << 20  # synthetic tokens made at a time
_START, _CHOICE = 2, 3  # streams of random numbers for one seed; the sampler's are 0 and 1


def identify(data: DataConfig, seed: int) -> dict[str, object]:
    """What decides the content of `data.corpus`, without reading it. Raises ConfigError where it does not exist."""
    match data.corpus:
        case "synthetic":
            _check_branching(data.synthetic)
            return {"name": "synthetic", "seed": seed, **data.synthetic.model_dump()}
        case "tinyshakespeare":
            return {"name": "tinyshakespeare", "sha256": _TINYSHAKESPEARE_SHA256}
        case "python_docs":
            return {"name": "python_docs", "python": platform.python_version()}
    files = [os.path.realpath(path) for path in _files(data.corpus)]
    stats = [os.stat(path) for path in files]
    return {"files": [[path, stat.st_size, stat.st_mtime_ns] for path, stat in zip(files, stats, strict=True)]}


def read_text(data: DataConfig) -> str:
    """The text of `data.corpus`, line ends untouched, a line feed between documents. Raises ConfigError.

    Downloads `tinyshakespeare` where it is not in the cache folder yet.
    """
    match data.corpus:
        case "tinyshakespeare":
            text = _read_tinyshakespeare(cache_root(data.cache_dir) / "corpora" / "tinyshakespeare.txt")
        case "python_docs":
            text = _read_python_docs()
        case "python_source":
            sources = (_decode_source(_read_bytes(path, data.corpus)) for path in _files(data.corpus))
            text = BETWEEN_DOCUMENTS.join(source for source in sources if source is not None)
        case _:
            documents = (_decode_utf8(_read_bytes(path, data.corpus), path) for path in _files(data.corpus))
            text = BETWEEN_DOCUMENTS.join(documents)
    if not text or text.isspace():
        raise ConfigError(
            Problem(
                what=f"data.corpus = {data.corpus!r} is empty",
                why="there is nothing to train on",
                fix="give a text file that has text in it",
            )
        )
    return text


def synthetic_entropy(config: SyntheticConfig) -> float:
    """Entropy of the synthetic corpus in nats per token: the loss that no model can beat, and a good one reaches."""
    return log(config.branching)


def synthetic_tokens(config: SyntheticConfig, seed: int) -> np.ndarray:
    """The synthetic corpus, [config.tokens], uint16 or uint32. Raises ConfigError where branching > vocab_size.

    A Markov chain on 0..V-1: next = multiplier * current + 1 + u mod V, u uniform on 0..branching-1. So each token
    has exactly `branching` equally likely successors: the entropy is ln(branching). The multiplier is coprime to V,
    so each token has exactly `branching` predecessors too, and in the long run all V are equally likely: whoever
    counts tokens only sees ln(V). (The chain cannot split or cycle: y and y + 1 always share a predecessor. Without
    a choice, branching = 1, the multiplier is 1 and the chain counts through all V.)
    """
    _check_branching(config)
    size, length = config.vocab_size, config.tokens
    multiplier = _multiplier(size) if config.branching > 1 else 1 % size
    # x[i] = m^i * (x[0] + sum over j <= i of m^-j * (1 + u[j])) mod V: sums and products in place of a Python loop.
    powers = _powers(multiplier, size, min(length, _CHUNK))
    inverse_powers = _powers(pow(multiplier, -1, size), size, min(length, _CHUNK))
    tokens = np.empty(length, dtype=token_dtype(size))
    current = int(random_bits(seed, _START)[0]) % size
    for start in range(0, length, _CHUNK):
        positions = np.arange(start, min(start + _CHUNK, length))
        choice = (random_bits(seed, _CHOICE, positions) % np.uint64(config.branching)).astype(np.int64)
        terms = inverse_powers[: positions.size] * (1 + choice) % size
        chunk = powers[: positions.size] * ((current + np.cumsum(terms)) % size) % size
        tokens[start : start + _CHUNK] = chunk
        current = int(chunk[-1])
    return tokens


def _powers(base: int, modulus: int, count: int) -> np.ndarray:
    """base^1 .. base^count modulo `modulus`, [count] int64, by doubling."""
    powers = np.array([base % modulus], dtype=np.int64)
    while powers.size < count:
        powers = np.concatenate([powers, powers * powers[-1] % modulus])
    return powers[:count]


def _multiplier(size: int) -> int:
    """A number coprime to `size` near its golden section, so that neighbours get distant successors."""
    candidate = round(0.618 * size)
    while gcd(candidate, size) != 1:
        candidate += 1
    return candidate % size


def _check_branching(config: SyntheticConfig) -> None:
    if config.branching > config.vocab_size:
        raise ConfigError(
            Problem(
                what=f"data.synthetic.branching = {config.branching} is more than "
                f"data.synthetic.vocab_size = {config.vocab_size}",
                why="each token has `branching` different successors among the vocab_size tokens",
                fix=f"set data.synthetic.branching to at most {config.vocab_size}",
            )
        )


def _files(corpus: str) -> list[str]:
    """The files that a corpus is read from, sorted. Raises ConfigError where there are none."""
    if corpus == "python_source":
        return sorted(glob.glob(os.path.join(glob.escape(sysconfig.get_path("stdlib")), "*.py")))
    path = os.path.expanduser(corpus)
    if os.path.isfile(path):
        return [path]
    if os.path.exists(path):
        what, fix = "is not a file", f"for the files of a folder write a glob: '{corpus.rstrip('/')}/*.txt'; it is not one that ds-gpt prepare made"
    elif any(character in corpus for character in "*?["):
        files = sorted(match for match in glob.glob(path, recursive=True) if os.path.isfile(match))
        if files:
            return files
        what, fix = "matches no file", f"check the pattern; relative ones start at '{os.getcwd()}'"
    elif os.sep in corpus:
        what, fix = "does not exist", f"check the path; relative ones start at '{os.getcwd()}'"
    else:
        what = f"is neither a known corpus nor a file in '{os.getcwd()}'"
        fix = did_you_mean(corpus, KNOWN_CORPORA)
    raise ConfigError(
        Problem(
            what=f"data.corpus = {corpus!r} {what}",
            why="a corpus is a known name, a text file, a glob of text files, or a folder that ds-gpt prepare made",
            fix=fix,
        )
    )


def _read_bytes(path: str, corpus: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            Problem(
                what=f"data.corpus = {corpus!r}: '{path}' cannot be read: {error.strerror}",
                why="the tokens are made from it",
                fix="make it readable for this user, or give another corpus",
            )
        ) from error


def _decode_utf8(content: bytes, path: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            Problem(
                what=f"data.corpus: '{path}' is not UTF-8: byte {content[error.start]:#04x} at offset {error.start}",
                why="the tokens are the characters of the text, so its encoding must be known",
                fix="convert it, for example: iconv -f LATIN1 -t UTF-8 OLD > NEW",
            )
        ) from error


def _decode_source(content: bytes) -> str | None:
    """Python source by its own declared encoding; None where that fails (the library keeps a few broken files)."""
    # Not tokenize.open, which also translates line ends.
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError):
        return None


def _read_python_docs() -> str:
    """The language reference that `help()` prints: English text that comes with every CPython."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError(
            Problem(
                what="data.corpus = 'python_docs' is missing from this Python",
                why=f"it is the module pydoc_data.topics of the standard library ({error})",
                fix="give another data.corpus, for example the path of a text file",
            )
        ) from error
    return BETWEEN_DOCUMENTS.join(topics[name] for name in sorted(topics))


def _read_tinyshakespeare(cached: Path) -> str:
    """The text at `cached`, downloaded to there first if need be. Raises ConfigError unless it is the right one."""
    if not cached.exists():
        content = _download_tinyshakespeare(cached)
        _check_tinyshakespeare(content, _TINYSHAKESPEARE_URL, fix=f"fetch it some other way and put it at '{cached}'")
        with writing_to(cached.parent):
            cached.parent.mkdir(parents=True, exist_ok=True)
            with replacing(cached) as temporary:
                temporary.write_bytes(content)
    content = _read_bytes(str(cached), "tinyshakespeare")
    _check_tinyshakespeare(content, str(cached), fix="delete it, so that it is downloaded again")
    return content.decode("utf-8")


def _download_tinyshakespeare(cached: Path) -> bytes:
    try:
        with urllib.request.urlopen(_TINYSHAKESPEARE_URL, timeout=_DOWNLOAD_TIMEOUT_S) as response:
            return response.read()
    except (OSError, HTTPException) as error:  # URLError and timeouts are OSErrors, a broken answer is not
        raise ConfigError(
            Problem(
                what=f"data.corpus = 'tinyshakespeare' cannot be downloaded from {_TINYSHAKESPEARE_URL}: {error}",
                why="it is fetched once and then read from the cache folder, where it is not yet",
                fix=f"put the file at '{cached}', or give data.corpus as the path of a text file",
            )
        ) from error


def _check_tinyshakespeare(content: bytes, source: str, fix: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != _TINYSHAKESPEARE_SHA256:
        raise ConfigError(
            Problem(
                what=f"'{source}' is not tinyshakespeare: its sha256 is {found}, not {_TINYSHAKESPEARE_SHA256}",
                why="losses on another text cannot be compared with published ones",
                fix=fix,
            )
        )
