"""Degrees of parallelism: what goes together, and what is refused."""

from __future__ import annotations

import pytest
from tiny import tiny

from ds_gpt.config import ConfigError, ParallelConfig


def test_without_degrees_all_ranks_are_data_parallel() -> None:
    composed = tiny("zero1", 4)
    assert composed.data_ranks == 4 and str(composed.run.parallel) == "data parallel alone"


def test_degrees_have_a_product_and_a_name() -> None:
    parallel = ParallelConfig(tensor=2, pipeline=3)
    assert parallel.product == 6 and str(parallel) == "tensor 2 x pipeline 3"


def test_all_together_is_refused_and_says_why() -> None:
    remedy = "use pipeline x tensor or sequence x tensor or pipeline x sequence$"
    with pytest.raises(ConfigError, match=f"(?s)does not work together.*{remedy}"):
        tiny("zero1", 8, ["parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=2"])


def test_who_divides_the_batch_is_told() -> None:
    for stated in ([], ["train_batch_size=16"]):  # DeepSpeed gets another number than is stated: 32
        owners = tiny("zero1", 4, ["parallel.sequence=2", *stated]).owners
        assert owners["train_batch_size"].endswith("and 2 data ranks of 4, each sequence in 2 parts")
    assert tiny("zero1", 4, ["train_batch_size=16"]).owners["train_batch_size"] == "DeepSpeed config (--set)"
    assert tiny("zero1", 4, ["parallel.tensor=2"]).owners["train_batch_size"].endswith("and 2 data ranks of 4")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["stage=dpo"], "stage = 'dpo' with parallel.sequence = 2"),
        (["stage=reward"], "stage = 'reward' with parallel.sequence = 2"),
        (["objective.name=masked"], "objective.name = 'masked' with parallel.sequence = 2"),
        (["compile.enabled=true"], r"compile.enabled \(--set\) with parallel.sequence = 2"),
    ],
)
def test_what_ranks_that_share_sequences_cannot_do_is_refused(settings: list[str], complaint: str) -> None:
    tiny("zero1", 2, settings)
    with pytest.raises(ConfigError, match=complaint):
        tiny("zero1", 2, [*settings, "parallel.sequence=2"])


def test_a_batch_is_divided_among_data_parallel_ranks() -> None:
    with pytest.raises(ConfigError, match=r"(?s)is not 3 data-parallel ranks \(6 / 2\).*the number of ranks to 2 or 4 or 8 or 16"):
        tiny("zero1", 6, ["parallel.sequence=2"])


def test_ranks_that_share_sequences_take_the_same_batches() -> None:
    composed = tiny("zero1", 4, ["parallel.sequence=2", "batch.micro_batch_size=2"])
    assert (composed.data_ranks, composed.accumulation_steps) == (2, 4)
    assert composed.deepspeed["train_batch_size"] == 32  # of half the length each


def test_ranks_that_are_no_whole_number_of_copies_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 ranks are not a whole number of times pipeline 3"):
        tiny("zero1", 4, ["parallel.pipeline=3"])
    with pytest.raises(ConfigError, match="^1 rank is not a whole number of times tensor 2"):
        tiny("zero1", 1, ["parallel.tensor=2"])


@pytest.mark.parametrize(
    ("settings", "ranks", "complaint"),
    [
        (["parallel.tensor=8"], 8, "model.heads = 4 is not a multiple"),
        (["parallel.tensor=4", "model.kv_heads=2"], 4, "2 heads of keys"),
        (["parallel.tensor=4", "model.ffn_width=30"], 4, "feed-forward width 30"),
        (["parallel.pipeline=4"], 4, "more than model.layers = 2"),
        (["parallel.sequence=4", "model.context=18"], 4, "model.context = 18"),
    ],
)
def test_shapes_that_cannot_be_shared_out_are_refused(settings: list[str], ranks: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        tiny("zero1", ranks, settings)


def test_matrices_are_shared_with_zero_0_to_2() -> None:
    with pytest.raises(ConfigError, match="tensor 2 with zero_optimization.stage = 3(.|\n)*it works with ZeRO 0, 1, 2(.|\n)*stage: 2"):
        tiny("zero3", 2, ["parallel.tensor=2"])
    with pytest.raises(ConfigError, match="partition_activations(.|\n)* with parallel.tensor(.|\n)*policy: full"):
        tiny("zero1", 2, ["parallel.tensor=2", "activation_checkpointing={partition_activations: true}"])


def test_ranks_take_the_batch_that_their_data_parallel_rank_has() -> None:
    composed = tiny("zero1", 4, ["parallel.tensor=2", "batch.micro_batch_size=2"])
    assert composed.data_ranks == 2 and composed.accumulation_steps == 4
    assert composed.deepspeed["train_batch_size"] == 16 == 2 * 4 * 2


@pytest.mark.parametrize(
    ("deepspeed", "setting", "complaint"),
    [
        ("zero2", None, "pipeline 2 with zero_optimization.stage = 2(.|\n)*works with ZeRO 0, 1(.|\n)*stage: 1"),
        ("zero3", None, "pipeline 2 with zero_optimization.stage = 3(.|\n)*stage: 1"),
        ("zero1", "stage=dpo", "stage: dpo with parallel.pipeline"),
        ("zero1", "stage=reward", "stage: reward with parallel.pipeline"),
        ("zero1", "compile.enabled=true", r"compile.enabled \(--set\) with parallel.pipeline"),
        ("zero1", "torch_autocast={enabled: true, dtype: bfloat16}", "torch_autocast.enabled .* with parallel.pipeline(.|\n)*use bf16"),
        ("zero1", "zero_optimization.offload_optimizer={device: cpu}", "zero_optimization.offload_optimizer .* with parallel.pipeline"),
        ("zero1", "activation_checkpointing={partition_activations: true}", "partition_activations .* with parallel.pipeline"),
        ("zero1", "activation_checkpointing={partition_activations: true, contiguous_memory_optimization: true}", "contiguous_memory_optimization .* with"),
        ("zero1", "wall_clock_breakdown=true", r"wall_clock_breakdown \(--set\) with parallel.pipeline(.|\n)*timer"),
        ("zero1", "flops_profiler={enabled: true}", r"flops_profiler.enabled \(--set\) with parallel.pipeline"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(deepspeed: str, setting: str | None, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        tiny(deepspeed, 2, ["parallel.pipeline=2", *([setting] if setting else [])])
    if setting is not None:
        tiny(deepspeed, 2, [setting])  # it is the pipeline that is in the way


@pytest.mark.parametrize("section", ["pipeline={stages: 2}", "tensor_parallel={autotp_size: 2}"])
@pytest.mark.parametrize("degrees", [[], ["parallel.pipeline=2"], ["parallel.tensor=2"]], ids=str)
def test_degrees_are_not_read_from_the_deepspeed_config(section: str, degrees: list[str]) -> None:
    name = section.partition("=")[0]
    with pytest.raises(ConfigError, match=f"'{name}' (.|\n)*set parallel.{name.partition('_')[0]} in the run config"):
        tiny("zero1", 2, [*degrees, section])


@pytest.mark.parametrize("stage", ["auto", "'1'", "[1]", "{a: 1}", "1.5", "7", "-1", "true"])
def test_a_stage_that_is_none_is_told_once_whatever_the_degrees(stage: str) -> None:
    with pytest.raises(ConfigError, match="should be 0, 1, 2 or 3") as raised:
        tiny("zero1", 2, ["parallel.tensor=2", f"zero_optimization.stage={stage}"])
    assert len(raised.value.problems) == 1


def test_fp16_that_adds_gradients_up_in_fp32_is_refused_in_a_pipeline() -> None:
    settings = ["zero_optimization.stage=1", "data_types.grad_accum_dtype=fp32"]
    tiny("fp16", 2, settings)
    with pytest.raises(ConfigError, match="grad_accum_dtype = 'fp32' .* with fp16 with parallel.pipeline"):
        tiny("fp16", 2, [*settings, "parallel.pipeline=2"])


def test_a_pipeline_composes_with_what_is_off() -> None:
    settings = ["compile.enabled=false", "zero_optimization.offload_optimizer={device: none}", "torch_autocast={enabled: false}"]
    settings += ["wall_clock_breakdown=false", "flops_profiler={enabled: false}"]
    assert tiny("zero1", 4, ["parallel.pipeline=2", *settings]).data_ranks == 2


@pytest.mark.parametrize(("accumulation", "idle"), [(1, "50%"), (3, "25%"), (15, "6%")])
def test_the_bubble_of_a_pipeline_is_told(accumulation: int, idle: str) -> None:
    composed = tiny("zero1", 2, ["parallel.pipeline=2", f"batch.global_batch_size={accumulation}", f"gradient_accumulation_steps={accumulation}"])
    assert any(f"2 stages idle {idle} of the time" in note for note in composed.notes)
    assert not any("idle" in note for note in tiny("zero1", 2).notes)


@pytest.mark.parametrize(("batch", "stages", "ranks", "accumulation"), [(16, 2, 2, 8), (64, 2, 4, 8), (18, 2, 2, 9), (4, 2, 2, 4), (96, 4, 8, 16), (16, 1, 2, 1)])
def test_a_pipeline_is_kept_busy_where_nothing_else_is_said(batch: int, stages: int, ranks: int, accumulation: int) -> None:
    settings = [f"parallel.pipeline={stages}", "model.layers=4", f"batch.global_batch_size={batch}"]
    composed = tiny("zero1", ranks, settings)
    assert composed.accumulation_steps == accumulation
    assert composed.micro_batch_size * accumulation * composed.data_ranks == batch
    assert tiny("zero1", ranks, [*settings, "gradient_accumulation_steps=2"]).accumulation_steps == 2
