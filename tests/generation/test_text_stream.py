"""Text that appears piece by piece is the text that decoding all tokens at once gives."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from ds_gpt.data import CharTokenizer, SyntheticTokenizer
from ds_gpt.data.byte_pairs import BpeTokenizer
from ds_gpt.generation.text import TextStream


class Bytes:
    """A tokenizer with a token for each byte, as byte-level ones have for what they have no longer token for."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


def pieces(tokenizer, prompt: Sequence[int], tokens: Sequence[int], stop: Sequence[str] = ()) -> list[str]:
    stream, found = TextStream(tokenizer, prompt, stop), []
    for token in tokens:
        found.append(stream.push(token))
        if stream.stopped:
            break
    found.append(stream.flush())
    assert stream.text == "".join(found)
    return found


def test_no_piece_ends_within_a_character() -> None:
    text = "aé€🙂z"
    found = pieces(Bytes(), Bytes().encode("🙂"), Bytes().encode(text))
    assert found == ["a", "", "é", "", "", "€", "", "", "", "🙂", "z", ""]


def test_bytes_that_are_no_character_are_replaced_and_hold_nothing_up() -> None:
    """A lone continuation byte, a beginning that breaks off, and one that never ends."""
    found = pieces(Bytes(), [], [0x41, 0x80, 0x42, 0xE2, 0x82, 0x43, 0xF0])
    assert "".join(found) == "A\ufffdB\ufffdC\ufffd"
    assert found[2] == "\ufffdB" and found[5] == "\ufffdC" and found[-1] == "\ufffd"


def byte_fallback() -> BpeTokenizer:
    """As Llama 2's: what is not in the vocabulary is written in bytes; a run that is no text is replaced whole."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581a1b"]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    decoders = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    vocabulary = {word: i for i, word in enumerate(words)}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True, "unk_token": "<unk>"}
    fields = {"version": "1.0", "added_tokens": [], "normalizer": spaces, "model": model}
    return BpeTokenizer.from_dict({**fields, "decoder": {"type": "Sequence", "decoders": decoders}})


def test_characters_in_bytes_are_whole_whatever_surrounds_them() -> None:
    tokenizer = byte_fallback()
    for text in ("b€ a", "文字🙂🙂 b", "🙂"):
        found = pieces(tokenizer, tokenizer.encode("a"), tokenizer.encode(text))
        assert "".join(found) == text and not any("\ufffd" in piece for piece in found)


TOKENIZERS = {
    "bytes": Bytes(),
    "char": CharTokenizer("".join(map(chr, range(40, 296)))),
    "synthetic": SyntheticTokenizer(256),
    "bpe": BpeTokenizer.train(["a naïve café, 3 € a cup 🙂 " * 20], 300),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_add_up_to_what_is_decoded_at_once(name: str) -> None:
    """For any tokens, also those that are no text; the pieces have no half characters where the whole has none."""
    tokenizer, chance = TOKENIZERS[name], random.Random(4)
    for _ in range(200):
        prompt = list(tokenizer.encode("12"))
        tokens = [chance.randrange(tokenizer.vocab_size) for _ in range(chance.randrange(30))]
        if name in ("bytes", "bpe") and chance.random() < 0.5:
            tokens = list(tokenizer.encode("".join(chance.choice("aé€🙂 ñ文") for _ in range(12))))
        whole, found = tokenizer.decode([*prompt, *tokens]), pieces(tokenizer, prompt, tokens)
        assert "".join(found) == whole[len(tokenizer.decode(prompt)) :]
        assert "\ufffd" in whole or not any("\ufffd" in piece for piece in found)


def test_what_a_token_prints_may_depend_on_the_one_before() -> None:
    assert pieces(SyntheticTokenizer(50), [7], [8, 19]) == [" 8", " 19", ""]


@pytest.mark.parametrize(
    ("stop", "found"),
    [
        (["cde"], ["a", "b", "", "", "", ""]),  # held back until it is whole
        (["cdx"], ["a", "b", "", "", "cde", "f", ""]),  # released once it is something else
        (["efg"], ["a", "b", "c", "d", "", "", "ef"]),  # never whole
        (["d", "bcx"], ["a", "", "", "bc", ""]),
        (["a"], ["", ""]),
        (["zz", "f"], ["a", "b", "c", "d", "e", "", ""]),
    ],
)
def test_stop_strings_end_the_text_across_tokens(stop: list[str], found: list[str]) -> None:
    assert pieces(CharTokenizer("abcdef"), [0], range(6), stop) == found


def test_a_stop_string_is_found_wherever_tokens_divide_it() -> None:
    class Words:
        """Tokens of several characters."""

        words = ("He", "llo\n\nW", "orld", "\n", "\nEnd", "aa", "aab")

        def decode(self, ids: Sequence[int]) -> str:
            return "".join(self.words[number] for number in ids)

    assert "".join(pieces(Words(), [], [0, 1, 2], ["\n\n"])) == "Hello"
    assert "".join(pieces(Words(), [], [0, 3, 4, 2], ["\n\n"])) == "He"
    assert "".join(pieces(Words(), [], [5, 6, 2], ["aaab"])) == "a"  # the first a is not part of it
    assert "".join(pieces(Words(), [3], [4, 2], ["\n\n"])) == "\nEndorld"  # what the prompt begins does not count


def test_a_stop_string_of_many_bytes_is_found() -> None:
    assert "".join(pieces(Bytes(), [], Bytes().encode("ab🙂cd"), ["🙂"])) == "ab"


def test_long_texts_are_decoded_piece_by_piece() -> None:
    """Not all of it again for each token."""

    class Counting(Bytes):
        decoded = 0

        def decode(self, ids: Sequence[int]) -> str:
            self.decoded += len(ids)
            return super().decode(ids)

    tokenizer = Counting()
    pieces(tokenizer, [65] * 1000, Bytes().encode("é" * 1000))
    assert tokenizer.decoded < 5 * 3000
