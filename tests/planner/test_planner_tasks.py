"""What adapters, pairs, rewards and masks cost, and that every task has figures; the trace holds the bytes of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from traced_cases import CONFIGS, TASKS

from ds_gpt.config import Composed, load
from ds_gpt.model.counts import parameters, trained_parameters
from ds_gpt.planner import predict
from ds_gpt.planner.devices import device_named
from ds_gpt.planner.memory import Memory, memory
from ds_gpt.planner.speed import Speed, speed

A100 = device_named("a100-40gb")
FULL = "activation_checkpointing.policy=full"


def composed(stage: int, *overrides: str) -> Composed:
    settings = ("batch.global_batch_size=64", "batch.micro_batch_size=2", "data.corpus=/somewhere", *overrides)
    return load(CONFIGS / "runs" / "llama_7b.yaml", CONFIGS / f"zero{stage}.json", A100.hardware(8), settings)


def both(stage: int, *overrides: str) -> tuple[Memory, Speed]:
    run = composed(stage, *overrides)
    return memory(run), speed(run, A100)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_figures(task: str) -> None:
    run = composed(3, FULL, *(setting for setting in TASKS[task] if not setting.startswith("model.")))
    foreseen = predict(run)
    assert foreseen is not None and foreseen.tokens_per_s is not None
    found = speed(run, A100)
    assert sum(found.parts.values()) == pytest.approx(found.step_s) and 0.1 < found.mfu < 0.7


@pytest.mark.parametrize("stage", range(4))
def test_frozen_weights_keep_no_state_and_send_no_gradients(stage: int) -> None:
    run = composed(stage, FULL, "lora.rank=8")
    trained, count = trained_parameters(run.run), parameters(run.run.model)
    assert trained < count / 1000
    held, ranks = memory(run).resident, 8 if stage else 1
    assert held["moments"] == pytest.approx(8 * trained / ranks, rel=1e-3)
    assert held["masters"] == pytest.approx(4 * trained / ranks, rel=1e-3)
    assert held.get("gradients", 0) <= 4 * trained
    small = 1e5 * 2 * 32 * 4  # at ZeRO 3 what is small is whole on every rank
    assert held["weights"] == pytest.approx(
        2 * (count + trained) / (8 if stage == 3 else 1), rel=1e-3, abs=small * (stage == 3)
    )
    if 0 < stage < 3:
        assert speed(run, A100).communication_s < speed(composed(stage, FULL), A100).communication_s / 500


def test_beside_adapters_no_gradient_of_a_frozen_weight_is_computed() -> None:
    every, adapters = (
        speed(composed(3, FULL, *settings), A100)
        for settings in ((), ("lora.rank=8", "lora.targets=[qkv, out, gate, up, down]"))
    )
    assert adapters.parts["matrices"] == pytest.approx(2 / 3 * every.parts["matrices"], rel=1e-6)
    assert 0 < adapters.parts["adapters"] < 0.5 * every.parts["matrices"]
    assert 0.6 < adapters.step_s / every.step_s < 1
    alone = speed(composed(3, FULL, "lora.rank=8", "lora.targets=['blocks.0.*.qkv']"), A100)
    assert alone.parts["adapters"] < adapters.parts["adapters"] / 100


def test_a_pair_is_two_sequences() -> None:
    (pairs, at), (sequences, as_many) = (
        both(3, FULL, "stage=dpo"),
        both(3, FULL, "batch.micro_batch_size=4", "batch.global_batch_size=128"),
    )
    assert pairs.peak.bytes == pytest.approx(sequences.peak.bytes, rel=0.02)
    assert as_many.tokens_per_s > at.tokens_per_s > 0.9 * as_many.tokens_per_s, "logits are computed once more"
    assert at.parts["attention"] == pytest.approx(as_many.parts["attention"])


def test_a_reward_model_has_no_logits() -> None:
    (rewards, fast), (_, slow) = both(3, FULL, "stage=reward"), both(3, FULL, "stage=dpo")
    assert "logits and loss" not in rewards.peak.kinds and fast.step_s < slow.step_s
    run = composed(3, "stage=reward").run
    assert trained_parameters(run) == parameters(run.model) - (run.model.vocabulary - 1) * run.model.width


def test_a_mask_is_kept_once_for_all_layers_and_every_score_is_computed() -> None:
    (apart, slow), (together, fast) = both(3, FULL, "stage=sft"), both(3, FULL)
    context = composed(3).run.model.context
    assert apart.peak.bytes - together.peak.bytes == pytest.approx(2 * 2 * context**2, rel=0.25)  # bf16, two sequences
    assert slow.parts["attention"] == pytest.approx(2 * fast.parts["attention"], rel=0.01)


def test_accumulation_gathers_frozen_weights_again_and_reduces_adapters_alone() -> None:
    from ds_gpt.planner.clock import Constants
    from ds_gpt.planner.network import Network
    from ds_gpt.planner.shapes import Shapes

    shapes = Shapes.of(composed(3, FULL, "lora.rank=8"))
    count, trained = parameters(shapes.model), trained_parameters(composed(3, "lora.rank=8").run)
    once, four = (
        Network(replace(shapes, accumulation=steps), A100, Constants()).zero(count, trained) for steps in (1, 4)
    )
    assert once[0] < once[1] / 500 and [after / before for before, after in zip(once, four, strict=True)] == [4, 4]
