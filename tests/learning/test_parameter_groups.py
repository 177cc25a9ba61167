"""Which parameters decay, under ZeRO-3 too."""

import torch
from torch import nn

from ds_gpt.config import ModelConfig
from ds_gpt.learning.parameter_groups import parameter_groups
from ds_gpt.model.gpt import GPT


def names(model: nn.Module, group: dict) -> list[str]:
    by_parameter = {parameter: name for name, parameter in model.named_parameters()}
    return [by_parameter[parameter] for parameter in group["params"]]


def gpt() -> GPT:
    return GPT(ModelConfig(layers=2, width=8, heads=2, context=4, vocab_size=5))


def test_matrices_decay_and_the_rest_does_not():
    model = gpt()
    decayed, spared = parameter_groups(model, weight_decay=0.1)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert all(name.endswith("weight") and "norm" not in name for name in names(model, decayed))
    assert all(name.endswith("bias") or "norm" in name for name in names(model, spared))


def test_every_parameter_is_in_one_group_once_and_in_the_models_order():
    model = gpt()
    groups = [names(model, group) for group in parameter_groups(model, 0.1)]
    order = [name for name, _ in model.named_parameters()]
    assert sorted(groups[0] + groups[1]) == sorted(order)
    assert "embedding.tokens.weight" in groups[0] and "head.weight" not in groups[0]
    for group in groups:
        assert group == sorted(group, key=order.index)


def test_partitioned_parameters_are_judged_by_their_whole_shape():
    model = gpt()
    expected = [names(model, group) for group in parameter_groups(model, 0.1)]
    for parameter in model.parameters():  # what ZeRO-3 leaves
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert [names(model, group) for group in parameter_groups(model, 0.1)] == expected


def test_frozen_parameters_and_empty_groups_are_left_out():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4, bias=False))
    model[0].requires_grad_(False)
    (group,) = parameter_groups(model, 0.1)
    assert names(model, group) == ["1.weight"]


def test_the_groups_are_what_an_optimizer_takes():
    model = gpt()
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1.0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        shrunk = parameter.ndim >= 2
        torch.testing.assert_close(parameter.detach(), before[name] * (0.9 if shrunk else 1.0))
