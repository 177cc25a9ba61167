"""Characters to ids and back."""

import json

import numpy as np
import pytest

from ds_gpt.config import ConfigError
from ds_gpt.data import CharTokenizer, SyntheticTokenizer, load_tokenizer

TEXTS = [
    "hello\r\nworld\t\x00",
    "naïve — “quoted” Ж 漢字",
    "astral \U0001f600\U0010ffff plane",
    "lone \ud800 and \udc00 surrogates, and a pair \ud83d\ude00 that is two characters",
    "\ufeffwith a byte order mark",
]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_in_memory_and_through_the_file(text, tmp_path):
    tokenizer = CharTokenizer.from_text(text)
    assert tokenizer.vocab_size == len(set(text))
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16 and ids.shape == (len(text),)
    assert tokenizer.decode(ids) == text and tokenizer.decode(ids.tolist()) == text
    tokenizer.save(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path / "tokenizer.json") == tokenizer
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_ids_follow_the_code_points():
    assert CharTokenizer.from_text("banana").encode("abn").tolist() == [0, 1, 2]
    assert CharTokenizer.from_text("ab").encode("").shape == (0,)


def test_a_text_longer_than_one_chunk_and_a_vocabulary_beyond_16_bits():
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x14000)]))
    tokenizer = CharTokenizer.from_text(text)
    assert tokenizer.vocab_size > 1 << 16 and tokenizer.encode(text).dtype == np.uint32
    assert tokenizer.decode(tokenizer.encode(text * 20)) == text * 20


def test_unknown_characters_are_named_and_counted():
    tokenizer = CharTokenizer.from_text("abc")
    with pytest.raises(ConfigError) as error:
        tokenizer.encode("abc" * 400_000 + "zéz\ud800\U0001f600")
    message = str(error.value)
    for part in ("4 distinct", "'z' (U+007A) x 2", "'é' (U+00E9) x 1", r"'\ud800' (U+D800)", "U+1F600", "do:"):
        assert part in message
    message.encode("utf-8")  # can be printed, lone surrogates or not
    with pytest.raises(ConfigError, match="20 distinct.* and 12 more"):
        tokenizer.encode("ABCDEFGHIJKLMNOPQRST")
    with pytest.raises(ConfigError, match="U\\+0001"):  # below the first known character, too
        tokenizer.encode("\x01")


def test_ids_beyond_the_vocabulary_print_as_the_replacement_character():
    assert CharTokenizer.from_text("ab").decode([0, 2, 1, -1, 10**9]) == "a\ufffdb\ufffd\ufffd"
    assert CharTokenizer.from_text("ab").decode([]) == ""


def test_synthetic_ids_are_the_tokens(tmp_path):
    tokenizer = SyntheticTokenizer(100_000)
    assert tokenizer.decode(np.array([3, 99_999])) == "3 99999"
    assert tokenizer.encode(" 3\n99999 ").tolist() == [3, 99_999]
    assert tokenizer.encode("\n").size == 0
    tokenizer.save(tmp_path / "t.json")
    assert load_tokenizer(tmp_path / "t.json") == tokenizer
    for bad in ("x", "-1", "100000", "1.5", "²"):
        with pytest.raises(ConfigError, match="0 to 99999"):
            tokenizer.encode(bad)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b"{}", b'{"kind": "bpe"}', b'{"kind": []}', b'{"kind": "char"}']
    + [json.dumps({"kind": "char", "characters": c}).encode() for c in (["b", "a"], ["a", "a"], ["ab"], "ab", [1])]
    + [json.dumps({"kind": "synthetic", "vocab_size": v}).encode() for v in (0, True, "3", None)],
)
def test_a_file_that_is_no_tokenizer_is_refused(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="tokenizer.json' is not a tokenizer"):
        load_tokenizer(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_tokenizer(tmp_path / "none.json")


def test_the_identity_depends_on_what_decides_the_ids():
    identities = {CharTokenizer("ab").identity, CharTokenizer("ac").identity, SyntheticTokenizer(2).identity}
    assert len(identities) == 3 and CharTokenizer.from_text("ba").identity in identities
