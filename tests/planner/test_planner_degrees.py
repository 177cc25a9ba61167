"""Tensor, pipeline and sequence degrees: what each rank holds, what it sends, and what cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from traced_cases import CONFIGS

from ds_gpt.config import ConfigError, ParallelConfig, load
from ds_gpt.config.parallel import COMBINATIONS, sharing_problems
from ds_gpt.model.counts import parameters
from ds_gpt.planner.clock import Clock, Constants
from ds_gpt.planner.degrees import ALONE, possible
from ds_gpt.planner.devices import DEVICES, device_named
from ds_gpt.planner.memory import memory_of
from ds_gpt.planner.search import candidates, cheapest, ranked, recommended
from ds_gpt.planner.shapes import Shapes
from ds_gpt.planner.speed import speed_of

A100 = device_named("a100-40gb")
RUN = str(CONFIGS / "runs" / "gpt_1b.yaml")
JSONS = [str(CONFIGS / f"zero{stage}.json") for stage in range(4)]


def shapes(stage: int = 1, **changes: int) -> Shapes:
    return replace(Shapes.of(load(RUN, JSONS[stage], A100.hardware(8), ())), **changes)


def elements(each: Shapes, stage: int = 0) -> int:
    return sum(parameter.elements for parameter in each.parameters(stage))


def test_without_degrees_a_rank_has_the_whole_model() -> None:
    assert elements(shapes()) == parameters(shapes().model)


def test_the_stages_of_a_pipeline_have_the_model_between_them_and_the_tied_matrix_twice() -> None:
    model = shapes().model
    for stages in (2, 3, 8):
        every = sum(elements(shapes(pipeline=stages), stage) for stage in range(stages))
        assert every == parameters(model) + model.vocabulary * model.width


def test_tensor_ranks_share_the_matrices_and_copy_the_rest() -> None:
    model = shapes().model
    into = model.layers * sum(outputs * (model.width + 1) for outputs in (3 * model.width, model.hidden_width))  # with their biases
    out_of = model.layers * sum(inputs * model.width for inputs in (model.width, model.hidden_width))
    assert elements(shapes(tensor=4)) == parameters(model) - (into + out_of) * 3 // 4


def test_what_is_split_is_smaller_and_what_is_not_stays() -> None:
    whole, tensor, sequence = (memory_of(shapes(policy=None, **split)) for split in ({}, {"tensor": 2}, {"sequence": 2}))
    kept = whole.peak.kinds["activations"]
    # Of the 34 bytes of a token and unit of width (Korthikanti et al. 2022, equation 2) tensor parallelism splits 24: q, k, v, attention, twice F.
    assert tensor.peak.kinds["activations"] / kept == pytest.approx((10 + 24 / 2) / 34, rel=0.02)
    # All of them are of half the tokens, and attention's result, 2 bytes, is kept twice.
    assert sequence.peak.kinds["activations"] / kept == pytest.approx((34 + 2) / 34 / 2, rel=0.02)
    assert sequence.resident["weights"] == whole.resident["weights"]
    assert sequence.resident["moments"] == pytest.approx(whole.resident["moments"] / 2, rel=0.001)  # ZeRO shards over these ranks too


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages() -> None:
    """And one micro-batch less in flight takes one set of block inputs less: what full checkpointing keeps."""
    split = shapes(pipeline=4, micro_batch=1, policy="full")

    def most(steps: int) -> int:
        return max(moment.kinds.get("activations", 0) - 16 * split.tokens * steps for moment in memory_of(replace(split, accumulation=steps)).moments)

    kept = 5 * 2 * split.tokens * split.model.width + split.tokens * split.model.width * 3  # five blocks' inputs; output and mask of the embedding
    assert most(16) == most(4)
    assert most(4) - most(3) == pytest.approx(kept, rel=0.05)


def test_the_bubble_is_that_of_the_paper() -> None:
    parts = speed_of(shapes(pipeline=4, accumulation=12, ranks=1, micro_batch=2), A100).parts
    busy = sum(parts.values()) - parts["pipeline bubble"] - parts["communication"] - parts["optimizer"]
    assert parts["pipeline bubble"] / busy == pytest.approx(3 / 12)  # (p - 1) / m: Narayanan et al. 2021, section 2.2


def test_tensor_ranks_send_four_all_reduces_a_block() -> None:
    run, constants = shapes(tensor=4, ranks=2, policy=None, micro_batch=4, accumulation=2), Constants(launch_s=0.0)
    sent = 2 * 3 / 4 * 2 * run.tokens * run.model.width
    seconds = 2 * run.model.layers * 4 * sent / (A100.link * constants.link)
    assert speed_of(run, A100, constants).parts["tensor parallel"] == pytest.approx(seconds)
    split = speed_of(replace(run, tensor=1, sequence=4), A100, constants).parts
    assert split["sequence parallel"] == pytest.approx(2 * run.model.layers * 8 * (3 / 4 * 2 * run.tokens / 4 * run.model.width) / (A100.link * constants.link))


def test_a_degree_of_one_changes_nothing() -> None:
    found = candidates(RUN, JSONS, A100, 8, [], [ALONE, ParallelConfig(tensor=1)])
    assert len({(c.memory.peak.bytes, c.speed.step_s, c.shapes.stage, c.shapes.micro_batch, c.shapes.policy) for c in found}) == len(found) / 2


@pytest.mark.parametrize(
    ("degrees", "devices", "said"),
    [
        ({"tensor": 3}, 8, "8 ranks are not a whole number of times tensor 3"),
        ({"tensor": 32}, 32, "model.heads = 16 is not a multiple of parallel.tensor 32"),
        ({"pipeline": 32}, 32, "parallel.pipeline = 32 is more than model.layers = 20"),
        ({"sequence": 32}, 32, "model.heads = 16 is not a multiple of parallel.tensor 1 x parallel.sequence 32"),
    ],
)
def test_impossible_degrees_are_told(degrees: dict[str, int], devices: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        candidates(RUN, JSONS, A100, devices, [], [ParallelConfig(**degrees)])


def test_a_pipeline_is_refused_where_deepspeed_refuses_it() -> None:
    with pytest.raises(ConfigError, match="pipeline 2 with ZeRO 3"):
        candidates(RUN, JSONS[3:], A100, 8, [], [ParallelConfig(pipeline=2)])


def test_a_stage_without_adapters_is_refused_before_it_is_started() -> None:
    adapted = ["lora.rank=8", "lora.targets=['blocks.[0-9].*']"]  # the first ten of twenty
    assert candidates(RUN, JSONS[1:2], A100, 8, adapted, [ALONE])
    with pytest.raises(ConfigError, match="no map of blocks 10 to 19, which are stage 1 of 2"):
        candidates(RUN, JSONS[1:2], A100, 8, adapted, [ParallelConfig(pipeline=2)])


def test_the_slowest_stage_sets_the_pace() -> None:
    """Of 11 and 9 blocks: to move one of them makes the slower stage slower."""
    cut = shapes(pipeline=2, model=shapes().model.model_copy(update={"vocab_size": 50304}))  # type: ignore[arg-type]
    assert [len(cut.blocks(stage)) for stage in range(2)] == [11, 9]
    clocks = [Clock(cut, A100, Constants(), stage) for stage in range(2)]
    first, last = (clock.forward_s + clock.backward_s for clock in clocks)
    slowest = clocks[first < last]
    assert speed_of(cut, A100).parts.items() >= slowest.parts.items()
    assert abs(first - last) < first / 11


def test_what_is_proved_can_be_run_and_the_rest_is_on_paper() -> None:
    splits = list(possible(shapes().model, 8, 8))
    assert {split.used for split in splits} == set(COMBINATIONS) and not any(sharing_problems(split, shapes().model, 8) for split in splits)
    found = candidates(RUN, JSONS, A100, 8, [], splits)
    kinds = {(candidate.degrees.used, candidate.shapes.stage): candidate for candidate in found}
    for (used, stage), candidate in kinds.items():
        assert candidate.on_paper == (stage not in COMBINATIONS.get(used, ()))
    assert {candidate.on_paper for candidate in kinds.values()} == {True, False}
    for candidate in kinds.values():  # every setting that can be run composes to what was planned
        if not candidate.on_paper:
            run = load(RUN, candidate.deepspeed_config, A100.hardware(8), candidate.overrides)
            assert Shapes.of(run) == candidate.shapes


def test_the_search_recommends_what_can_be_run_where_anything_can() -> None:
    found = candidates(RUN, JSONS, A100, 8, [], possible(shapes().model, 8, 8))
    can = recommended(found)
    assert not can.on_paper
    faster = replace(can, shapes=replace(can.shapes, stage=3, tensor=2), speed=replace(can.speed, tokens_per_s=2 * can.speed.tokens_per_s))
    assert faster.on_paper and recommended(ranked([can, faster])) == can


def test_a_model_that_data_parallel_ranks_cannot_hold_is_split() -> None:
    big = ["model.layers=64", "model.width=8192", "model.heads=64", "model.ffn_width=32768", "batch.micro_batch_size=1"]
    device = device_named("a100-80gb")
    alone = recommended(candidates(RUN, JSONS[:2], device, 64, big))
    split = recommended(candidates(RUN, JSONS[:2], device, 64, big, possible(alone.shapes.model, 64, 8)))
    assert not alone.fits and split.fits and not split.on_paper  # 52B parameters: ZeRO 1 alone keeps all weights on every device


def test_the_runs_own_degrees_are_planned_for(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(Path(RUN).read_text() + "\nparallel: {tensor: 2}\n")
    found = candidates(str(run), JSONS[1:2], A100, 8, [])
    assert {candidate.degrees for candidate in found} == {ParallelConfig(tensor=2)}
    assert not any("parallel" in setting for candidate in found for setting in candidate.overrides)
    other = candidates(str(run), JSONS[1:2], A100, 8, ["parallel.tensor=1", "parallel.sequence=4"])
    assert {candidate.degrees for candidate in other} == {ParallelConfig(sequence=4)}


def test_the_cheapest_device_is_the_one_whose_bill_is_least() -> None:
    found = cheapest(RUN, JSONS, DEVICES.values(), 8, [], ALONE)
    assert [cost for cost, _, _ in found] == sorted(cost for cost, _, _ in found)
    for cost, device, best in found:
        assert best.fits and cost == pytest.approx(device.price * 8 / 3600 / best.speed.tokens_per_s * 1e6)
    assert {device.key for _, device, _ in found} <= {device.key for device in DEVICES.values() if device.price}
