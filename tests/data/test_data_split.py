"""Tokens in many arrays are read as one sequence, and mixtures keep what the sampler of one corpus promises."""

import numpy as np
import pytest

from ds_gpt.config import ConfigError
from ds_gpt.data import MixtureSampler, Split, WindowSampler
from ds_gpt.data.sampler import mixture_counts
from ds_gpt.data.shards import Shard, writing_shard
from ds_gpt.data.split import joined


def shards(folder, documents_of_each):
    made = []
    for number, documents in enumerate(documents_of_each):
        with writing_shard(folder / f"{number}.tokens", 5000, "ab" * 32, None) as writer:
            for document in documents:
                writer.add(np.array(document), len(document))
        made.append(Shard.open(folder / f"{number}.tokens"))
    return tuple(made)


@pytest.fixture
def numbered(tmp_path):
    """A split of shards whose tokens are their own places, with documents of all lengths, and the document of each token."""
    generator = np.random.default_rng(5)
    lengths = [generator.integers(0 if shard % 3 else 1, 12, generator.integers(0, 9)).tolist() for shard in range(14)]
    place, documents_of_each, owners = 0, [], []
    for of_shard in lengths:
        documents_of_each.append([])
        for length in of_shard:
            documents_of_each[-1].append(range(place, place + length))
            owners += [len(owners)] * length  # a number that no other document has
            place += length
    return Split((shards(tmp_path, documents_of_each),), (1.0,)), np.array(owners)


def test_windows_are_read_across_shards(numbered):
    split, owners = numbered
    assert len(split) == len(owners) > 200
    for length in (1, 2, 7, 50, len(split)):
        starts = np.arange(len(split) - length + 1)
        assert (split.read(starts, length) == starts[:, None] + np.arange(length)).all()
    assert split.read(np.array([], dtype=np.int64), 5).shape == (0, 5)


def test_documents_are_told_apart_across_shards(numbered):
    split, owners = numbered
    assert split.has_documents
    for length in (1, 2, 7, 50, len(split)):
        starts = np.arange(len(split) - length + 1)
        found = split.documents(starts, length)
        for start, window in zip(starts, found, strict=True):
            expected = np.unique(owners[start : start + length], return_inverse=True)[1]
            assert window.tolist() == expected.tolist()


def test_arrays_and_shards_lie_side_by_side(numbered):
    split, _ = numbered
    both = joined([Split.of(np.arange(30)), split], [1, 2])
    assert both.lengths == (30, len(split)) and len(both) == 30 + len(split) and not both.has_documents
    assert both.read(np.array([28]), 4).tolist() == [[28, 29, 0, 1]]


LENGTHS, WEIGHTS = (700, 95, 3000), (0.5, 0.2, 0.3)


def mixture(batch=12, seed=4, lengths=LENGTHS, weights=WEIGHTS):
    return MixtureSampler(lengths, weights, 7, batch, seed)


def of_corpora(windows, lengths=LENGTHS):
    """Which corpus each window is of, and where in it; no window may cross from one to the next."""
    ends = np.cumsum(lengths)
    corpus = np.searchsorted(ends, windows, side="right")
    assert (windows + 8 <= ends[corpus]).all() and (windows >= 0).all()
    return corpus, windows - (ends - lengths)[corpus]


@pytest.mark.parametrize("weights", [WEIGHTS, (1, 1, 1), (0.117, 0.4, 0.9)])
def test_each_corpus_is_read_as_by_a_sampler_of_its_own(weights):
    """After every block, what was read of a corpus is what its own sampler reads first: none skipped, none twice."""
    sampler = mixture(weights=weights)
    size = int(sampler.block.sum())
    blocks = 1 + 6000 // size
    corpus, place = of_corpora(sampler.starts(np.arange(blocks * size)))
    for number, of_one in enumerate(sampler._corpora):
        found, each = place[corpus == number], int(sampler.block[number])
        assert len(found) == blocks * each > 2 * of_one.windows_per_epoch
        expected = of_one.starts(np.arange(len(found)))
        for block in range(blocks):
            assert sorted(found[block * each : (block + 1) * each]) == sorted(expected[block * each : (block + 1) * each])


def test_every_block_holds_the_exact_shares_in_an_order_of_its_own():
    sampler = mixture(batch=10)
    assert sampler.block.tolist() == [5, 2, 3]
    orders = []
    for step in range(200):
        corpus, _ = of_corpora(sampler.windows(step))
        assert np.bincount(corpus, minlength=3).tolist() == [5, 2, 3]
        orders.append(tuple(corpus))
    assert len(set(orders)) > 150


@pytest.mark.parametrize(
    "weights, block",
    [((1, 1), [1, 1]), ((7, 3), [7, 3]), ((1, 2, 3), [1, 2, 3]), ((0.001, 0.999), None), ((3.14159, 2.71828, 1), None), ((1, 65_000), None)],
)
def test_shares_are_met_to_one_in_a_thousand(weights, block):
    found = mixture(lengths=(100,) * len(weights), weights=weights).block
    assert block is None or found.tolist() == block
    assert found / found.sum() == pytest.approx(np.array(weights) / sum(weights), rel=2e-3) and found.min() >= 1


def test_a_share_that_cannot_be_met_is_refused():
    with pytest.raises(ConfigError, match="a weight of 1 among 1000001"):
        mixture(lengths=(100, 100), weights=(1, 1_000_000))


def test_a_corpus_shorter_than_a_window_is_refused():
    with pytest.raises(ConfigError, match="training split has 7 tokens"):
        mixture(lengths=(100, 7), weights=(1, 1))


def test_a_mixture_is_a_function_of_seed_and_step_alone():
    assert (mixture().windows(10**8) == mixture().windows(10**8)).all()
    assert (mixture().windows(3) != mixture(seed=5).windows(3)).any()
    per_batch = [np.concatenate([mixture(batch).windows(k) for k in range(240 // batch)]) for batch in (1, 6, 24, 240)]
    assert all((sequence == per_batch[0]).all() for sequence in per_batch)
    # Golden: a resumed run must read the same windows under any version of numpy.
    assert mixture(8).windows(0).tolist() == [724, 613, 487, 627, 67, 3555, 3408, 1042]


@pytest.mark.parametrize("ranks, micro", [(1, 4), (2, 3), (3, 4), (12, 1)])
def test_ranks_together_read_the_single_process_batch(ranks, micro):
    for step in (0, 77):
        parts = [mixture().rank_windows(step, rank, ranks, micro) for rank in range(ranks)]
        together = [window for micro_step in zip(*parts, strict=True) for window in np.concatenate(micro_step)]
        assert together == mixture().windows(step).tolist()


def test_one_corpus_is_sampled_as_ever():
    sampler = Split.of(np.arange(5000)).sampler(16, 8, 1)
    assert isinstance(sampler, WindowSampler) and sampler.windows(0).tolist()[:3] == [4456, 552, 2696]


def test_validation_windows_have_the_shares_of_the_mixture():
    split = joined([Split.of(np.arange(n)) for n in LENGTHS], WEIGHTS)
    corpus, _ = of_corpora(split.evaluation_windows(7, 20))
    assert np.bincount(corpus).tolist() == [10, 4, 6]
    corpus, _ = of_corpora(split.evaluation_windows(7, 1))
    assert np.bincount(corpus).tolist() == [1, 1, 1]  # none is left out


def test_counts_in_proportion():
    assert mixture_counts((1, 1, 1), 10).tolist() == [4, 3, 3] and mixture_counts((0.7, 0.3), 1).tolist() == [1, 0]
    assert all(mixture_counts((0.5, 0.3, 0.2), n).sum() == n for n in range(50))
