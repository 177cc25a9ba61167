"""How many bytes of text each token stands for, which makes the losses of different tokenizers comparable."""

from __future__ import annotations

import json
import re

import numpy as np

from ds_gpt.data.byte_pairs import BpeTokenizer, Gpt2Tokenizer
from ds_gpt.data.characters import CharTokenizer
from ds_gpt.data.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # how SentencePiece names a single byte


def token_bytes(tokenizer: Tokenizer) -> np.ndarray | None:
    """UTF-8 bytes of text by token id, [V] int64; special tokens have none. None where the tokens are no text.

    Exact for characters and byte-level pairs. Of other tokenizer.json files, those that write a space as U+2581 and a
    byte as <0xNN> are counted right, but for the space that some put before a text.
    """
    match tokenizer:
        case CharTokenizer():
            return np.array([len(c.encode("utf-8", "surrogatepass")) for c in tokenizer.characters], dtype=np.int64)
        case Gpt2Tokenizer():
            return np.array([*map(len, tokenizer.ranks), 0], dtype=np.int64)
        case BpeTokenizer():
            return _of_definition(tokenizer)
    return None


def _of_definition(tokenizer: BpeTokenizer) -> np.ndarray:
    from tokenizers import Tokenizer as HuggingFace

    definition = json.loads(tokenizer.definition)
    byte_level = '"ByteLevel"' in json.dumps(definition.get("decoder"))  # one character of a token is one byte then
    special = {added["id"] for added in definition.get("added_tokens", ()) if added["special"]}
    sizes = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for token, i in HuggingFace.from_str(tokenizer.definition).get_vocab(with_added_tokens=True).items():
        if i in special:
            continue
        if byte_level:
            sizes[i] = len(token)
        else:
            sizes[i] = 1 if _BYTE.fullmatch(token) else len(token.replace("\u2581", " ").encode())
    return sizes
