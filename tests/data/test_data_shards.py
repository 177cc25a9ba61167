"""Shards give back what was written, and damaged or foreign ones are named and refused."""

import os
import time

import numpy as np
import pytest

from ds_gpt.config import ConfigError
from ds_gpt.data.shards import _MAPPED, Shard, writing_shard

IDENTITY = "ab" * 32


def write(path, documents, vocab_size=1000, separator=None, identity=IDENTITY):
    with writing_shard(path, vocab_size, identity, separator) as writer:
        for document in documents:
            writer.add(np.array(document, dtype=np.int64), 3 * len(document))
    return Shard.open(path)


@pytest.mark.parametrize("vocab_size, dtype", [(1000, np.uint16), (1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
@pytest.mark.parametrize("separator", [None, 7])
def test_round_trip(tmp_path, vocab_size, dtype, separator):
    generator = np.random.default_rng(3)
    for number in range(30):
        documents = [generator.integers(0, vocab_size, generator.integers(0, 9)) for _ in range(generator.integers(0, 12))]
        shard = write(tmp_path / f"{number}", documents, vocab_size, separator)
        begun = [[] if separator is None else [separator]] * len(documents)
        expected = [[*start, *document] for start, document in zip(begun, documents, strict=True)]
        assert shard.tokens().dtype == dtype and not shard.tokens().flags.writeable
        ends = shard.document_ends().astype(int).tolist()
        found = [shard.tokens()[first:last].tolist() for first, last in zip([0, *ends], ends, strict=False)]
        assert found == expected and shard.n_tokens == sum(map(len, expected)) and shard.n_documents == len(documents)
        assert shard.n_text_bytes == 3 * sum(map(len, documents))
        shard.verify()
    assert len(list(tmp_path.iterdir())) == 30  # nothing temporary stays


def test_equal_content_gives_equal_bytes_and_other_content_another_digest(tmp_path):
    first, second = (write(tmp_path / name, [[1, 2], [3]]) for name in "ab")
    assert first.path.read_bytes() == second.path.read_bytes() and first.digest == second.digest
    assert write(tmp_path / "c", [[1], [2, 3]]).digest != first.digest  # the same tokens, other documents


def test_a_flipped_bit_of_the_header_is_refused_and_named(tmp_path):
    intact = write(tmp_path / "s.tokens", [[1, 2, 3]]).path.read_bytes()
    for position in range(128):
        damaged = bytearray(intact)
        damaged[position] ^= 4
        (tmp_path / "s.tokens").write_bytes(damaged)
        with pytest.raises(ConfigError, match="s.tokens' is (damaged|not a token shard)"):
            Shard.open(tmp_path / "s.tokens")


@pytest.mark.parametrize(
    "change, wrong",
    [
        (lambda content: content[:-1], "it has 143 bytes, and 144 by its header"),
        (lambda content: content + b"\0", "it has 145 bytes"),
        (lambda content: content[:40], "is damaged"),
        (lambda content: b"", "is not a token shard"),
        (lambda content: b"PK\x03\x04" * 100, "is not a token shard"),
    ],
)
def test_another_length_or_a_foreign_file_is_refused_and_named(tmp_path, change, wrong):
    path = write(tmp_path / "s.tokens", [[1, 2, 3]]).path
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ConfigError, match=f"s.tokens'.*{wrong}"):
        Shard.open(path)


def test_a_missing_shard_and_one_of_another_tokenizer_are_named(tmp_path):
    with pytest.raises(ConfigError, match="none.tokens' cannot be read: No such file"):
        Shard.open(tmp_path / "none.tokens")
    write(tmp_path / "s.tokens", [[1]])
    Shard.open(tmp_path / "s.tokens", IDENTITY)
    with pytest.raises(ConfigError, match="s.tokens' was made by another tokenizer"):
        Shard.open(tmp_path / "s.tokens", "cd" * 32)


def test_a_flipped_bit_of_the_content_is_found_by_verify(tmp_path):
    path = write(tmp_path / "s.tokens", [[1, 2, 3], [4]]).path
    intact = path.read_bytes()
    for position in range(128, len(intact)):
        damaged = bytearray(intact)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        shard = Shard.open(path)  # opening reads the header alone
        with pytest.raises(ConfigError, match="s.tokens' is damaged: its content"):
            shard.verify()


def test_what_fails_leaves_nothing_behind(tmp_path):
    with pytest.raises(RuntimeError), writing_shard(tmp_path / "s.tokens", 10, IDENTITY, None) as writer:
        writer.add(np.array([1]), 1)
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_thousand_shards_open_at_once_and_need_few_file_descriptors(tmp_path):
    for number in range(1000):
        write(tmp_path / f"{number}", [[number]])
    paths = [tmp_path / f"{number}" for number in range(1000)]
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        shards = [Shard.open(path, IDENTITY) for path in paths]
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.5
    before = len(os.listdir("/proc/self/fd"))
    kept = [shard.tokens() for shard in shards]
    assert len(os.listdir("/proc/self/fd")) <= before + 1000
    assert [int(tokens[0]) for tokens in kept] == list(range(1000))
    del kept
    assert len(os.listdir("/proc/self/fd")) <= before + _MAPPED
