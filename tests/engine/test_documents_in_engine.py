"""Documents kept apart through the engine: the same curve as plain PyTorch, whatever the stage and the checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked_ranks import run_ranks
from tiny import tiny, tiny_loader, whole_batch

from ds_gpt.learning.parameter_groups import parameter_groups
from ds_gpt.model.gpt import GPT

STEPS = 6
SETTINGS = ["gradient_clipping=0.6", "gradient_accumulation_steps=2"]
WAYS = {
    "zero0": [],
    "zero1": ["activation_checkpointing={policy: full}"],
    "zero2": ["activation_checkpointing={policy: selective}"],
    "zero3": ["activation_checkpointing={policy: full, partition_activations: true}"],
    "zero2, shared sequences": ["activation_checkpointing={policy: full}", "parallel.sequence=2"],
    "zero2, shared matrices": ["activation_checkpointing={policy: full}", "parallel.tensor=2"],
}


def documents(inputs_BT: torch.Tensor) -> torch.Tensor:
    """Token 0 begins a document."""
    return (inputs_BT == 0).cumsum(dim=1)


def reference(apart: bool) -> list[tuple[float, float]]:
    composed = tiny("zero0", 1, SETTINGS[:1])
    torch.manual_seed(composed.run.seed)
    model = GPT(composed.run.model)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    curve = []
    for step in range(STEPS):
        inputs_BT, targets_BT = whole_batch(composed, step)
        logits = model(inputs_BT, documents_BT=documents(inputs_BT) if apart else None)
        loss = F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.6)
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    return curve


def through_engine(ranks: Any, name: str) -> list[tuple[float, float]]:
    from ds_gpt.engine.engine import Engine

    composed = tiny(name.partition(",")[0], 2, [*SETTINGS, *WAYS[name]])
    engine = Engine(composed, ranks)
    loader = tiny_loader(composed, engine.grid.data_rank, engine.grid.data_ranks)
    curve = []
    for step in range(STEPS):
        batches = [(inputs_BT, targets_BT, documents(inputs_BT)) for inputs_BT, targets_BT in loader.load(step)]
        assert len(batches) == 2
        result = engine.step(step, batches, lr=0.01)
        curve.append((result.loss, result.grad_norm))
    loader.close()
    engine.close()
    return curve


@pytest.mark.parametrize("name", WAYS)
def test_the_curve_is_that_of_plain_pytorch(name):
    expected = torch.tensor(reference(apart=True))
    assert (expected - torch.tensor(reference(apart=False))).abs().max() > 1e-3  # it makes a difference
    for curve in run_ranks(2, through_engine, name):
        torch.testing.assert_close(torch.tensor(curve), expected, rtol=1e-5, atol=0)
