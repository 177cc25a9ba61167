"""The planner's clock: what must be faster is, and published runs are met."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from traced_cases import CONFIGS

from ds_gpt.config import ConfigError, load
from ds_gpt.planner.devices import DEVICES, device_named
from ds_gpt.planner.memory import memory_of
from ds_gpt.planner.search import candidates, recommended
from ds_gpt.planner.shapes import Shapes
from ds_gpt.planner.speed import Constants, speed_of
from ds_gpt.planner.trainers import PLAIN_DDP

A100 = device_named("a100-40gb")
RUN = str(CONFIGS / "runs" / "gpt_1b.yaml")
assert PLAIN_DDP.states
NO_COPIES = replace(PLAIN_DDP, states=replace(PLAIN_DDP.states, buckets=0))


def shapes(stage: int = 2, ranks: int = 8, *overrides: str) -> Shapes:
    return Shapes.of(load(RUN, str(CONFIGS / f"zero{stage}.json"), A100.hardware(ranks), overrides))


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_has_all_its_numbers(name: str) -> None:
    device = DEVICES[name]
    assert 0 < speed_of(shapes(), device).mfu < 0.8
    assert device.network <= device.link < device.bandwidth
    assert device.kind == "cpu" or device.peak("fp32") < device.peak("bf16")


def test_the_parts_are_the_step() -> None:
    speed = speed_of(shapes(), A100)
    assert sum(speed.parts.values()) == pytest.approx(speed.step_s)
    assert speed.range_s[0] < speed.step_s < speed.range_s[1]


def test_recomputation_costs_a_forward_pass() -> None:
    off, full = (speed_of(replace(shapes(), policy=policy), A100) for policy in (None, "full"))
    assert 1.2 < full.step_s / off.step_s < 1.45


def test_a_window_does_not_spare_scores_since_it_is_a_mask() -> None:
    settings = ((), ("model.sliding_window=256",), ("model.sliding_window=2048",))
    whole, masked, vain = (speed_of(shapes(2, 8, *window), A100).parts["attention"] for window in settings)
    assert whole == vain and masked > 1.9 * whole, "FlashAttention computes the half that is causal, a kernel with a mask all of it"


def test_two_nodes_are_at_most_twice_as_fast_and_one_gpu_waits_for_nobody() -> None:
    eight, sixteen = (speed_of(replace(shapes(), ranks=ranks), A100).tokens_per_s for ranks in (8, 16))
    assert 1.2 * eight < sixteen <= 2 * eight
    assert speed_of(replace(shapes(), ranks=1), A100).communication_s == 0


def test_accumulation_multiplies_what_zero_2_sends() -> None:
    once, four = (speed_of(replace(shapes(2), accumulation=steps), A100).communication_s for steps in (1, 4))
    assert four / once == pytest.approx((2 * 4 + 1) / (2 + 1))


def test_the_embedding_has_nothing_to_hide_behind_and_hiding_the_rest_costs_a_fifth() -> None:
    run = replace(shapes(0), overlap=True, trainer=NO_COPIES)
    speed, parameters = speed_of(run, A100), run.parameters()
    last = sum(each.elements for each in parameters if each.name in ("tokens", "positions")) / sum(each.elements for each in parameters)
    assert last > 0.003 and speed.parts["communication"] / speed.communication_s == pytest.approx(last + 0.20 * (1 - last))
    after = speed_of(replace(run, overlap=False), A100)
    assert after.parts["communication"] == pytest.approx(after.communication_s) == pytest.approx(speed.communication_s)


def test_copies_into_buckets_and_back_cost_two_passes_of_each() -> None:
    with_copies, without = (replace(shapes(0), trainer=trainer) for trainer in (PLAIN_DDP, NO_COPIES))
    gradients = 4 * sum(parameter.elements for parameter in without.parameters())
    more = speed_of(with_copies, A100).step_s - speed_of(without, A100).step_s
    assert more == pytest.approx(4 * gradients / (A100.bandwidth * Constants().bandwidth))
    alone = replace(with_copies, ranks=1)
    assert speed_of(alone, A100).parts["communication"] == 0
    assert memory_of(with_copies).peak.bytes - memory_of(alone).peak.bytes == gradients


def test_gradients_that_are_reduced_once_hide_behind_the_last_micro_step_alone() -> None:
    slow = replace(A100, link=A100.link / 50)
    run = replace(shapes(0), overlap=True, trainer=NO_COPIES)
    once, four = (speed_of(replace(run, accumulation=steps), slow).parts["communication"] for steps in (1, 4))
    assert once == pytest.approx(four)
    every = replace(run, stage=3)  # gathers and reduces in each
    once, four = (speed_of(replace(every, accumulation=steps), slow).parts["communication"] for steps in (1, 4))
    assert four == pytest.approx(4 * once)


def test_the_recommendation_fits_and_is_not_a_higher_stage_for_nothing() -> None:
    found = candidates(RUN, [str(CONFIGS / f"zero{stage}.json") for stage in range(4)], A100, 8, [])
    best = recommended(found)
    fastest = max(candidate.speed.tokens_per_s for candidate in found if candidate.fits)
    assert best.fits and best.speed.tokens_per_s > 0.97 * fastest
    assert found == sorted(found, key=lambda candidate: not candidate.fits)
    assert all(candidate.shapes.micro_batch * candidate.shapes.accumulation * 8 == 64 for candidate in found)


def test_a_trillion_parameters_on_16384_gpus_in_a_moment() -> None:
    big = ["model.layers=128", "model.width=25600", "model.heads=160", "model.ffn_width=102400", "batch.global_batch_size=16384"]
    found = candidates(RUN, [str(CONFIGS / "zero3.json")], device_named("h200"), 16384, big)
    assert any(candidate.fits for candidate in found)
    assert not any(candidate.fits for candidate in candidates(RUN, [str(CONFIGS / "zero3.json")], device_named("h200"), 64, big))
    assert all(math.isfinite(candidate.speed.step_s) for candidate in found)


def test_an_unknown_device_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'a100-40gb'"):
        device_named("a100-41gb")
