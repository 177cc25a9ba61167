"""Any tokenizer as a tokenizer.json of Hugging Face's `tokenizers`, which transformers and its relatives read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_gpt.config import ConfigError, Problem
from ds_gpt.data.byte_pairs import BEGINNINGS, END_OF_TEXT, BpeTokenizer, Gpt2Tokenizer
from ds_gpt.data.characters import CharTokenizer, SyntheticTokenizer
from ds_gpt.data.tokenizer import Tokenizer

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """A tokenizer.json that gives the same ids. Raises ConfigError where the vocabulary is no Unicode."""
    match tokenizer:
        case BpeTokenizer():
            return tokenizer.to_dict()
        case Gpt2Tokenizer():
            letters = byte_letters()
            vocabulary = {"".join(letters[byte] for byte in token): rank for rank, token in enumerate(tokenizer.ranks)}
            merges = [
                ["".join(letters[byte] for byte in part) for part in pair] for pair in merges_of(tokenizer.ranks)
            ]
            model = {"type": "BPE", "vocab": vocabulary, "merges": merges}
            return _definition(model, _BYTE_LEVEL, _BYTE_LEVEL, {END_OF_TEXT: len(tokenizer.ranks)})
        case CharTokenizer():
            _check_characters(tokenizer.characters)
            # \s\S and not a dot, which knows no line end. A character that is not known is an error, here as there.
            pieces = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
            return _definition(_words(tokenizer.characters), pieces, {"type": "Fuse"})
        case SyntheticTokenizer():
            return _definition(_words(list(map(str, range(tokenizer.size)))), {"type": "WhitespaceSplit"}, None)
    raise AssertionError(f"no tokenizer.json is known for a {type(tokenizer).__name__}")


def own_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """The character tokenizer that `tokenizer` was made of by `tokenizer_json`; any other as it is."""
    if not isinstance(tokenizer, BpeTokenizer):
        return tokenizer
    fields = tokenizer.to_dict()
    words = fields["model"].get("vocab") if fields["model"].get("type") == "WordLevel" else None
    characters = "".join(words) if isinstance(words, dict) else ""
    candidate = CharTokenizer("".join(sorted(set(characters))))
    return candidate if characters and tokenizer_json(candidate) == fields else tokenizer


def separator_name(tokenizer: Tokenizer) -> str | None:
    """The special token that lies between documents, by name; None where there is none, or an ordinary one does."""
    if tokenizer.separator is None or not isinstance(tokenizer, (BpeTokenizer, Gpt2Tokenizer)):
        return None
    return tokenizer.decode([tokenizer.separator])


def end_name(tokenizer: Tokenizer) -> str | None:
    """The name of the special token that ends a text: the separator, unless another does and that one begins texts."""
    if separator_name(tokenizer) is None:
        return None
    names = [tokenizer.decode([end]) for end in tokenizer.ends]
    return next((name for name in names if name not in BEGINNINGS), names[0])


def byte_letters() -> list[str]:
    """How GPT-2's vocabulary writes each byte: as itself where it can be seen, else from U+0100 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(256)]


def merges_of(ranks: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The pair that made each token of several bytes, in the order of the ranks: what a tokenizer.json lists.

    A token's pair is what its bytes come to when only earlier merges are applied. Raises ValueError where they come to
    anything but two tokens.
    """
    rank_of = {token: rank for rank, token in enumerate(ranks)}
    pairs = []
    for rank, token in enumerate(ranks):
        if len(token) > 1:
            parts = _merged(token, rank_of, below=rank)
            if len(parts) != 2:
                raise ValueError(f"the token {token!r} is no pair of earlier ones: {parts}")
            pairs.append((parts[0], parts[1]))
    return pairs


def _merged(token: bytes, rank_of: dict[bytes, int], below: int) -> list[bytes]:
    """`token` in the parts that merges of ranks less than `below` leave."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        ranked = [(rank_of.get(a + b, below), i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False))]
        rank, i = min(ranked)
        if rank >= below:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def _words(words: Sequence[str]) -> dict[str, Any]:
    return {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "<unk>"}


def _definition(
    model: dict[str, Any],
    pieces: dict[str, Any],
    decoder: dict[str, Any] | None,
    special: dict[str, int] | None = None,
) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": i, "content": content, **plain} for content, i in (special or {}).items()]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": pieces,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def _check_characters(characters: str) -> None:
    surrogates = [c for c in characters if "\ud800" <= c <= "\udfff"]
    if surrogates:
        raise ConfigError(
            Problem(
                f"the vocabulary has {len(surrogates)} lone surrogates: {', '.join(map(repr, surrogates[:8]))}",
                "a tokenizer.json is UTF-8, which has none",
                "export as safetensors, where the run's own tokenizer is kept",
            )
        )
