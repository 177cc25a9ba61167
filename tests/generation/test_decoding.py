"""Decoding with toy models whose answer is known, and with the GPT."""

import pytest
import torch

from ds_gpt.config import ModelConfig
from ds_gpt.generation.decoding import generate
from ds_gpt.model.gpt import GPT

VOCABULARY = 7


class SumOfWindow:
    """Says that the next token is the sum of the window, modulo V. Keeps the windows it was shown."""

    def __init__(self) -> None:
        self.windows: list[list[list[int]]] = []

    def __call__(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        self.windows.append(tokens_BT.tolist())
        answer_BT = tokens_BT.cumsum(dim=1) % VOCABULARY
        return torch.nn.functional.one_hot(answer_BT, VOCABULARY).float()


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(ModelConfig(layers=1, width=16, heads=2, context=8, vocab_size=VOCABULARY)).eval()


def test_greedy_by_hand():
    tokens = generate(SumOfWindow(), torch.tensor([[1, 2], [0, 3]]), new_tokens=3, context=99, temperature=0)
    assert tokens.tolist() == [[1, 2, 3, 6, 5], [0, 3, 3, 6, 5]]


def test_the_window_slides():
    forward = SumOfWindow()
    tokens = generate(forward, torch.tensor([[1, 2]]), new_tokens=4, context=3, temperature=0)
    assert tokens.tolist() == [[1, 2, 3, 6, 4, 6]]
    assert forward.windows == [[[1, 2]], [[1, 2, 3]], [[2, 3, 6]], [[3, 6, 4]]]


def test_a_prompt_longer_than_the_context_is_kept_but_not_seen():
    forward = SumOfWindow()
    tokens = generate(forward, torch.tensor([[5, 1, 2]]), new_tokens=1, context=2, temperature=0)
    assert tokens.tolist() == [[5, 1, 2, 3]] and forward.windows == [[[1, 2]]]


def test_forward_runs_once_for_each_new_token():
    forward = SumOfWindow()
    generate(forward, torch.zeros(1, 1, dtype=torch.long), new_tokens=11, context=4)
    assert len(forward.windows) == 11


def test_no_new_tokens_is_the_prompt():
    prompt = torch.tensor([[1, 2]])
    assert torch.equal(generate(SumOfWindow(), prompt, new_tokens=0, context=4), prompt)


def test_an_empty_prompt_is_an_error():
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(SumOfWindow(), torch.zeros(1, 0, dtype=torch.long), new_tokens=1, context=4)


def test_greedy_gpt_equals_argmax_over_the_whole_prefix():
    model, tokens = gpt(), torch.tensor([[3]])
    for _ in range(7):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(dim=-1)), dim=1)
    assert torch.equal(generate(model, torch.tensor([[3]]), new_tokens=7, context=8, temperature=0), tokens)


def test_gpt_goes_past_its_context_and_seeds_reproduce():
    def sample(seed):
        generator = torch.Generator().manual_seed(seed)
        return generate(gpt(), torch.tensor([[3], [4]]), 30, context=8, top_k=5, generator=generator)

    assert sample(1).shape == (2, 31)
    assert torch.equal(sample(1), sample(1)) and not torch.equal(sample(1), sample(2))


def test_no_graph_is_recorded():
    seen = []
    model = gpt()

    def forward(tokens_BT):
        seen.append(model(tokens_BT))
        return seen[-1]

    generate(forward, torch.tensor([[3]]), new_tokens=2, context=8)
    assert not any(logits.requires_grad for logits in seen)
