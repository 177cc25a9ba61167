"""Byte-level byte-pair encodings (Sennrich et al. 2016; Radford et al. 2019): GPT-2's, and any of Hugging Face's."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ds_gpt.config import ConfigError, Problem
from ds_gpt.data.tokenizer import REPLACEMENT, Tokenizer, token_dtype

END_OF_TEXT = "<|endoftext|>"  # GPT-2's name for what lies between documents
# Which special token of a foreign tokenizer.json begins a document: the first of these that it has.
BEGINNINGS = ("<|begin_of_text|>", "<bos>", "<s>")
_SEPARATORS = (END_OF_TEXT, *BEGINNINGS, "</s>", "<eos>", "<|end_of_text|>")
_ENDS = ("</s>", "<eos>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>")  # which of its tokens end a text or a turn
_PIECE = 1 << 18  # characters encoded at a time
# A line end between two visible characters: GPT-2's pattern parts the text there in any case.
_SAFE_CUT = re.compile(r"(?<=\S\n)(?=\S)")


@dataclass(frozen=True)
class Gpt2Tokenizer(Tokenizer):
    """GPT-2's tokenizer, or one of its kind, through tiktoken. It carries its ranks: nothing is fetched to use it."""

    ranks: tuple[bytes, ...]  # the bytes of each id, the order in which pairs are merged

    @classmethod
    def published(cls) -> Gpt2Tokenizer:
        """GPT-2's own, from tiktoken's cache or the network. Raises ConfigError where neither has it."""
        import tiktoken

        try:
            encoding = tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as error:  # requests' errors are OSErrors; ValueError: a checksum is wrong
            raise ConfigError(
                Problem(
                    what=f"the tokenizer 'gpt2' is not in tiktoken's cache and cannot be downloaded: {error}",
                    why="tiktoken fetches its two files once, checks them and keeps them in TIKTOKEN_CACHE_DIR",
                    fix="set TIKTOKEN_CACHE_DIR to the cache of a machine that has them, or give the tokenizer as the "
                    "path of r50k_base.tiktoken (the same ranks) or of GPT-2's tokenizer.json",
                )
            ) from error
        return cls(tuple(encoding.token_byte_values()[: encoding.eot_token]))

    @classmethod
    def from_file(cls, path: Path) -> Gpt2Tokenizer:
        """From a file of mergeable ranks as tiktoken publishes them: base64 and rank, a line each. Raises ConfigError."""
        try:
            pairs = [line.split() for line in path.read_bytes().splitlines() if line]
            rank_of = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
            ranks = tuple(sorted(rank_of, key=rank_of.__getitem__))
            if [rank_of[token] for token in ranks] != list(range(len(ranks))):
                raise ValueError("the ranks are not 0, 1, 2, ...")
            _check_bytes(ranks)
        except (OSError, ValueError) as error:
            raise ConfigError(
                Problem(
                    what=f"'{path}' is not a file of mergeable ranks: {error}",
                    why="a tokenizer that ends in .tiktoken is read as tiktoken publishes them: base64 and rank, a line each",
                    fix="give r50k_base.tiktoken (GPT-2's), or a tokenizer.json",
                )
            ) from error
        return cls(ranks)

    @property
    def vocab_size(self) -> int:
        """Number of distinct ids (V): the ranks and end of text."""
        return len(self.ranks) + 1

    @property
    def separator(self) -> int | None:
        """End of text, the last id."""
        return len(self.ranks)

    @cached_property
    def _encoding(self):  # noqa: ANN202  tiktoken is imported where it is used
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str

        ranks = {token: rank for rank, token in enumerate(self.ranks)}
        return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(ranks)})

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, [N] uint16 or uint32; the words `<|endoftext|>` in a text are only words. Raises ConfigError."""
        pieces = [self._encoding.encode_to_numpy(piece, disallowed_special=()) for piece in _pieces(_unicode(text))]
        return _joined(pieces, self.vocab_size)

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """The text of `ids`. An id outside the vocabulary, and bytes that are no UTF-8, print as U+FFFD."""
        named = {len(self.ranks): END_OF_TEXT.encode()}
        unknown = REPLACEMENT.encode()
        known = (
            self.ranks[i] if 0 <= i < len(self.ranks) else named.get(i, unknown) for i in np.asarray(ids, dtype=np.int64).ravel().tolist()
        )
        return b"".join(known).decode("utf-8", "replace")

    def to_dict(self) -> dict[str, object]:
        """What `save` writes."""
        return {"kind": "gpt2", "ranks": [base64.b64encode(token).decode("ascii") for token in self.ranks]}

    @classmethod
    def from_dict(cls, fields: dict[str, object]) -> Gpt2Tokenizer:
        """The inverse of `to_dict`. Raises ValueError on anything else."""
        ranks = fields.get("ranks")
        if not isinstance(ranks, list) or not all(isinstance(token, str) for token in ranks):
            raise ValueError("'ranks' is not a list of base64")
        tokens = tuple(base64.b64decode(token, validate=True) for token in ranks)
        _check_bytes(tokens)
        return cls(tokens)


@dataclass(frozen=True)
class BpeTokenizer(Tokenizer):
    """A tokenizer of Hugging Face's `tokenizers`: `save` writes the tokenizer.json that other tools read."""

    definition: str  # content of a tokenizer.json

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
        """A byte-level BPE of `vocab_size` ids, fewer where the texts have no more pairs to merge. Encodes any Unicode."""
        from tokenizers import Tokenizer as HuggingFace
        from tokenizers import decoders, models, pre_tokenizers, trainers

        tokenizer = HuggingFace(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator((piece for text in texts for piece in _pieces(_unicode(text))), trainer)
        return cls(tokenizer.to_str())

    @classmethod
    def from_dict(cls, fields: dict[str, object]) -> BpeTokenizer:
        """From the content of a tokenizer.json. Raises ValueError on anything else."""
        from tokenizers import Tokenizer as HuggingFace

        definition = json.dumps(fields)
        try:
            vocabulary = HuggingFace.from_str(definition).get_vocab(with_added_tokens=True)
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"not a tokenizer.json of Hugging Face: {error}") from error
        if not vocabulary:
            raise ValueError("a tokenizer.json without a single token")
        return cls(definition)

    @cached_property
    def _tokenizer(self):  # noqa: ANN202  tokenizers is imported where it is used
        from tokenizers import Tokenizer as HuggingFace

        tokenizer = HuggingFace.from_str(self.definition)
        tokenizer.encode_special_tokens = True  # a special token's name in a text is only words
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id (V)."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def separator(self) -> int | None:
        """Its token for the start or the end of a text, under one of the usual names; else None."""
        ids = (self._tokenizer.token_to_id(name) for name in _SEPARATORS)
        return next((i for i in ids if i is not None), None)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The separator, and its tokens for the end of a text or a turn, under any of the usual names."""
        ids = (self._tokenizer.token_to_id(name) for name in _ENDS)
        return tuple(dict.fromkeys(i for i in (self.separator, *ids) if i is not None))

    @cached_property
    def _may_be_cut(self) -> bool:
        """Whether a long text may be encoded in pieces: where the pattern is GPT-2's and nothing looks at the whole."""
        fields = json.loads(self.definition)
        splits = fields.get("pre_tokenizer") or {}
        plain = splits.get("type") == "ByteLevel" and splits.get("use_regex", True) and not splits.get("add_prefix_space")
        return bool(plain) and fields.get("normalizer") is None

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, [N] uint16 or uint32; the name of a special token in a text is only words. Raises ConfigError."""
        return self.encode_documents([text])[0]

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text."""
        pieces = [list(_pieces(_unicode(text))) if self._may_be_cut else [_unicode(text)] for text in texts]
        try:
            flat = [piece for of_text in pieces for piece in of_text]
            encoded = iter(self._tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        except Exception as error:  # the library raises bare ones, where a vocabulary of words has none for the unknown
            raise ConfigError(
                Problem(
                    f"the tokenizer.json has no ids for some of the text: {error}",
                    "its vocabulary is closed",
                    "remove what it does not know, or take another model",
                )
            ) from error
        return [_joined([np.array(next(encoded).ids, dtype=np.uint32) for _ in of_text], self.vocab_size) for of_text in pieces]

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """The text of `ids`. An id outside the vocabulary, and bytes that are no UTF-8, print as U+FFFD."""
        ids = np.asarray(ids, dtype=np.int64).ravel()
        unknown = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        known = np.split(ids, unknown)
        runs = [known[0], *(run[1:] for run in known[1:])]
        return REPLACEMENT.join(self._tokenizer.decode(run.tolist(), skip_special_tokens=False) for run in runs)

    def to_dict(self) -> dict[str, object]:
        """What `save` writes: the tokenizer.json."""
        return json.loads(self.definition)


def _check_bytes(ranks: Sequence[bytes]) -> None:
    missing = 256 - len({token for token in ranks if len(token) == 1})
    if missing:
        raise ValueError(f"{missing} of the 256 single bytes are missing, without which not every text has ids")
    if len(set(ranks)) != len(ranks):
        raise ValueError("a token stands there twice")


def _pieces(text: str) -> Iterator[str]:
    """`text` in pieces of some `_PIECE` characters whose tokens, one after the other, are those of the whole."""
    start = 0
    while len(text) - start > _PIECE and (cut := _SAFE_CUT.search(text, start + _PIECE)) is not None:
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _joined(pieces: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    return np.concatenate(pieces).astype(token_dtype(vocab_size))


def _unicode(text: str) -> str:
    """`text`, if it has UTF-8: lone surrogates, which Python allows, are no characters. Raises ConfigError."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            Problem(
                what=f"the text has a lone surrogate, {text[error.start]!r}, at character {error.start}",
                why="it is half a character and has no UTF-8, of whose bytes these tokens are made",
                fix="replace or remove it",
            )
        ) from None
    return text
