"""GPT-2's tokenizer and the trained ones: every text comes back, and the ids are those of an independent implementation."""

import base64
import random
import sys
import unicodedata

import numpy as np
import pytest
import tiktoken._educational
import tokenizers
from pydoc_data.topics import topics
from tiktoken_ext.openai_public import r50k_pat_str

from ds_gpt.config import ConfigError
from ds_gpt.data import byte_pairs, load_tokenizer
from ds_gpt.data.byte_pairs import END_OF_TEXT, BpeTokenizer, Gpt2Tokenizer
from ds_gpt.data.tokenizer_choice import choose_tokenizer, is_tokenizer, tokenizer_key

ENGLISH = [topics[name] for name in sorted(topics)]
VOCABULARY = 400


@pytest.fixture(scope="module")
def educational():
    """A byte-pair encoder in plain Python, by tiktoken's authors, trained on a few words."""
    return tiktoken._educational.SimpleBytePairEncoding.train(ENGLISH[0][:3000], vocab_size=300, pat_str=r50k_pat_str)


@pytest.fixture(scope="module")
def ranks_file(educational, tmp_path_factory):
    """Its ranks in the format in which tiktoken publishes GPT-2's."""
    path = tmp_path_factory.mktemp("ranks") / "small.tiktoken"
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in educational.mergeable_ranks.items())
    path.write_bytes(b"".join(lines))
    return path


@pytest.fixture(scope="module")
def trained():
    return BpeTokenizer.train(ENGLISH[:40], VOCABULARY)


@pytest.fixture(params=["gpt2", "bpe"])
def tokenizer(request, trained, ranks_file):
    return trained if request.param == "bpe" else choose_tokenizer(str(ranks_file), 0, list, list)


def random_text(generator, length):
    """Any characters that have UTF-8, from all planes, with runs of white space among them."""
    points = [generator.choice((0x20, 0x0A, 0x85, 0x3000, generator.randrange(0x80), generator.randrange(0x110000))) for _ in range(length)]
    return "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)


def test_any_text_comes_back(tokenizer):
    generator = random.Random(7)
    texts = ["", " ", "\n\n", "e\u0301", "👩‍👩‍👧", "\x00\ufffe\uffff", *(random_text(generator, n) for n in range(1, 200))]
    for text, ids in zip(texts, tokenizer.encode_documents(texts), strict=True):
        assert tokenizer.decode(ids) == text and (ids == tokenizer.encode(text)).all()
        assert ids.dtype == np.uint16 and (ids < tokenizer.vocab_size).all()


def test_every_assigned_character_comes_back(tokenizer):
    text = "".join(c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) not in ("Cn", "Co", "Cs"))
    assert len(text) > 140_000 and tokenizer.decode(tokenizer.encode(text)) == text


def test_the_ids_are_those_of_plain_python(educational, ranks_file):
    tokenizer = choose_tokenizer(str(ranks_file), 0, list, list)
    assert tokenizer.vocab_size == 301 and tokenizer.separator == 300
    for text in (ENGLISH[0][:2000], "naïve — 漢字 \n\n x  y", ENGLISH[5][:500]):
        assert tokenizer.encode(text).tolist() == educational.encode(text, visualise=None)


def test_the_ids_of_a_trained_one_are_those_of_its_library(trained):
    reference = tokenizers.Tokenizer.from_str(trained.definition)
    for text in ENGLISH[40:60]:
        assert trained.encode(text).tolist() == reference.encode(text).ids
        assert trained.decode(trained.encode(text)) == reference.decode(reference.encode(text).ids)


def test_a_long_text_in_pieces_has_the_ids_of_the_whole(trained, ranks_file, monkeypatch):
    text = "".join(line + end for line in "\n".join(ENGLISH).split("\n")[:300] for end in ("\n", "\n\n", " \n", "\n  ", "\x1c\n"))
    monkeypatch.setattr(byte_pairs, "_PIECE", 40)
    assert len(list(byte_pairs._pieces(text))) > 100
    assert trained.encode(text).tolist() == tokenizers.Tokenizer.from_str(trained.definition).encode(text).ids
    gpt2 = Gpt2Tokenizer.from_file(ranks_file)
    assert gpt2.encode(text).tolist() == gpt2._encoding.encode_ordinary(text)


def test_the_name_of_a_special_token_in_a_text_is_only_words(tokenizer):
    ids = tokenizer.encode(f"a{END_OF_TEXT}b")
    assert tokenizer.separator not in ids and tokenizer.decode(ids) == f"a{END_OF_TEXT}b"
    assert tokenizer.decode([tokenizer.separator]) == END_OF_TEXT


def test_ids_beyond_the_vocabulary_and_broken_characters_print_as_replacements(tokenizer):
    ids = tokenizer.encode("ab").tolist()
    assert tokenizer.decode([*ids, tokenizer.vocab_size, 10**9, *ids, -1]) == "ab\ufffd\ufffdab\ufffd"
    assert tokenizer.decode(tokenizer.encode("漢")[:-1]) == "\ufffd" and tokenizer.decode([]) == ""


def test_lone_surrogates_are_named(tokenizer):
    with pytest.raises(ConfigError, match=r"lone surrogate, '\\ud800', at character 2"):
        tokenizer.encode("ab\ud800")


def test_what_is_saved_is_the_same_tokenizer(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert type(again) is type(tokenizer) and again.identity == tokenizer.identity and again.vocab_size == tokenizer.vocab_size
    text = "".join(ENGLISH[50:55]) + "漢字👩"
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist()


def test_other_tools_read_what_a_trained_one_saves(trained, tmp_path):
    trained.save(tmp_path / "tokenizer.json")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.encode(ENGLISH[3]).ids == trained.encode(ENGLISH[3]).tolist()


def test_training_gives_the_size_that_was_asked_for_and_the_same_tokenizer_each_time(trained):
    assert trained.vocab_size == VOCABULARY and trained.separator is not None
    assert BpeTokenizer.train(ENGLISH[:40], VOCABULARY).identity == trained.identity
    assert BpeTokenizer.train(["ab"], 5000).vocab_size == 257 + 1  # "ab" is all there is to merge
    assert BpeTokenizer.train(ENGLISH, 257).encode("漢").size == 3
    assert BpeTokenizer.train([ENGLISH[0]], 300).identity != BpeTokenizer.train([ENGLISH[1]], 300).identity


def test_a_foreign_tokenizer_json(tmp_path):
    """One that is not byte-level, splits nothing and knows sentence marks, as Llama 2's."""
    foreign = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True))
    foreign.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    foreign.decoder = tokenizers.decoders.Replace("▁", " ")
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    foreign.train_from_iterator(ENGLISH[:5], trainer)
    foreign.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    foreign.enable_truncation(8)
    foreign.save(str(tmp_path / "tokenizer.json"))
    ours = choose_tokenizer(str(tmp_path / "tokenizer.json"), 0, list, list)
    assert ours.separator == 1 and ours.vocab_size == foreign.get_vocab_size()
    ids = ours.encode(ENGLISH[0])
    assert len(ids) > 8 and 1 not in ids and ours.decode(ids) == ENGLISH[0]


def test_gpt2_without_cache_and_network_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(ConfigError) as error:
        choose_tokenizer("gpt2", 0, list, list)
    for part in ("'gpt2' is not in tiktoken's cache and cannot be downloaded", "TIKTOKEN_CACHE_DIR", "r50k_base.tiktoken"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "content, wrong",
    [
        (b"", "256 of the 256 single bytes"),
        (b"x y z\n", "too many values"),
        (b"!!! 0\n", ""),
        (b"".join(base64.b64encode(bytes([i])) + b" %d\n" % (i + 1) for i in range(256)), "not 0, 1, 2"),
        (b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(255)), "1 of the 256"),
    ],
)
def test_a_file_that_holds_no_ranks_is_refused(content, wrong, tmp_path):
    (tmp_path / "x.tiktoken").write_bytes(content)
    with pytest.raises(ConfigError, match=f"x.tiktoken' is not a file of mergeable ranks.*{wrong}"):
        choose_tokenizer(str(tmp_path / "x.tiktoken"), 0, list, list)


def test_names_and_paths(trained, ranks_file, tmp_path):
    with pytest.raises(ConfigError, match="'gtp2' is neither known nor a file(.|\n)*did you mean 'gpt2'"):
        choose_tokenizer("gtp2", 0, list, list)
    with pytest.raises(ConfigError, match="no/such.json' is neither known nor a file"):
        choose_tokenizer("no/such.json", 0, list, list)
    assert is_tokenizer("auto", trained) and is_tokenizer("bpe", trained) and not is_tokenizer("gpt2", trained)
    assert not is_tokenizer(str(ranks_file), trained)
    trained.save(tmp_path / "t.json")
    assert is_tokenizer(str(tmp_path / "t.json"), trained)
    keys = [tokenizer_key(*key) for key in (("auto", 1), ("char", 2), ("bpe", 300), ("bpe", 301), ("gpt2", 1), (str(tmp_path / "t.json"), 1))]
    assert len(set(keys)) == 5 and keys[0] == keys[1] == "char"
