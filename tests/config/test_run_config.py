"""The run YAML as types: unknown keys, wrong types, impossible shapes, all problems in one error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_bench import A100, CPU, DEEPSPEED, RUN, V100

from ds_gpt.config import ConfigError, Hardware, load
from ds_gpt.config.hardware import peak_flops
from ds_gpt.config.parse import with_vocabulary

SHIPPED = Path(__file__).resolve().parents[2] / "ds_configs"


@pytest.mark.parametrize(
    ("override", "what", "fix"),
    [
        ("model.layer=3", "unknown key 'model.layer'", "did you mean 'layers'?"),
        ("traning.steps=3", "neither file has a key 'traning'", "did you mean 'training'?"),
        ("data.synthetic.branch=3", "unknown key 'data.synthetic.branch'", "did you mean 'branching'?"),
        ("checkpoints.evry=3", "unknown key 'checkpoints.evry'", "did you mean 'every'?"),
        ("zero_optimization.stge=3", "unknown key 'zero_optimization.stge'", "did you mean 'stage'?"),
        ("zero_optimization.offload_param.devise=cpu", "unknown key 'zero_optimization.offload_param.devise'", "did you mean 'device'?"),
        ("gradient_cliping=1.0", "neither file has a key 'gradient_cliping'", "did you mean 'gradient_clipping'?"),
        ("bf16.enable=true", "unknown key 'bf16.enable'", "did you mean 'enabled'?"),
    ],
)
def test_unknown_keys_are_answered_with_the_nearest_known_one(bench, override: str, what: str, fix: str) -> None:
    problem = bench.problem(override)
    assert what in problem.what and problem.fix == fix


def test_unknown_keys_in_the_files_name_file_and_line(bench, merged: Callable) -> None:
    bench.run("name: test\nmodel: {layers: 2, width: 64, heads: 4, context: 32}\nbatch:\n  global_batch_size: 64\n  microbatch: 3\n" + REST)
    bench.deepspeed(merged(DEEPSPEED, {"gradient_cliping": 1.0}))
    problems = bench.problems()
    assert ["run.yaml:5" in problems[0].what, "ds.json:8" in problems[1].what] == [True, True], problems
    assert "DeepSpeed ignores unknown top-level keys in silence" in problems[1].why


REST = "optimizer: {lr: 1e-3}\ntraining: {steps: 10}\n"


@pytest.mark.parametrize("key", ["a.b", "model.layers"])
def test_a_key_with_a_dot_is_unknown_and_no_crash(bench, key: str) -> None:
    bench.run({**RUN, key: 4})
    assert f"unknown key '{key}'" in bench.problem().what


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.steps=ten", "training.steps = 'ten' (str) (--set) should be a valid integer"),
        ("training.steps=1e3", "should be a valid integer"),
        ("training.steps=true", "should be a valid integer"),
        ("training.steps=0", "should be greater than 0"),
        ("optimizer.lr='1e-3'", "optimizer.lr = '1e-3' (str) (--set) should be a valid number"),
        ("optimizer.lr=-1", "should be greater than 0"),
        ("optimizer.lr=.inf", "should be a finite number"),
        ("optimizer.lr=.nan", "optimizer.lr = nan (--set) should be"),
        ("optimizer.betas=[0.9]", "optimizer.betas = [0.9] (--set) should"),
        ("optimizer.betas=[0.9, 1.0]", "should be less than 1"),
        ("model.dropout=1.0", "should be less than 1"),
        ("model.vocab_size=many", "should be a valid integer or be 'auto'"),
        ("schedule.name=linear", "should be 'cosine', 'noam' or 'constant'"),
        ("name=../escape", "should match pattern"),
        ("name=5", "should be a valid string"),
        ("logging.tensorboard=1", "should be a valid boolean"),
        ("model=3", "model = 3 (--set) should be a section: keys with values"),
        ("model.heads.x=3", "should be a valid integer"),
        ("seed=-1", "should be greater than or equal to 0"),
        ("data.val_fraction=0", "should be greater than 0"),
    ],
)
def test_wrong_types_and_ranges_name_the_value_and_what_it_should_be(bench, override: str, said: str) -> None:
    assert said in bench.problem(override).what


def test_missing_keys_are_all_named(bench) -> None:
    bench.run("name: test\n")
    assert [p.what.split("'")[1] for p in bench.problems()] == ["model", "batch", "optimizer", "training"]


def test_every_problem_of_both_files_stands_in_one_error(bench, merged: Callable) -> None:
    bench.deepspeed(merged(DEEPSPEED, {"gradient_cliping": 1.0, "fp16": {"enabled": True}, "bf16": {"enabled": True}}))
    problems = bench.problems("model.layers=0", "optimizer.lr=fast")
    assert len(problems) == 4
    text = str(ConfigError(problems))
    assert [line[:3] for line in text.splitlines() if line[:1].isdigit()] == ["1. ", "2. ", "3. ", "4. "]


def test_impossible_combinations_of_sound_values_stand_in_one_error(bench) -> None:
    problems = bench.problems(
        "model.heads=5", "schedule.name=noam", "batch.global_batch_size=63", "zero_optimization.offload_param.device=cpu",
        "train_batch_size=8", "activation_checkpointing.policy=some", "gradient_clipping=-1",
    )  # fmt: skip
    assert len(problems) == 7
    assert all(p.what and p.fix for p in problems)


def test_a_lone_problem_is_not_numbered(bench) -> None:
    with pytest.raises(ConfigError) as caught:
        bench.load("training.steps=0")
    assert str(caught.value).startswith("training.steps = 0") and "\ndo:  " in str(caught.value)


@pytest.mark.parametrize(("width", "heads"), [(64, 5), (768, 11), (65, 64), (7, 2), (100, 1000)])
def test_heads_that_do_not_divide_get_a_suggestion_that_works(bench, width: int, heads: int) -> None:
    problem = bench.problem(f"model.width={width}", f"model.heads={heads}")
    suggested = int(problem.fix.rpartition(" ")[2])
    assert bench.load(f"model.width={width}", f"model.heads={suggested}").run.model.head_width * suggested == width


def test_noam_needs_warmup(bench) -> None:
    assert "schedule.warmup_steps" in bench.problem("schedule.name=noam").what
    bench.load("schedule.name=noam", "schedule.warmup_steps=1")


def test_a_cosine_must_not_rise(bench) -> None:
    problem = bench.problem("schedule.min_lr=0.01")
    assert "schedule.min_lr = 0.01" in problem.what and "optimizer.lr = 0.001" in problem.what
    bench.load(f"schedule.min_lr={problem.fix.rpartition(' ')[2]}")
    bench.load("schedule.min_lr=0.001")
    bench.load("schedule={name: noam, warmup_steps: 3, min_lr: 0.01}")


def test_a_synthetic_token_has_no_more_successors_than_tokens(bench) -> None:
    assert "data.synthetic.branching = 65" in bench.problem("data.corpus=synthetic", "data.synthetic.branching=65").what
    bench.load("data.corpus=synthetic", "data.synthetic.branching=64")
    bench.load("data.synthetic.branching=65")  # another corpus: not in use


def test_the_vocabulary_is_settled_once(bench) -> None:
    run = bench.load().run
    assert with_vocabulary(run, 96).model.vocabulary == 96
    assert run.model.vocab_size == "auto"  # frozen: a copy was made
    padded = bench.load("model.vocab_size=128").run
    assert with_vocabulary(padded, 96).model.vocabulary == 128
    with pytest.raises(ConfigError, match="model.vocab_size = 128.*needs 129"):
        with_vocabulary(padded, 129)


def test_derived_values(bench) -> None:
    run = bench.load("schedule.decay_steps=7", "logging={level: DEBUG, every: 5}", "model.ffn_width=100").run
    assert (run.decay_steps, run.log_every, run.model.hidden_width, run.model.head_width) == (7, 1, 100, 16)
    run = bench.load("logging.every=5").run
    assert (run.decay_steps, run.log_every, run.model.hidden_width) == (10, 5, 256)


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12, 156e12),
        ("NVIDIA A100 80GB PCIe", 312e12, 156e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 494e12),
        ("NVIDIA H100 PCIe", 756e12, 378e12),
        ("NVIDIA H200", 989e12, 494e12),
        ("NVIDIA GH200 480GB", 989e12, 494e12),
        ("NVIDIA A10G", 70e12, 35e12),
        ("NVIDIA A10", 125e12, 62.5e12),
        ("NVIDIA A40", 149.7e12, 74.8e12),
        ("NVIDIA RTX A6000", 154.8e12, 77.4e12),
        ("NVIDIA L40S", 362e12, 183e12),
        ("NVIDIA L4", 121e12, 60e12),
        ("Tesla V100-SXM2-32GB", 125e12, 15.7e12),
        ("Tesla T4", 65e12, 8.1e12),
    ],
)
def test_peak_throughput_of_known_devices(name: str, bf16: float, fp32: float) -> None:
    assert (peak_flops(name, "bf16"), peak_flops(name, "fp16"), peak_flops(name, "fp32")) == (bf16, bf16, fp32)


@pytest.mark.parametrize("name", ["CPU", "", "NVIDIA RTX A4000", "NVIDIA T400 4GB", "Quadro GV100", "NVIDIA A30", "NVIDIA A100X", "NVIDIA L400"])
def test_peak_throughput_is_never_guessed(name: str) -> None:
    """"RTX A4000" contains "A40": looked up as bare text it had the peak of another card, and so the wrong MFU."""
    assert peak_flops(name, "bf16") is None


@pytest.mark.parametrize("path", sorted((SHIPPED / "runs").glob("*.yaml")), ids=lambda p: p.stem)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16])
def test_shipped_runs_compose_at_usual_world_sizes(path: Path, world_size: int) -> None:
    """A user with half the GPUs is not stopped by our own files (the 1B run holds 64 sequences: 8 x 8 at most)."""
    wide = path.stem == "gpt_1b" and world_size == 16
    overrides = ["batch.micro_batch_size=4"] if wide else []
    composed = load(path, SHIPPED / "zero2.json", Hardware("cuda", A100.name, world_size, True), overrides)
    assert composed.micro_batch_size * composed.accumulation_steps * world_size == composed.run.batch.global_batch_size
    sequences = 2 if composed.run.stage in ("dpo", "reward") else 1
    assert composed.tokens_per_step == sequences * composed.run.batch.global_batch_size * composed.run.model.context


def test_published_numbers_of_the_1b_run() -> None:
    composed = load(SHIPPED / "runs" / "gpt_1b.yaml", SHIPPED / "zero2.json", A100)
    assert (composed.tokens_per_step, composed.micro_batch_size, composed.accumulation_steps, composed.zero_stage) == (131_072, 8, 1, 2)


def test_machines_of_these_tests_differ() -> None:
    assert {(h.kind, h.bf16) for h in (CPU, A100, V100)} == {("cpu", False), ("cuda", True), ("cuda", False)}


def test_inputs_are_not_changed_by_composing(bench) -> None:
    from ds_gpt.config.compose import compose
    from ds_gpt.config.files import read_deepspeed_json, read_run_yaml

    run, deepspeed = read_run_yaml(bench.run_path), read_deepspeed_json(bench.deepspeed_path)
    before: Any = repr((run, deepspeed))
    compose(run, deepspeed, A100)
    assert repr((run, deepspeed)) == before


def test_options_of_the_model_are_off_by_default(bench) -> None:
    model = bench.load().run.model
    assert (model.positions, model.norm, model.ffn, model.bias, model.qk_norm, model.sliding_window, model.tied_head) == ("learned", "layernorm", "gelu", True, False, None, True)
    assert model.key_heads == model.heads


def test_swiglu_has_as_many_weights_as_gelu_had(bench) -> None:
    """Three matrices of 8/3 x width instead of two of 4 x width, up to a multiple of 64."""
    widths = {width: bench.load("model.ffn=swiglu", f"model.width={width}", "model.heads=8").run.model.hidden_width for width in (48, 192, 4096)}
    assert widths == {48: 128, 192: 512, 4096: 10944}


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 3), (8, 16), (12, 5)])
def test_kv_heads_that_do_not_divide_get_a_suggestion_that_works(bench, heads: int, kv_heads: int) -> None:
    problem = bench.problem("model.width=96", f"model.heads={heads}", f"model.kv_heads={kv_heads}")
    suggested = int(problem.fix.rpartition(" ")[2])
    assert heads % bench.load("model.width=96", f"model.heads={heads}", f"model.kv_heads={suggested}").run.model.key_heads == 0


def test_rotation_needs_pairs_of_channels(bench) -> None:
    assert "heads of 9 channels" in bench.problem("model.width=36", "model.heads=4", "model.positions=rotary").what
    bench.load("model.width=36", "model.heads=4")


def test_all_that_is_wrong_with_a_shape_is_said_at_once(bench) -> None:
    assert len(bench.problems("model.width=30", "model.heads=4", "model.kv_heads=3")) == 2
