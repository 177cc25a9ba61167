"""Documents packed into one sequence, kept apart: each gets the logits and gradients that it gets alone."""

import pytest
import torch
import torch.nn.functional as F

from ds_gpt.config import ModelConfig
from ds_gpt.model.gpt import GPT

MODERN = {"positions": "rotary", "norm": "rmsnorm", "ffn": "swiglu", "kv_heads": 2, "bias": False, "qk_norm": True}
CASES = {"gpt2": {}, "modern": MODERN, "window": {"sliding_window": 3}, "modern, window": MODERN | {"sliding_window": 3}}
LENGTHS = ((5, 1, 6), (12,))  # of the documents of each row
T = 12


def documents() -> torch.Tensor:
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in LENGTHS])


@pytest.fixture(params=CASES)
def model(request) -> GPT:
    torch.manual_seed(3)
    return GPT(ModelConfig(layers=2, width=32, heads=4, context=T, ffn_width=48, vocab_size=23, **CASES[request.param])).double()


def test_logits_and_gradients_are_those_of_each_document_alone(model):
    tokens_BT = torch.randint(23, (len(LENGTHS), T))
    logits = model(tokens_BT, documents_BT=documents())
    F.cross_entropy(logits.flatten(0, 1), tokens_BT.flatten(), reduction="sum").backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for row, lengths in enumerate(LENGTHS):
        for first, length in zip(torch.tensor((0, *lengths)).cumsum(0).tolist(), lengths, strict=False):
            alone = tokens_BT[row : row + 1, first : first + length]
            # Their places in the sequence stay: with rotary positions only distances matter, and learned ones are not reset.
            found = model(alone, positions=torch.arange(first, first + length))
            torch.testing.assert_close(found[0], logits[row, first : first + length], rtol=1e-10, atol=1e-12)
            F.cross_entropy(found[0], alone[0], reduction="sum").backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, together[name], rtol=1e-9, atol=1e-12)


def test_one_document_is_the_ordinary_case(model):
    tokens_BT = torch.randint(23, (2, T))
    torch.testing.assert_close(model(tokens_BT, documents_BT=torch.zeros(2, T, dtype=torch.long)), model(tokens_BT), rtol=1e-10, atol=1e-12)


def test_the_maps_show_it(model):
    model.save_attention = True
    model(torch.randint(23, (2, T)), documents_BT=documents())
    same_BTS = documents()[:, :, None] == documents()[:, None, :]
    for maps_BHTS in model.attention_maps:
        assert (maps_BHTS.masked_select(~same_BTS[:, None]) == 0).all()
        torch.testing.assert_close(maps_BHTS.sum(-1), torch.ones(2, 4, T))
