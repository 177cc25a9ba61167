"""Batches as tensors: the right tokens, in any order of steps."""

import threading

import numpy as np
import pytest
import torch

from ds_gpt.config import ConfigError
from ds_gpt.data import Split, WindowSampler
from ds_gpt.data.loader import BatchLoader, window_batch

ARRAY = np.arange(1000, dtype=np.uint16)  # each token is its own position
TOKENS = Split.of(ARRAY)
SAMPLER = WindowSampler(len(TOKENS), context=7, global_batch_size=12, seed=3)


@pytest.fixture
def make_loader():
    loaders = []

    def make(rank=0, ranks=1, micro_batch_size=3, tokens=TOKENS, sampler=SAMPLER):
        loaders.append(BatchLoader(tokens, sampler, rank, ranks, micro_batch_size, "cpu"))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


def starts(batches):
    return [inputs_BT[:, 0].tolist() for inputs_BT, _ in batches]


def test_targets_are_the_inputs_one_token_on(make_loader):
    for inputs_BT, targets_BT in make_loader().load(5):
        assert inputs_BT.shape == targets_BT.shape == (3, 7)
        assert inputs_BT.dtype == targets_BT.dtype == torch.int64
        assert inputs_BT.is_contiguous() and targets_BT.is_contiguous()
        assert torch.equal(inputs_BT + 1, targets_BT) and torch.equal(inputs_BT, inputs_BT[:, :1] + torch.arange(7))


@pytest.mark.parametrize("micro_batch_size, ranks", [(1, 1), (3, 2), (6, 2), (1, 12), (4, 3)])
def test_each_rank_loads_its_windows(make_loader, micro_batch_size, ranks):
    for rank in range(ranks):
        loader = make_loader(rank, ranks, micro_batch_size)
        for step in (0, 1):
            expected = SAMPLER.rank_windows(step, rank, ranks, micro_batch_size)
            assert starts(loader.load(step)) == [window.tolist() for window in expected]


def test_steps_may_come_in_any_order(make_loader):
    loader = make_loader()
    for step in (0, 1, 2, 50, 51, 1, 1, 0, 10**9, 2):
        assert starts(loader.load(step)) == [w.tolist() for w in SAMPLER.rank_windows(step, 0, 1, 3)]


def watch(monkeypatch, before):
    """Call before(step) whenever windows are asked for."""
    rank_windows = WindowSampler.rank_windows
    monkeypatch.setattr(
        WindowSampler, "rank_windows", lambda self, step, *share: before(step) or rank_windows(self, step, *share)
    )


def test_the_next_step_is_prepared_in_the_background(make_loader, monkeypatch):
    asked, next_asked = [], threading.Event()

    def before(step):
        asked.append((step, threading.current_thread() is threading.main_thread()))
        if step == 8:
            next_asked.set()

    watch(monkeypatch, before)
    loader = make_loader()
    loader.load(7)
    assert next_asked.wait(timeout=10)  # nobody has called load(8) yet
    loader.load(8)
    assert asked[:2] == [(7, False), (8, False)]
    assert [step for step, _ in asked].count(8) == 1


def test_a_failure_in_the_background_surfaces_at_its_step_and_may_be_retried(make_loader, monkeypatch):
    broken = [3]

    def before(step):
        if step in broken:
            broken.remove(step)
            raise RuntimeError("disk on fire")

    watch(monkeypatch, before)
    loader = make_loader()
    loader.load(2)
    with pytest.raises(RuntimeError, match="disk on fire"):
        loader.load(3)
    assert starts(loader.load(3)) == [w.tolist() for w in SAMPLER.rank_windows(3, 0, 1, 3)]


def test_a_batch_that_does_not_divide_is_a_config_error(make_loader):
    with pytest.raises(ConfigError, match="5 x 1 = 5"):
        make_loader(micro_batch_size=5).load(0)


def test_a_closed_loader_says_so(make_loader):
    loader = make_loader()
    loader.load(0)
    loader.close()
    loader.close()
    with pytest.raises(RuntimeError):
        loader.load(1)


def test_a_memory_map_is_read(make_loader, tmp_path):
    np.save(tmp_path / "t.npy", ARRAY)
    tokens = Split.of(np.load(tmp_path / "t.npy", mmap_mode="r"))
    assert starts(make_loader(tokens=tokens).load(4)) == starts(make_loader().load(4))


@pytest.mark.parametrize("offsets", [[10, -1, 993 - 1], [-1], [0]])
def test_padding_is_ignored(offsets):
    inputs_BT, targets_BT = window_batch(TOKENS, np.array(offsets), context=7, ignore_index=-100)
    assert inputs_BT.shape == targets_BT.shape == (len(offsets), 7) and inputs_BT.dtype == torch.int64
    for offset, inputs_T, targets_T in zip(offsets, inputs_BT.tolist(), targets_BT.tolist(), strict=True):
        if offset == -1:
            assert inputs_T == [0] * 7 and targets_T == [-100] * 7
        else:
            assert inputs_T == list(range(offset, offset + 7)) and targets_T == list(range(offset + 1, offset + 8))
