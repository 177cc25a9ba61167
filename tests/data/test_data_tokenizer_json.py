"""Every tokenizer as other tools read it: the same ids, the same text, and the bytes that each token stands for."""

import base64
import json
import random

import pytest
import tiktoken._educational
from pydoc_data.topics import topics
from tiktoken_ext.openai_public import r50k_pat_str

from ds_gpt.config import ConfigError
from ds_gpt.data import CharTokenizer, SyntheticTokenizer, load_tokenizer
from ds_gpt.data.byte_pairs import END_OF_TEXT, BpeTokenizer, Gpt2Tokenizer
from ds_gpt.data.text_bytes import token_bytes
from ds_gpt.data.tokenizer_json import merges_of, own_tokenizer, separator_name, tokenizer_json

transformers = pytest.importorskip("transformers")

ENGLISH = [topics[name] for name in sorted(topics)]
TEXTS = ["", " ", "\n\n", ENGLISH[3][:3000], "naïve — 漢字 \n\n x  y", "e\u0301\x00👩‍👩‍👧"]


def gpt2() -> Gpt2Tokenizer:
    educational = tiktoken._educational.SimpleBytePairEncoding.train(
        ENGLISH[0][:3000], vocab_size=300, pat_str=r50k_pat_str
    )
    ranks = educational.mergeable_ranks
    return Gpt2Tokenizer(tuple(sorted(ranks, key=ranks.__getitem__)))


MAKE = {
    "char": lambda: CharTokenizer.from_text("".join(TEXTS)),
    "gpt2": gpt2,
    "bpe": lambda: BpeTokenizer.train(ENGLISH[:40], 400),
}


@pytest.fixture(scope="module", params=MAKE)
def tokenizer(request):
    return MAKE[request.param]()


def saved(tokenizer, folder):
    """A folder as an export leaves it."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(tokenizer)))
    name = separator_name(tokenizer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "eos_token": name}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_transformers_gives_the_same_ids_and_text(tokenizer, tmp_path):
    theirs = transformers.AutoTokenizer.from_pretrained(saved(tokenizer, tmp_path))
    assert len(theirs) == tokenizer.vocab_size
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert theirs.encode(text) == ids and theirs.decode(ids) == text
    if not isinstance(tokenizer, CharTokenizer):
        generator = random.Random(3)
        for _ in range(50):
            text = "".join(
                chr(generator.choice((0x20, 0x0A, generator.randrange(0xD800), generator.randrange(0xE000, 0x110000))))
                for _ in range(40)
            )
            assert theirs.encode(text) == tokenizer.encode(text).tolist()
        assert theirs.eos_token == END_OF_TEXT and theirs.eos_token_id == tokenizer.separator


def test_an_unknown_character_is_an_error_there_as_here(tmp_path):
    tokenizer = CharTokenizer("ab")
    with pytest.raises(Exception, match="UNK"):
        transformers.AutoTokenizer.from_pretrained(saved(tokenizer, tmp_path)).encode("abc")
    definition = load_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match="no ids for some of the text"):
        definition.encode("abc")


def test_numbers_stay_numbers(tmp_path):
    theirs = transformers.AutoTokenizer.from_pretrained(saved(SyntheticTokenizer(30), tmp_path))
    assert theirs.encode("0 29 7") == [0, 29, 7] and theirs.decode([0, 29, 7]) == "0 29 7"


def test_a_character_tokenizer_is_known_again(tmp_path):
    tokenizer = MAKE["char"]()
    assert own_tokenizer(load_tokenizer(saved(tokenizer, tmp_path) / "tokenizer.json")).identity == tokenizer.identity
    trained = MAKE["bpe"]()
    assert own_tokenizer(trained) is trained


def test_what_no_utf8_can_say_is_refused():
    with pytest.raises(ConfigError, match="lone surrogates"):
        tokenizer_json(CharTokenizer("a\ud800"))


def test_merges_are_the_pairs_that_were_merged():
    ranks = [bytes([byte]) for byte in range(256)] + [b"ab", b"abc", b"bc", b"abcabc"]
    assert merges_of(ranks) == [(b"a", b"b"), (b"ab", b"c"), (b"b", b"c"), (b"abc", b"abc")]
    with pytest.raises(ValueError, match="no pair of earlier ones"):
        merges_of([*ranks, b"xyz"])


def test_the_bytes_of_the_tokens_are_those_of_the_text(tokenizer):
    sizes = token_bytes(tokenizer)
    assert sizes.shape == (tokenizer.vocab_size,)
    for text in TEXTS:
        assert sizes[tokenizer.encode(text)].sum() == len(text.encode())
    if separator_name(tokenizer) is not None:
        assert sizes[tokenizer.separator] == 0
    assert token_bytes(SyntheticTokenizer(3)) is None


def test_the_bytes_of_sentencepiece_tokens():
    """A definition in Llama 2's style: spaces as U+2581, bytes that are in no piece as <0xNN>."""
    vocabulary = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "é", "\u2581a"]
    fields = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": 1, "content": "<s>", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}],
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never", "split": False},
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(vocabulary)}, "merges": [["\u2581", "a"]], "byte_fallback": True, "unk_token": "<unk>"},
    }  # fmt: skip
    tokenizer = BpeTokenizer.from_dict(fields)
    text = "a aé a漢"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and token_bytes(tokenizer)[ids].sum() == len(text.encode())
    assert token_bytes(tokenizer)[1] == 0


def test_ranks_in_the_published_format_are_the_same_tokenizer(tmp_path):
    tokenizer = gpt2()
    path = tmp_path / "ranks.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokenizer.ranks)))
    assert tokenizer_json(Gpt2Tokenizer.from_file(path)) == tokenizer_json(tokenizer)
