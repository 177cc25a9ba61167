"""From a corpus to batches, the same for every world size. Importing this package imports no torch.

- ``corpora``      text by name, file or glob; the synthetic Markov source
- ``tokenizer``    characters to ids and back
- ``tokens``       ``prepare``: the memory-mapped tokens, built once per machine
- ``sampler``      which windows of the tokens a step reads: arithmetic on (seed, step)
- ``permutation``  the O(1)-memory shuffle under the sampler
- ``loader``       windows as torch tensors on a device; import it by name, it is the only module that needs torch
- ``cache``        the cache folder: atomic replacement, one builder at a time
"""

from ds_gpt.data.corpora import KNOWN_CORPORA, synthetic_entropy
from ds_gpt.data.sampler import WindowSampler, evaluation_windows, rank_share
from ds_gpt.data.tokenizer import CharTokenizer, SyntheticTokenizer, Tokenizer, load_tokenizer
from ds_gpt.data.tokens import Dataset, prepare

__all__ = [
    "KNOWN_CORPORA",
    "CharTokenizer",
    "Dataset",
    "SyntheticTokenizer",
    "Tokenizer",
    "WindowSampler",
    "evaluation_windows",
    "load_tokenizer",
    "prepare",
    "rank_share",
    "synthetic_entropy",
]
