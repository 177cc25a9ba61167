"""Corpora by name, file and glob, and the entropy of the synthetic one."""

import os
from math import log
from pathlib import Path

import numpy as np
import pytest

from ds_gpt.config import ConfigError
from ds_gpt.config.run import DataConfig, SyntheticConfig
from ds_gpt.data import corpora, synthetic_entropy

SHAKESPEARE = Path(__file__).resolve().parents[3] / "shared" / "data" / "tinyshakespeare.txt"
needs_shakespeare = pytest.mark.skipif(not SHAKESPEARE.exists(), reason=f"{SHAKESPEARE} is not there")


def read(corpus, cache_dir="/nonexistent"):
    return corpora.read_text(DataConfig(corpus=str(corpus), cache_dir=str(cache_dir)))


def test_python_docs_is_english_and_deterministic():
    text = read("python_docs")
    assert len(text) > 300_000 and "statement" in text
    assert text == read("python_docs")


def test_python_source_is_the_standard_library():
    text = read("python_source")
    assert len(text) > 1_000_000 and Path(os.__file__).read_text(encoding="utf-8") in text
    assert "def namedtuple(" not in text  # collections is a package: top-level modules only
    assert corpora.identify(DataConfig(corpus="python_source"), 0) == corpora.identify(
        DataConfig(corpus="python_source"), 1
    )


def test_source_in_a_declared_encoding_is_decoded_and_a_broken_one_skipped():
    assert corpora._decode_source("# coding: latin-1\r\n# é".encode("latin-1")) == "# coding: latin-1\r\n# é"
    assert corpora._decode_source(b"# \xff") is None
    assert corpora._decode_source(b"# coding: nonsense\n") is None


def test_a_file_is_read_as_it_is(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\r\ntwo\rthree\n\U0001f600".encode())
    assert read(tmp_path / "a.txt") == "one\r\ntwo\rthree\n\U0001f600"


def test_a_glob_is_sorted_and_skips_folders(tmp_path):
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "folder.txt" / "deep.txt").write_text("deep")
    assert read(tmp_path / "*.txt") == "a.txt\nb.txt"
    assert read(tmp_path / "**" / "*.txt") == "a.txt\nb.txt\ndeep"
    (tmp_path / "odd[1].txt").write_text("an existing name is no pattern")
    assert read(tmp_path / "odd[1].txt") == "an existing name is no pattern"


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("at home")
    assert read("~/a.txt") == read("~/*.txt") == "at home"


def test_what_cannot_be_read_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    for corpus, parts in {
        "missing/file.txt": ["'missing/file.txt' does not exist", str(tmp_path)],
        "tinyshakespear": ["neither a known corpus nor a file", "did you mean 'tinyshakespeare'?"],
        "zzz": ["known: python_docs, python_source, synthetic, tinyshakespeare"],
        "": ["data.corpus = ''"],
        "nul\0": ["neither a known corpus"],
        "*.pdf": ["'*.pdf' matches no file"],
        ".": ["'.' is not a file", "./*.txt"],
        "empty.txt": ["'empty.txt' is empty"],
        "empt*.txt": ["is empty"],
        "latin.txt": ["not UTF-8: byte 0xe9 at offset 3", "iconv"],
        "/proc/self/mem": ["cannot be read: Input/output error"],  # unreadable even for root
    }.items():
        with pytest.raises(ConfigError) as error:
            read(corpus)
        for part in [*parts, "data.corpus", "why:", "do:"]:
            assert part in str(error.value), (corpus, part, str(error.value))


@needs_shakespeare
def test_tinyshakespeare_is_downloaded_once_and_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "_TINYSHAKESPEARE_URL", SHAKESPEARE.as_uri())
    assert read("tinyshakespeare", tmp_path).startswith("First Citizen:\n")
    cached = tmp_path / "corpora" / "tinyshakespeare.txt"
    assert [*cached.parent.iterdir()] == [cached]
    monkeypatch.setattr(corpora, "_TINYSHAKESPEARE_URL", "http://127.0.0.1:1/closed")
    assert len(read("tinyshakespeare", tmp_path)) == 1_115_394
    cached.write_bytes(cached.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="tinyshakespeare.txt' is not tinyshakespeare: its sha256(?s:.*)delete it"):
        read("tinyshakespeare", tmp_path)


def test_no_network_says_where_to_put_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "_TINYSHAKESPEARE_URL", "http://127.0.0.1:1/closed")
    with pytest.raises(ConfigError, match=f"cannot be downloaded(?s:.*)put the file at '{tmp_path}/corpora/tiny"):
        read("tinyshakespeare", tmp_path)


def test_a_wrong_download_is_refused_and_not_kept(tmp_path, monkeypatch):
    (tmp_path / "login.html").write_text("please log in to the network")
    monkeypatch.setattr(corpora, "_TINYSHAKESPEARE_URL", (tmp_path / "login.html").as_uri())
    with pytest.raises(ConfigError, match="login.html' is not tinyshakespeare"):
        read("tinyshakespeare", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "vocab_size, branching",
    [(64, 4), (64, 1), (30, 1), (30, 3), (97, 2), (100, 100), (6, 5), (2, 1), (2, 2), (1, 1), (1000, 7)],
)
def test_the_synthetic_entropy_is_what_it_is_said_to_be(vocab_size, branching):
    config = SyntheticConfig(vocab_size=vocab_size, branching=branching, tokens=2_000_000)
    tokens = corpora.synthetic_tokens(config, seed=1).astype(np.int64)
    assert tokens.shape == (2_000_000,) and tokens.min() >= 0 and tokens.max() < vocab_size
    pairs = np.bincount(tokens[:-1] * vocab_size + tokens[1:], minlength=vocab_size**2).reshape(vocab_size, -1)
    assert ((pairs > 0).sum(axis=1) == branching).all() and ((pairs > 0).sum(axis=0) == branching).all()
    joint = pairs / pairs.sum()
    unigram = joint.sum(axis=1)
    conditional = joint[joint > 0] @ np.log((joint / unigram[:, None])[joint > 0])
    # The estimate falls short by about (free parameters) / (2 x samples), at most 100 x 99 / 4e6 = 0.0025 nats.
    assert -conditional == pytest.approx(log(branching), abs=0.003)
    assert -unigram @ np.log(unigram) == pytest.approx(log(vocab_size), abs=0.001)
    assert synthetic_entropy(config) == log(branching)


def test_synthetic_choices_do_not_depend_on_the_past():
    config = SyntheticConfig(vocab_size=64, branching=4, tokens=1_500_000)
    tokens = corpora.synthetic_tokens(config, seed=3).astype(np.int64)
    choice = (tokens[1:] - corpora._multiplier(64) * tokens[:-1] - 1) % 64  # across the chunk boundary, too
    assert set(np.unique(choice)) == {0, 1, 2, 3}
    triples = np.bincount(16 * choice[:-2] + 4 * choice[1:-1] + choice[2:], minlength=64)
    expected = triples.sum() / 64
    assert ((triples - expected) ** 2 / expected).sum() < 120  # chi-square, 63 degrees of freedom: p = 2e-5


def test_synthetic_depends_on_the_seed_and_its_start_on_nothing_else():
    config = SyntheticConfig(tokens=1000)
    first = corpora.synthetic_tokens(config, seed=1)
    assert (first == corpora.synthetic_tokens(SyntheticConfig(tokens=2_000_000), seed=1)[:1000]).all()
    assert (first != corpora.synthetic_tokens(config, seed=2)).any()
    # Golden: a resumed run must read the same tokens under any version of numpy.
    assert first[:8].tolist() == [15, 42, 60, 29, 41, 18, 38, 25]


def test_more_branches_than_tokens_are_refused():
    with pytest.raises(ConfigError, match="branching = 9 is more than data.synthetic.vocab_size = 8"):
        corpora.synthetic_tokens(SyntheticConfig(vocab_size=8, branching=9), seed=0)
