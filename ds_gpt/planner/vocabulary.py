"""How many tokens a run will have, where only its tokenizer knows and the corpus is not to be read for a plan."""

from __future__ import annotations

from dataclasses import replace

from ds_gpt.config import Composed
from ds_gpt.config.parse import with_vocabulary
from ds_gpt.config.run import DataConfig

_GPT2 = 50_257  # tokens of GPT-2 (Radford et al. 2019)
_CHARACTERS = 100  # of a text in one language, its digits and punctuation: tinyshakespeare has 65


def settled(composed: Composed) -> Composed:
    """The run with a vocabulary, and a note where it was taken from something else than the run config.

    Raises:
        ConfigError: the tokenizer is a file that cannot be read.
    """
    if composed.run.model.vocab_size != "auto":
        return composed
    size, source = _vocabulary(composed.run.data)
    note = f"vocabulary: {size:,}, {source} (--set model.vocab_size=N if you know better)"
    return replace(composed, run=with_vocabulary(composed.run, size), notes=(*composed.notes, note))


def _vocabulary(data: DataConfig) -> tuple[int, str]:
    if any(part.corpus == "synthetic" for part in data.parts):
        return data.synthetic.vocab_size, "data.synthetic.vocab_size"
    match data.tokenizer:
        case "auto" | "char":
            return _CHARACTERS, "assumed for a tokenizer of characters"
        case "gpt2":
            return _GPT2, "GPT-2's"
        case "bpe":
            return data.bpe_vocab_size, "data.bpe_vocab_size"
    from ds_gpt.data.tokenizer_choice import load_tokenizer  # loads numpy, which no other plan needs

    return load_tokenizer(data.tokenizer).vocab_size, f"that of '{data.tokenizer}'"
