"""Counter-based random numbers and a shuffle that needs no memory: both pure functions, so nothing has to be saved.

numpy's generators are not used here: their streams may change between numpy versions, and a resumed run must read
what the interrupted one would have read.
"""

from __future__ import annotations

from math import isqrt

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 8


def random_bits(key: int | np.ndarray, *counters: int | np.ndarray) -> np.ndarray:
    """64 random-looking bits (uint64) for each (key, counters...), broadcast together.

    With one key and one counter this is SplitMix64 (Steele, Lea and Flood, 2014), jumped to any position.
    """
    if isinstance(key, int):
        key = np.array([key & _MASK], dtype=np.uint64)  # an array, since only numpy's scalars warn when they wrap
    for counter in counters:
        counter = np.atleast_1d(np.asarray(counter)).astype(np.uint64)
        key = _mix(key + (counter + np.uint64(1)) * _GOLDEN)
    return key


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Where each `index` of range(size) goes under the permutation that its `key` names, [N] int64.

    `index` is [N] int64, `key` is [N] uint64: elements may belong to different permutations. O(N) time and memory.
    """
    assert size > 0 and index.shape == key.shape
    result = _feistel(index.astype(np.uint64), size, key)
    # The network permutes a range a little longer than `size`. Who lands beyond walks on along their cycle, which
    # must come back, since it started inside.
    while (beyond := result >= size).any():
        result[beyond] = _feistel(result[beyond], size, key[beyond])
    return result.astype(np.int64)


def _feistel(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """A Feistel network over rows x columns >= size: each half is shifted by a keyed function of the other.

    Modular addition in place of the usual XOR frees the sizes from powers of two, so that the range overshoots
    `size` by less than one row (Black and Rogaway, 2002, after Feistel).
    """
    columns = isqrt(size - 1) + 1
    rows = -(-size // columns)
    row, column = np.divmod(index, np.uint64(columns))
    for round_number in range(0, _ROUNDS, 2):
        row = (row + random_bits(key, (round_number << 40) + column) % np.uint64(rows)) % np.uint64(rows)
        column = (column + random_bits(key, (round_number + 1 << 40) + row) % np.uint64(columns)) % np.uint64(columns)
    return row * np.uint64(columns) + column


def _mix(bits: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64: a bijection of 64 bits that spreads every input bit over all output bits."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
