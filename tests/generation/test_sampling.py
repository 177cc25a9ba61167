"""One token: greedy, top-k, temperature, seeds, and the distribution."""

import pytest
import torch

from ds_gpt.generation.sampling import sample_next


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def frequencies(logits: torch.Tensor, draws: int, **options) -> torch.Tensor:
    tokens = sample_next(logits.expand(draws, -1), generator=seeded(), **options)
    return torch.bincount(tokens, minlength=len(logits)) / draws


def assert_drawn_from(logits: torch.Tensor, probs: torch.Tensor, **options) -> None:
    """Pearson's chi-square over the tokens that are possible, below its 99.9th percentile; the others never drawn."""
    draws, possible = 100_000, probs > 0
    observed = frequencies(logits, draws, **options)
    assert observed[~possible].eq(0).all()
    chi_square = (draws * (observed - probs)[possible].square() / probs[possible]).sum()
    percentile = {3: 13.8, 5: 18.5}[int(possible.sum())]
    assert chi_square < percentile


LOGITS = torch.tensor([1.5, -1.0, 0.3, 2.0, 0.0])


def test_greedy_takes_the_likeliest():
    logits = torch.tensor([[0.1, 3.0, -2.0], [5.0, 4.9, 4.8]])
    assert sample_next(logits, temperature=0).tolist() == [1, 0]


def test_top_1_is_greedy():
    logits = torch.randn(50, 40, generator=seeded())
    assert torch.equal(sample_next(logits, 1.7, top_k=1), sample_next(logits, 0))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_from_the_softmax(temperature):
    assert_drawn_from(LOGITS, (LOGITS / temperature).softmax(0), temperature=temperature)


def test_the_chi_square_would_notice_a_wrong_temperature():
    with pytest.raises(AssertionError):
        assert_drawn_from(LOGITS, (LOGITS / 1.05).softmax(0), temperature=1.0)


def test_top_k_keeps_k_tokens_and_their_proportions():
    kept = torch.tensor([1.5, -torch.inf, 0.3, 2.0, -torch.inf])
    assert_drawn_from(LOGITS, kept.softmax(0), top_k=3)


def test_top_k_beyond_the_vocabulary_keeps_all():
    assert_drawn_from(LOGITS, LOGITS.softmax(0), top_k=1000)


def test_seeds_reproduce():
    logits = torch.randn(64, 30, generator=seeded())
    first, again, other = (sample_next(logits, generator=seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tiny_temperature_is_greedy_not_an_overflow(dtype):
    logits = torch.tensor([[100.0, -3.0, 101.0]], dtype=dtype)
    assert sample_next(logits, temperature=1e-37, generator=seeded()).tolist() == [2]


@pytest.mark.parametrize("options, name", [({"temperature": -0.1}, "temperature"), ({"top_k": 0}, "top_k")])
def test_impossible_options_are_errors(options, name):
    with pytest.raises(ValueError, match=name):
        sample_next(LOGITS[None], **options)
