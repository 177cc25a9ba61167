"""One token: greedy, temperature, top-k, top-p, repetition penalty, and the distribution."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ds_gpt.config import ConfigError
from ds_gpt.generation.options import Sampling
from ds_gpt.generation.sampling import sample_next

LOGITS = torch.tensor([1.5, -1.0, 0.3, 2.0, 0.0])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sample(
    logits_BV: torch.Tensor, sampling: Sampling, seed: int = 0, seen_BV: torch.Tensor | None = None
) -> torch.Tensor:
    return sample_next(
        logits_BV, sampling, torch.rand(len(logits_BV), generator=seeded(seed), dtype=torch.float64), seen_BV
    )


def assert_drawn_from(logits: torch.Tensor, probs: torch.Tensor, sampling: Sampling) -> None:
    """Pearson's chi-square over the tokens that are possible, below its 99.9th percentile; the others never drawn."""
    draws, possible = 100_000, probs > 0
    observed = torch.bincount(sample(logits.expand(draws, -1), sampling), minlength=len(logits)) / draws
    assert observed[~possible].eq(0).all()
    chi_square = (draws * (observed - probs)[possible].square() / probs[possible]).sum()
    percentile = {2: 10.8, 3: 13.8, 5: 18.5}[int(possible.sum())]
    assert chi_square < percentile


def test_greedy_takes_the_likeliest() -> None:
    logits = torch.tensor([[0.1, 3.0, -2.0], [5.0, 4.9, 4.8]])
    assert sample(logits, Sampling(0)).tolist() == [1, 0]


@pytest.mark.parametrize("sampling", [Sampling(1.7, top_k=1), Sampling(1.7, top_p=1e-9)])
def test_one_token_left_is_greedy(sampling: Sampling) -> None:
    logits = torch.randn(50, 40, generator=seeded())
    assert torch.equal(sample(logits, sampling), logits.argmax(dim=-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_from_the_softmax(temperature: float) -> None:
    assert_drawn_from(LOGITS, (LOGITS / temperature).softmax(0), Sampling(temperature))


def test_the_chi_square_would_notice_a_wrong_temperature() -> None:
    with pytest.raises(AssertionError):
        assert_drawn_from(LOGITS, (LOGITS / 1.05).softmax(0), Sampling(1.0))


def test_top_k_keeps_k_tokens_and_their_proportions() -> None:
    kept = torch.tensor([1.5, -torch.inf, 0.3, 2.0, -torch.inf])
    assert_drawn_from(LOGITS, kept.softmax(0), Sampling(top_k=3))
    assert_drawn_from(LOGITS, LOGITS.softmax(0), Sampling(top_k=1000))


def test_top_p_keeps_the_fewest_tokens_that_have_it() -> None:
    kept = torch.tensor([1.5, -torch.inf, -torch.inf, 2.0, -torch.inf])
    two = LOGITS.softmax(0)[[0, 3]].sum().item()
    assert_drawn_from(LOGITS, kept.softmax(0), Sampling(top_p=two - 1e-4))
    assert_drawn_from(
        LOGITS, torch.tensor([1.5, -torch.inf, 0.3, 2.0, -torch.inf]).softmax(0), Sampling(top_p=two + 1e-4)
    )
    assert_drawn_from(LOGITS, LOGITS.softmax(0), Sampling(top_p=1.0))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7),
        Sampling(1.3, top_k=5),
        Sampling(1.0, top_p=0.8),
        Sampling(0.6, top_k=12, top_p=0.5),
        Sampling(1.5, top_k=7, top_p=0.9, repetition_penalty=1.4),
        Sampling(1.0, repetition_penalty=0.7),
    ],
)
def test_the_distribution_is_that_of_transformers(sampling: Sampling) -> None:
    """Sampled at evenly spaced points of the cumulated distribution, each token comes up as often as it is likely."""
    draws = 20_000
    logits_BV = 2 * torch.randn(1, 30, generator=seeded(5))
    before_BT = torch.randint(30, (1, 9), generator=seeded(6))
    processed_BV = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(before_BT, logits_BV.clone())
    processed_BV = TemperatureLogitsWarper(sampling.temperature)(before_BT, processed_BV)
    if sampling.top_k is not None:
        processed_BV = TopKLogitsWarper(sampling.top_k)(before_BT, processed_BV)
    if sampling.top_p is not None:
        processed_BV = TopPLogitsWarper(sampling.top_p)(before_BT, processed_BV)
    seen_BV = torch.zeros(1, 30, dtype=torch.bool).scatter_(1, before_BT, True)
    uniform_B = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    drawn = sample_next(logits_BV.expand(draws, -1), sampling, uniform_B, seen_BV.expand(draws, -1))
    found = torch.bincount(drawn, minlength=30) / draws
    torch.testing.assert_close(found, processed_BV[0].softmax(dim=-1), rtol=0, atol=1.01 / draws)


def test_a_greedy_choice_is_penalized_too() -> None:
    seen = torch.tensor([[False, False, False, True, False]])
    assert sample(LOGITS[None], Sampling(0, repetition_penalty=1.3), seen_BV=seen).item() == 3
    assert sample(LOGITS[None], Sampling(0, repetition_penalty=1.4), seen_BV=seen).item() == 0


def test_numbers_decide() -> None:
    logits = torch.randn(64, 30, generator=seeded())
    assert torch.equal(sample(logits, Sampling(), 1), sample(logits, Sampling(), 1))
    assert not torch.equal(sample(logits, Sampling(), 1), sample(logits, Sampling(), 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [None, 2])
def test_a_tiny_temperature_is_greedy_not_an_overflow(dtype: torch.dtype, top_k: int | None) -> None:
    logits = torch.tensor([[100.0, -3.0, 101.0]], dtype=dtype)
    for temperature in (1e-37, 1e-46, 1e-320):  # the last two are zero in fp32
        assert sample(logits, Sampling(temperature, top_k)).tolist() == [2]


def test_a_token_of_no_probability_is_never_chosen() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(2, -1)
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    for sampling in (Sampling(), Sampling(top_k=3), Sampling(top_p=0.9)):
        assert sample_next(logits, sampling, ends).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_k": 0}, "top-k 0"),
        ({"top_p": 0.0}, "top-p 0"),
        ({"top_p": 1.1}, "top-p 1.1"),
        ({"repetition_penalty": 0.0}, "repetition penalty 0"),
    ],
)
def test_impossible_options_are_errors(options: dict[str, float], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Sampling(**options)
    with pytest.raises(ConfigError, match=r"1\. temperature [\s\S]*2\. top-k"):
        Sampling(temperature=-1, top_k=-1)
