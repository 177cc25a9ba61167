"""Decoding where a CPU cannot show it: the cache on a GPU, with its kernels for masks and shared heads."""

from __future__ import annotations

import pytest
import torch
from variants import CASES, perturbed

from ds_gpt.generation.decoding import generate
from ds_gpt.generation.options import Sampling

PROMPTS = [[1, 2, 3, 4, 5], [6], list(range(12)), list(range(20))]


@pytest.mark.parametrize("case", CASES)
def test_a_gpu_gives_the_tokens_of_the_cpu(case: str) -> None:
    sampling = Sampling(0.9, top_k=9, top_p=0.95, repetition_penalty=1.2)
    expected = generate(perturbed(**CASES[case]), PROMPTS, 40, sampling, seed=7)
    assert generate(perturbed(**CASES[case]).cuda(), PROMPTS, 40, sampling, seed=7) == expected


@pytest.mark.parametrize("case", CASES)
def test_bf16_decodes(case: str) -> None:
    tokens = generate(perturbed(**CASES[case]).to("cuda", torch.bfloat16), PROMPTS, 40, Sampling(), seed=7)
    assert [len(row) for row in tokens] == [40] * len(PROMPTS)
