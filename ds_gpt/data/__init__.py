"""From a corpus to batches, the same for every world size. Importing this package imports no torch.

- ``tokens``           ``prepare``: what a run trains and validates on, from all that follows
- ``corpora``          text by name, file or glob; the synthetic Markov source
- ``preparation``      ``ds-gpt prepare``: sources to token shards, by many ``workers``, each piece once
- ``documents``        what lies in text, JSONL, Parquet and data sets of Hugging Face
- ``shards``           the files of tokens, memory-mapped and checked; ``prepared``: a folder of them
- ``tokenizer``        what every tokenizer is; ``tokenizer_choice``: which one; ``characters``, ``byte_pairs``: the tokenizers
- ``split``            tokens in many arrays and of several corpora, read as one sequence
- ``stages``           ``prepare_stage``: the data of a run, whatever its stage
- ``examples``         conversations, answers and pairs of answers out of ``records``, by a ``chat`` template, as ``rows``
- ``corruption``       windows with masked tokens or corrupted spans
- ``sampler``          which windows of the tokens a step reads: arithmetic on (seed, step)
- ``permutation``      the O(1)-memory shuffle under the sampler
- ``loader``           windows as torch tensors on a device; import it by name, it is the only module that needs torch
- ``cache``            the cache folder: atomic replacement, one builder at a time
"""

from ds_gpt.data.characters import CharTokenizer, SyntheticTokenizer
from ds_gpt.data.corpora import KNOWN_CORPORA, synthetic_entropy
from ds_gpt.data.sampler import MixtureSampler, WindowSampler, evaluation_windows, rank_share
from ds_gpt.data.split import Split
from ds_gpt.data.tokenizer import Tokenizer
from ds_gpt.data.tokenizer_choice import load_tokenizer
from ds_gpt.data.tokens import Dataset, prepare

__all__ = [
    "KNOWN_CORPORA",
    "CharTokenizer",
    "Dataset",
    "MixtureSampler",
    "Split",
    "SyntheticTokenizer",
    "Tokenizer",
    "WindowSampler",
    "evaluation_windows",
    "load_tokenizer",
    "prepare",
    "rank_share",
    "synthetic_entropy",
]
