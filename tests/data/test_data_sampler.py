"""Every window once, in an order that no world size changes."""

import time

import numpy as np
import pytest

from ds_gpt.config import ConfigError
from ds_gpt.data import WindowSampler, evaluation_windows, rank_share
from ds_gpt.data.permutation import permute, random_bits

SIZES = [1, 2, 3, 4, 5, 6, 7, 9, 10, 16, 17, 100, 101, 1000, 4096, 65537]


def order(size, key):
    return permute(np.arange(size), size, np.full(size, random_bits(7, key)[0]))


@pytest.mark.parametrize("size", SIZES)
def test_the_permutation_is_one(size):
    for key in range(5):
        assert (np.sort(order(size, key)) == np.arange(size)).all()


def test_the_permutation_reaches_large_sizes():
    size = 10**13 + 7
    index = np.arange(size - 1000, size)
    result = permute(index, size, np.full(1000, random_bits(0, 0)[0]))
    assert len(set(result.tolist())) == 1000 and result.min() >= 0 and result.max() < size
    assert result.max() - result.min() > size // 2


@pytest.mark.parametrize("size", [2, 3, 5, 10, 13])
def test_over_the_epochs_every_window_comes_at_every_place_equally_often(size):
    epochs = 4000
    keys = np.repeat(random_bits(1, np.arange(epochs)), size)
    results = permute(np.tile(np.arange(size), epochs), size, keys).reshape(epochs, size)
    counts = np.stack([np.bincount(results[:, place], minlength=size) for place in range(size)])
    expected = epochs / size
    # Six standard deviations of a binomial count.
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected * (1 - 1 / size)) + 1


def test_neighbours_are_scattered():
    shuffled = order(10_000, 3)
    assert abs(np.corrcoef(shuffled[:-1], shuffled[1:])[0, 1]) < 0.05
    assert (np.diff(shuffled) == 1).mean() < 0.002
    assert (order(10_000, 3) == order(10_000, 4)).sum() < 10


def test_random_bits_is_splitmix64():
    # The first outputs of the reference implementation for seed 1234567 (prng.di.unimi.it/splitmix64.c).
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert random_bits(1234567, np.arange(4)).tolist() == expected


CASES = [(1000, 8, 10), (1000, 7, 3), (33, 8, 50), (9, 8, 4), (17, 8, 5), (100, 1, 7), (26, 5, 1)]


@pytest.mark.parametrize("n_tokens, context, batch", CASES)
def test_each_epoch_visits_every_window_once(n_tokens, context, batch):
    sampler = WindowSampler(n_tokens, context, batch, seed=5)
    per_epoch = sampler.windows_per_epoch
    assert per_epoch >= max(1, (n_tokens - 1) // context - 1)
    epochs = 12
    starts = np.concatenate([sampler.windows(step) for step in range(-(-per_epoch * epochs // batch))])
    assert starts.dtype == np.int64
    offsets, orders = set(), set()
    for epoch in starts[: per_epoch * epochs].reshape(epochs, per_epoch):
        visited = np.sort(epoch)
        assert (np.diff(visited) == context).all()  # each once, no target twice
        assert visited[0] >= 0 and visited[-1] + context + 1 <= n_tokens
        offsets.add(int(visited[0]))
        orders.add(tuple(epoch - visited[0]))
    assert offsets <= set(range(2 * context))
    assert len(offsets) > 1 or context == 1 or n_tokens == context + 1  # the boundaries move
    assert len(orders) > 1 or per_epoch == 1


def test_every_token_is_reached_and_every_offset_used():
    sampler = WindowSampler(50, 8, 1, seed=0)
    assert {int(sampler.windows(step)[0]) % 8 for step in range(200)} == set(range(8))
    targets = {int(s) + i for step in range(200) for s in sampler.windows(step) for i in range(1, 9)}
    assert targets == set(range(1, 50))


def test_a_step_is_a_function_of_the_seed_and_the_step():
    first, second = WindowSampler(5000, 16, 8, seed=1), WindowSampler(5000, 16, 8, seed=1)
    late = first.windows(10**9)
    for step in (3, 0, 10**9):
        assert (first.windows(step) == second.windows(step)).all()
    assert (late == first.windows(10**9)).all()
    assert (first.windows(0) != WindowSampler(5000, 16, 8, seed=2).windows(0)).any()
    assert (first.windows(0) != WindowSampler(5000, 16, 8, seed=1 + 2**70).windows(0)).sum() == 0  # the low 64 bits
    # Golden: a resumed run must read the same windows under any version of numpy.
    assert first.windows(0).tolist() == [4456, 552, 2696, 3960, 4792, 4552, 648, 4280]


def test_the_batch_size_only_cuts_one_sequence():
    per_batch = [WindowSampler(999, 10, batch, seed=4) for batch in (1, 6, 60, 300)]
    sequences = [np.concatenate([s.windows(k) for k in range(300 // s.global_batch_size)]) for s in per_batch]
    assert all((sequence == sequences[0]).all() for sequence in sequences)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12, 24])
@pytest.mark.parametrize("micro", [1, 2, 4, 8])
def test_ranks_and_micro_steps_together_read_the_single_process_batch(ranks, micro):
    sampler = WindowSampler(1234, 7, 48, seed=9)
    if 48 % (ranks * micro):
        with pytest.raises(ConfigError, match=f"{micro} x {ranks} = {micro * ranks}"):
            sampler.rank_windows(0, 0, ranks, micro)
        return
    for step in (0, 3, 1000):
        parts = [sampler.rank_windows(step, rank, ranks, micro) for rank in range(ranks)]
        assert all(len(part) == 48 // (ranks * micro) and part[0].shape == (micro,) for part in parts)
        together = [window for micro_step in zip(*parts, strict=True) for window in np.concatenate(micro_step)]
        assert together == sampler.windows(step).tolist()


def test_a_step_of_a_huge_text_costs_no_more():
    def seconds(n_tokens):
        sampler = WindowSampler(n_tokens, 1024, 512, seed=0)
        sampler.windows(0)
        started = time.perf_counter()
        for step in range(20):
            sampler.windows(step * 12345)
        return (time.perf_counter() - started) / 20

    assert seconds(10**12) < 0.05 and seconds(10**6) < 0.05  # about 0.5 ms; far below any training step


def test_a_text_shorter_than_a_window_is_refused():
    assert WindowSampler(9, 8, 2, seed=0).windows(0).tolist() == [0, 0]
    with pytest.raises(ConfigError, match="training split has 8 tokens, fewer than model.context \\+ 1 = 9"):
        WindowSampler(8, 8, 2, seed=0)
    with pytest.raises(ConfigError, match="validation split has 8 tokens, fewer than model.context \\+ 1 = 9"):
        evaluation_windows(8, 8, 2)


@pytest.mark.parametrize("n_tokens, context, sequences", [(9, 8, 5), (17, 8, 5), (1000, 8, 1), (1000, 8, 7)])
def test_evaluation_windows_are_even_and_do_not_overlap(n_tokens, context, sequences):
    offsets = evaluation_windows(n_tokens, context, sequences)
    assert len(offsets) == min(sequences, (n_tokens - 1) // context)
    assert offsets[0] == 0 and (len(offsets) == 1 or offsets[-1] == n_tokens - 1 - context)
    gaps = np.diff(offsets)
    assert (gaps >= context).all() and (not gaps.size or gaps.max() - gaps.min() <= 1)


def test_evaluation_windows_never_overlap_for_any_length():
    for n_tokens in range(6, 200):
        offsets = evaluation_windows(n_tokens, 5, 10**6)
        assert len(offsets) == (n_tokens - 1) // 5 and (np.diff(offsets) >= 5).all()
        assert offsets[-1] + 6 <= n_tokens


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_rank_shares_are_equally_long_and_complete(ranks):
    offsets = np.arange(10, 17)
    shares = [rank_share(offsets, rank, ranks) for rank in range(ranks)]
    assert {len(share) for share in shares} == {-(-7 // ranks)}
    together = np.concatenate(shares)
    assert sorted(together[together >= 0]) == offsets.tolist() and (together == -1).sum() == -7 % ranks
