"""Adapters: what they compute, what they cost, and that they survive being saved."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked_ranks import run_ranks
from saving import load_and_train, train_and_save
from tiny import tiny, train_curve, whole_batch

from ds_gpt.config import ConfigError
from ds_gpt.config.stage import LoraConfig
from ds_gpt.model.gpt import GPT
from ds_gpt.model.lora import adapted, apply_lora, merge, unmerge

LORA = ("lora.rank=4", "lora.alpha=8", "lora.targets=[qkv, up]")
LR, STEPS = 0.01, 8


def gpt(settings: tuple[str, ...] = ()) -> GPT:
    torch.manual_seed(5)
    return GPT(tiny("zero0", 1, settings).run.model)


def with_adapters(config: LoraConfig, noise: float = 0.0) -> GPT:
    model = gpt()
    apply_lora(model, config)
    for _, module in adapted(model):
        torch.nn.init.normal_(module.lora_B.weight, std=noise or 1e-12) if noise else None
    return model.eval()


TOKENS = torch.arange(32).view(2, 16)
CONFIG = LoraConfig(rank=4, alpha=8.0, targets=("qkv", "blocks.1.*.down"))


def test_a_new_adapter_changes_nothing() -> None:
    torch.testing.assert_close(with_adapters(CONFIG)(TOKENS), gpt().eval()(TOKENS), rtol=0, atol=0)


def test_targets_are_names_or_patterns_of_full_names() -> None:
    names = [name for name, _ in adapted(with_adapters(CONFIG))]
    assert names == ["blocks.0.attention.qkv", "blocks.1.attention.qkv", "blocks.1.feed_forward.down"]
    trained = {name for name, parameter in with_adapters(CONFIG).named_parameters() if parameter.requires_grad}
    assert trained == {f"{name}.lora_{matrix}.weight" for name in names for matrix in "AB"}
    with pytest.raises(ConfigError, match="no linear map of the blocks is named 'qvk'(.|\n)*did you mean 'qkv'"):
        with_adapters(LoraConfig(rank=4, targets=("qvk", "out")))


def test_merging_adds_scaled_ba_once_and_can_be_undone() -> None:
    model = with_adapters(CONFIG, noise=0.5)
    before, adapter = model(TOKENS), model.blocks[0].attention.qkv
    base = adapter.base.weight.clone()
    expected = base + (8 / 4) * adapter.lora_B.weight @ adapter.lora_A.weight
    assert not torch.allclose(before, gpt().eval()(TOKENS), atol=0.01), "the adapters should do something"
    merge(model)
    torch.testing.assert_close(adapter.base.weight, expected, rtol=0, atol=0)
    torch.testing.assert_close(model(TOKENS), before, rtol=1e-5, atol=1e-6)
    merge(model)
    torch.testing.assert_close(adapter.base.weight, expected, rtol=0, atol=0)
    unmerge(model)
    torch.testing.assert_close(adapter.base.weight, base, rtol=0, atol=1e-7)
    torch.testing.assert_close(model(TOKENS), before, rtol=1e-5, atol=1e-6)


def reference(settings: tuple[str, ...] = LORA) -> list[tuple[float, float]]:
    """LoRA in plain PyTorch, the formula written out: the weight is W + alpha / r B A, and A and B are what is stepped."""
    composed = tiny("zero0", 1, [*settings, "gradient_clipping=0.05"])
    run = composed.run
    torch.manual_seed(run.seed)
    model = GPT(run.model)
    apply_lora(model, run.lora)  # draws A; nothing else of it is used
    matrices = {
        name: (m.base.weight.detach(), m.lora_A.weight.detach().clone(), m.lora_B.weight.detach().clone())
        for name, m in adapted(model)
    }
    torch.manual_seed(run.seed)
    plain = GPT(run.model)
    trained = [matrix.requires_grad_() for _, a, b in matrices.values() for matrix in (a, b)]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    curve = []
    for step in range(STEPS):
        inputs_BT, targets_BT = whole_batch(composed, step)
        weights = {f"{name}.weight": weight + (8 / 4) * b @ a for name, (weight, a, b) in matrices.items()}
        logits = torch.func.functional_call(plain, weights, (inputs_BT,))
        loss = F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.05)
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    return curve


def curves(ranks: Any, cases: list[Any]) -> list[Any]:
    return [train_curve(ranks, composed, STEPS, LR) for composed in cases]


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_stage_reproduces_the_formula(world_size: int) -> None:
    expected = reference()
    settings = [*LORA, "gradient_clipping=0.05"]
    cases = [
        tiny(f"zero{stage}", world_size, [*settings, f"gradient_accumulation_steps={1 + stage % 2}", f"activation_checkpointing={policy}"])
        for stage, policy in ((0, "null"), (1, "null"), (2, "{policy: full}"), (3, "null"), (3, "{policy: full}"), (3, "{policy: selective}"))
    ]  # fmt: skip
    found = run_ranks(world_size, curves, cases)
    assert expected[-1][0] < expected[0][0] - 0.02, "the reference should learn"
    assert max(norm for _, norm in expected) > 0.05, "clipping should bite"
    for curve in found[0]:
        assert_close(curve, expected)


def assert_close(curve: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    for (loss, norm), (wanted_loss, wanted_norm) in zip(curve, expected, strict=True):
        assert math.isclose(loss, wanted_loss, rel_tol=1e-5), (curve, expected)
        # B is small: B A and (x A) B round apart
        assert math.isclose(norm, wanted_norm, rel_tol=1e-4), (curve, expected)


# Maps that tensor parallelism cuts by their outputs, and by their inputs.
EVERYWHERE = (*LORA[:2], "lora.targets=[qkv, out, up, down]")


@pytest.mark.parametrize("world_size", [2, 4])
def test_tensor_parallel_ranks_reproduce_the_formula(world_size: int) -> None:
    settings = [*EVERYWHERE, "gradient_clipping=0.05", "parallel.tensor=2"]
    cases = [
        tiny(f"zero{stage}", world_size, [*settings, f"gradient_accumulation_steps={1 + stage % 2}", f"activation_checkpointing={policy}"])
        for stage, policy in ((0, "null"), (1, "{policy: full}"), (2, "{policy: selective}"))
    ]  # fmt: skip
    if world_size == 4:
        cases += [tiny("zero1", 4, [*settings, f"parallel.{other}=2"]) for other in ("pipeline", "sequence")]
    expected = reference(EVERYWHERE)
    for found in run_ranks(world_size, curves, cases):
        for curve in found:
            assert_close(curve, expected)


def test_resumed_bit_for_bit_and_only_adapters_are_saved(tmp_path: Path) -> None:
    settings = [*LORA, "lora.dropout=0.2"]
    cases = [(f"zero{stage}", settings, tmp_path / f"zero{stage}") for stage in (1, 3)]
    saved = run_ranks(2, train_and_save, cases, 3, 6)
    resumed = run_ranks(2, load_and_train, cases, 6)
    assert saved == resumed
    assert all(".lora_" in parameter for parameter, _, _ in saved[0][0][1])


def resident(ranks: Any, settings: list[Any]) -> list[dict[str, int]]:
    from ds_gpt.engine.trace import measure

    return [measure(composed, ranks).resident for composed in settings]


def test_frozen_weights_cost_no_gradient_and_no_optimizer_memory() -> None:
    wide = ("model.width=256", "model.vocab_size=512")
    cases = [tiny(f"zero{stage}", 1, [*wide, *lora]) for stage in (0, 1, 2, 3) for lora in ((), LORA)]
    (found,) = run_ranks(1, resident, cases)
    trained = sum(4 * parameter.numel() for parameter in _trained(wide))
    for stage, (full, adapters) in enumerate(zip(found[::2], found[1::2], strict=True)):
        assert adapters.get("moments", 0) == pytest.approx(2 * trained, rel=0.05), (stage, adapters)
        assert adapters.get("gradients", 0) <= 1.05 * trained, (stage, adapters)
        assert full["moments"] > 20 * adapters["moments"], (stage, full, adapters)


def _trained(settings: tuple[str, ...]) -> Iterator[torch.nn.Parameter]:
    model = gpt(settings)
    apply_lora(model, tiny("zero0", 1, LORA).run.lora)
    return (parameter for parameter in model.parameters() if parameter.requires_grad)
