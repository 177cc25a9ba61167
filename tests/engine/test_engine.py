"""What an optimizer step and an evaluation are, whatever the ZeRO stage and the number of ranks."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forked_ranks import run_ranks
from test_defects import same, whole_weights
from tiny import VOCABULARY, tiny, tiny_loader, tiny_tokens, whole_batch

from ds_gpt.config import Composed, ConfigError
from ds_gpt.data import Split, rank_share
from ds_gpt.data.loader import window_batch
from ds_gpt.learning.loss import IGNORE_INDEX
from ds_gpt.model.gpt import GPT

STAGES = ("zero0", "zero1", "zero2", "zero3")
SGD = ("optimizer.name=sgd", "gradient_clipping=0")


def plain_model(composed: Composed) -> GPT:
    torch.manual_seed(composed.run.seed)
    return GPT(composed.run.model)


def as_lists(weights: list[torch.Tensor]) -> list[list[float]]:
    return [weight.flatten().tolist() for weight in weights]


# ---- Weights ------------------------------------------------------------------------------------------------------------


def first_weights_and_loss(ranks: Any, cases: list[Composed]) -> list[Any]:
    from ds_gpt.engine.engine import Engine

    torch.manual_seed(ranks.rank)  # ranks that differ before
    found = []
    for composed in cases:
        engine = Engine(composed, ranks)
        weights = as_lists([p.detach() for p in engine.model.parameters()] if composed.zero_stage < 3 else whole_weights(engine.model))
        loader = tiny_loader(composed, ranks.rank, ranks.world_size)
        found.append((weights, engine.step(0, loader.load(0), 0.0).loss))
        loader.close()
        engine.close()
    return found


def test_ranks_of_every_stage_start_from_the_weights_of_the_seed() -> None:
    cases = [tiny(stage, 2, settings) for stage in STAGES for settings in ([], ["bf16.enabled=true"])]
    expected = list(plain_model(cases[0]).parameters())
    for found in run_ranks(2, first_weights_and_loss, cases):
        for composed, (weights, loss) in zip(cases, found, strict=True):
            dtype = torch.bfloat16 if composed.precision == "bf16" else torch.float32
            assert weights == as_lists([p.detach().to(dtype) for p in expected]), (composed.zero_stage, composed.precision)
            assert abs(loss - math.log(VOCABULARY)) < 0.05


def tie(ranks: Any, composed: Composed) -> dict[str, Any]:
    import deepspeed

    from ds_gpt.engine.engine import Engine

    engine = Engine(composed, ranks)
    loader = tiny_loader(composed, ranks.rank, ranks.world_size)
    head, tokens = engine.model.head, engine.model.embedding.tokens
    before = whole_weights(engine.model)[0]
    for step in range(3):
        engine.step(step, loader.load(step), 0.01)
    with deepspeed.zero.GatheredParameters([head.weight]):
        gathered = head.weight.detach().clone()
    with deepspeed.zero.GatheredParameters([tokens.weight]):
        equal = torch.equal(gathered, tokens.weight)
        one_storage = head.weight.data_ptr() == tokens.weight.data_ptr()
    loader.close()
    return {
        "one parameter": head.weight is tokens.weight,
        "equal": equal,
        "one storage": one_storage,
        "moved": not torch.equal(before, gathered),
        "names": [name for name, _ in engine.model.named_parameters() if "head" in name or "tokens" in name],
    }


def test_tied_weights_stay_tied_under_zero_3() -> None:
    for found in run_ranks(2, tie, tiny("zero3", 2)):
        assert found.pop("names") == ["embedding.tokens.weight"]
        assert all(found.values()), found


# ---- Steps --------------------------------------------------------------------------------------------------------------


def updates(ranks: Any, cases: list[Composed], rates: list[float]) -> list[list[dict[str, Any]]]:
    """For each case and learning rate: the engine's own rates, the gradient norm and the size of the update."""
    from ds_gpt.engine.engine import Engine

    found = []
    for composed in cases:
        engine = Engine(composed, ranks)
        loader = tiny_loader(composed, ranks.rank, ranks.world_size)
        steps = []
        for step, lr in enumerate(rates):
            before = whole_weights(engine.model)
            result = engine.step(step, loader.load(step), lr)
            moved = [after - old for after, old in zip(whole_weights(engine.model), before, strict=True)]
            steps.append(
                {
                    "rates": {group["lr"] for group in engine.deepspeed.optimizer.param_groups},
                    "grad_norm": result.grad_norm,
                    "update": torch.nn.utils.get_total_norm(moved).item(),
                    "largest": max(change.abs().max().item() for change in moved),
                    "loss_scale": result.loss_scale,
                }
            )
        found.append(steps)
        loader.close()
        engine.close()
    return found


RATES = [0.001, 0.5, 0.0, 0.25]


def test_a_step_uses_the_learning_rate_it_is_given() -> None:
    cases = [tiny(stage, 2, [*SGD, "optimizer.lr=7.0", "optimizer.weight_decay=0.0"]) for stage in STAGES]
    for steps in run_ranks(2, updates, cases, RATES)[0]:
        for lr, step in zip(RATES, steps, strict=True):
            assert step["rates"] == {lr}
            assert step["update"] == pytest.approx(lr * step["grad_norm"], rel=1e-3)
            assert step["loss_scale"] is None


def test_the_first_adam_step_is_as_long_as_its_learning_rate() -> None:
    cases = [tiny(stage, 2, ["optimizer.lr=7.0", "optimizer.weight_decay=0.0"]) for stage in STAGES]
    for (step,) in run_ranks(2, updates, cases, [0.001])[0]:
        assert step["largest"] == pytest.approx(0.001, rel=1e-3)


def test_clipping_shortens_the_update_and_not_the_reported_norm() -> None:
    cases = [tiny(stage, 2, ["optimizer.name=sgd", "optimizer.weight_decay=0.0", f"gradient_clipping={clip}"]) for stage in STAGES for clip in (0, 0.1)]
    found = [steps[0] for steps in run_ranks(2, updates, cases, [0.5])[0]]
    for free, clipped in zip(found[::2], found[1::2], strict=True):
        assert clipped["grad_norm"] == pytest.approx(free["grad_norm"], rel=1e-6) and free["grad_norm"] > 0.2
        assert clipped["update"] == pytest.approx(0.5 * 0.1, rel=1e-4)


def one_step(ranks: Any, composed: Composed, interrupted_rank: int) -> Any:
    from ds_gpt.engine.engine import Engine

    engine = Engine(composed, ranks)
    loader = tiny_loader(composed, ranks.rank, ranks.world_size)
    result = engine.step(0, loader.load(0), 0.0, interrupted=ranks.rank == interrupted_rank)
    loader.close()
    engine.close()
    return result


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_the_mean_over_the_global_batch(smoothing: float) -> None:
    settings = ["gradient_accumulation_steps=2", f"loss.label_smoothing={smoothing}"]
    composed = tiny("zero1", 2, settings)
    inputs_BT, targets_BT = whole_batch(composed, 0)
    logits_BTV = plain_model(composed)(inputs_BT)
    expected = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), label_smoothing=smoothing).item()
    for result in run_ranks(2, one_step, composed, -1):
        assert result.loss == pytest.approx(expected, rel=1e-6)
        assert not result.interrupted and result.applied


@pytest.mark.parametrize("who", [0, 1])
def test_all_ranks_learn_that_one_was_asked_to_stop(who: int) -> None:
    composed = tiny("zero1", 2)
    asked, not_asked = run_ranks(2, one_step, composed, who), run_ranks(2, one_step, composed, -1)
    assert [replace(result, interrupted=False) for result in asked] == not_asked, "the flag leaks into the loss"
    assert [result.interrupted for result in asked] == [True, True]


# ---- Dropout ------------------------------------------------------------------------------------------------------------


def masks(ranks: Any, composed: Composed, steps: list[int]) -> tuple[list[Any], list[list[list[bool]]]]:
    """Results of steps that do not move the weights, and what the first dropout of each micro-step kept.

    Every rank and step computes on the same tokens.
    """
    from ds_gpt.engine.engine import Engine

    engine = Engine(composed, ranks)
    kept: list[list[bool]] = []
    engine.model.embedding.dropout.register_forward_hook(lambda module, args, output: kept.append((output != 0).flatten().tolist()))
    loader = tiny_loader(composed, 0, ranks.world_size)
    micro_batches = [loader.load(0)[0]] * composed.accumulation_steps
    results, by_step = [], []
    for step in steps:
        torch.manual_seed(step * 7 + len(results))  # whatever was drawn before
        kept.clear()
        results.append(engine.step(step, micro_batches, 0.0))
        by_step.append(list(kept))
    loader.close()
    engine.close()
    return results, by_step


@pytest.mark.parametrize("stage", ["zero0", "zero3"])
def test_dropout_is_a_function_of_seed_step_and_rank(stage: str) -> None:
    settings = ["model.dropout=0.1", "gradient_accumulation_steps=2", "activation_checkpointing=null"]
    (results, first), (other_results, second) = run_ranks(2, masks, tiny(stage, 2, settings), [3, 4, 3])
    assert results == other_results
    assert results[0] == results[2] != results[1]
    assert first[0] == first[2] and second[0] == second[2]
    distinct = [mask for rank in (first, second) for step in rank[:2] for mask in step]  # 2 ranks, steps and micro-steps
    assert len({tuple(mask) for mask in distinct}) == 8
    assert all(0.85 < np.mean(mask) < 0.95 for mask in distinct)
    ((_, again), _) = run_ranks(2, masks, tiny(stage, 2, [*settings, "seed=1338"]), [3])
    assert again[0] != first[0]


# ---- Evaluation -----------------------------------------------------------------------------------------------------------

WINDOWS = np.arange(7) * 16  # 7 do not divide by 2 or 3


def evaluation_settings(world_size: int, stage: str) -> Composed:
    return tiny(stage, world_size, ["batch.global_batch_size=6", "batch.micro_batch_size=1", "loss.label_smoothing=0.2", "model.dropout=0.1"])


def ragged(offsets: np.ndarray, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of which the k-th counts its first 2 k + 1 tokens only."""
    inputs_BT, targets_BT = window_batch(Split.of(tiny_tokens()), offsets, context, IGNORE_INDEX)
    for row, offset in enumerate(offsets):
        if offset >= 0:
            targets_BT[row, 2 * (int(offset) // 16) + 1 :] = IGNORE_INDEX
    return inputs_BT, targets_BT


def evaluated(ranks: Any, cases: list[Composed]) -> list[float]:
    """The loss on ragged windows."""
    from ds_gpt.engine.engine import Engine

    found = []
    for composed in cases:
        engine = Engine(composed, ranks)
        loader = tiny_loader(composed, ranks.rank, ranks.world_size)
        share = rank_share(WINDOWS, ranks.rank, ranks.world_size)
        batches = [ragged(share[k : k + 2], composed.run.model.context) for k in range(0, len(share), 2)]
        before = engine.evaluate(batches)
        assert engine.model.training
        engine.step(0, loader.load(0), 0.0)
        assert engine.evaluate(batches) == before, "evaluation depends on what was drawn before"
        found.append(before)
        with pytest.raises(ZeroDivisionError), engine.evaluating():
            raise ZeroDivisionError
        assert engine.model.training and torch.is_grad_enabled(), "an error leaves the engine in evaluation mode"
        loader.close()
        engine.close()
    return found


@functools.cache
def plain_evaluation() -> float:
    composed = evaluation_settings(1, "zero0")
    model = plain_model(composed).eval()
    inputs_BT, targets_BT = ragged(WINDOWS, composed.run.model.context)
    assert 0 < (targets_BT == IGNORE_INDEX).sum() < targets_BT.numel()
    with torch.no_grad():
        return F.cross_entropy(model(inputs_BT).flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE_INDEX).item()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_is_the_mean_over_the_counted_tokens_of_all_ranks(world_size: int) -> None:
    cases = [evaluation_settings(world_size, stage) for stage in STAGES]
    for found in run_ranks(world_size, evaluated, cases):
        assert found == [pytest.approx(plain_evaluation(), abs=1e-6)] * len(STAGES)  # without label smoothing and dropout


def step_with_ignored_targets(ranks: Any, composed: Composed) -> float:
    from ds_gpt.engine.engine import Engine

    engine = Engine(composed, ranks)
    micro_batches = [ragged(WINDOWS[[2 * ranks.rank + k]], composed.run.model.context) for k in range(2)]
    loss = engine.step(0, micro_batches, 0.0).loss
    engine.close()
    return loss


def test_the_loss_of_a_step_weighs_every_counted_token_alike() -> None:
    composed = tiny("zero2", 2, ["batch.global_batch_size=4", "batch.micro_batch_size=1"])
    inputs_BT, targets_BT = ragged(WINDOWS[:4], composed.run.model.context)
    expected = F.cross_entropy(plain_model(composed)(inputs_BT).flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE_INDEX).item()
    assert run_ranks(2, step_with_ignored_targets, composed) == [pytest.approx(expected, rel=1e-6)] * 2


def logits_of(ranks: Any, cases: list[Composed]) -> list[list[float]]:
    from ds_gpt.engine.engine import Engine

    found = []
    for composed in cases:
        engine = Engine(composed, ranks)
        with engine.evaluating():
            logits_BTV = engine.logits(whole_batch(composed, 0)[0][:1])
        assert not logits_BTV.requires_grad
        found.append(logits_BTV.flatten().tolist())
        engine.close()
    return found


def test_logits_are_the_models() -> None:
    cases = [tiny(stage, 2, ["model.dropout=0.1"]) for stage in STAGES]
    expected = plain_model(cases[0]).eval()(whole_batch(cases[0], 0)[0][:1]).flatten().tolist()
    for found in run_ranks(2, logits_of, cases):
        for logits in found:
            assert logits == pytest.approx(expected, abs=1e-6)


# ---- Building -------------------------------------------------------------------------------------------------------------


def rebuilt(ranks: Any, cases: list[Composed]) -> list[list[float]]:
    from tiny import train_curve

    return [train_curve(ranks, composed, 3) for composed in cases]


def test_engines_can_be_built_one_after_another() -> None:
    """Each is what it is alone, whatever was built before it."""
    cases = [tiny("zero3", 2), tiny("zero0", 2, ["bf16.enabled=true"]), tiny("fp16", 2), tiny("zero0", 2), tiny("zero1", 2, ["bf16.enabled=true"])]
    (curves, _) = run_ranks(2, rebuilt, [*cases, *cases])
    assert curves[: len(cases)] == curves[len(cases) :]
    for composed, curve in zip(cases[-2:], curves[len(cases) - 2 :], strict=False):
        assert run_ranks(2, rebuilt, [composed])[0] == [curve]


def deepspeeds_own_verdict(ranks: Any, composed: Composed, key: str, value: Any) -> str:
    from ds_gpt.engine.engine import check_deepspeed_config

    check_deepspeed_config(composed)
    with pytest.raises(ConfigError) as error:
        check_deepspeed_config(replace(composed, deepspeed={**composed.deepspeed, key: value}))
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "value"), [("zero_optimization", {"stage": 1, "reduce_bucket_size": -3}), ("communication_data_type", "fp12"), ("fp16", {"enabled": "perhaps"})]
)
def test_what_deepspeed_refuses_is_said_in_its_words(key: str, value: Any) -> None:
    (message,) = run_ranks(1, deepspeeds_own_verdict, tiny("zero1", 1), key, value)
    assert message.count("DeepSpeed refuses the configuration: ") == 1 and len(message) > 80


# ---- Nothing to measure -------------------------------------------------------------------------------------------------


def without_targets(ranks: Any, composed: Composed) -> list[str]:
    """What is said of batches in which every target is ignored."""
    from ds_gpt.engine.engine import Engine

    engine = Engine(composed, ranks)
    size, context = composed.micro_batch_size, composed.run.model.context
    empty = [(torch.zeros(size, context, dtype=torch.int64), torch.full((size, context), IGNORE_INDEX))] * composed.accumulation_steps
    said = []
    for measure in (lambda: engine.evaluate(empty), lambda: engine.step(0, empty, 0.01)):
        with pytest.raises(ConfigError) as caught:
            measure()
        said.append(str(caught.value))
    engine.close()
    return said


def test_a_loss_over_no_targets_is_refused_alike_on_every_rank() -> None:
    first, second = run_ranks(2, without_targets, tiny("zero1", 2))
    assert first == second and first[0] == first[1]
    for words in ("no token of data.corpus = 'python_docs'", "why: ", "model.context = 16"):
        assert words in first[0]
