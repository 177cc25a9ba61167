"""``--set key=value`` over either file."""

from __future__ import annotations

import pytest


def test_set_reaches_either_file_and_any_depth(bench) -> None:
    composed = bench.load("training.steps=77", "zero_optimization.stage=3", "data.synthetic.branching=8", "zero_optimization.offload_param.device=cpu")
    assert composed.run.training.steps == 77
    assert composed.run.data.synthetic.branching == 8
    assert composed.zero_stage == 3
    assert composed.deepspeed["zero_optimization"]["offload_param"] == {"device": "cpu"}


def test_set_makes_sections_that_neither_file_has(bench) -> None:
    composed = bench.load("activation_checkpointing.policy=selective", "loss.label_smoothing=0.1")
    assert composed.checkpoint_policy == "selective"
    assert composed.run.loss.label_smoothing == 0.1
    assert composed.deepspeed["activation_checkpointing"] == {}


def test_set_replaces_a_whole_section_and_the_last_one_wins(bench) -> None:
    composed = bench.load("schedule={name: noam, warmup_steps: 4}", "schedule.warmup_steps=5", "optimizer.lr=1e-2", "optimizer.lr=3e-4")
    assert (composed.run.schedule.name, composed.run.schedule.warmup_steps, composed.run.optimizer.lr) == ("noam", 5, 3e-4)


def test_set_splits_at_the_first_equals_sign(bench) -> None:
    assert bench.load("sample.prompt=a=b").run.sample.prompt == "a=b"


def test_sections_that_both_files_have_are_told_apart(bench) -> None:
    composed = bench.load("optimizer.lr=0.01", "optimizer.params.torch_adam=false", "optimizer.type=AdamW")
    assert composed.run.optimizer.lr == 0.01
    assert composed.deepspeed["optimizer"]["params"]["torch_adam"] is False


def test_a_typo_in_a_shared_section_is_looked_up_in_the_run_config(bench) -> None:
    problem = bench.problem("optimizer.weight_deca=0.1")
    assert "optimizer.weight_deca" in problem.what and "run config (--set)" in problem.what
    assert problem.fix == "did you mean 'weight_decay'?"


def test_null_switches_a_section_off(bench) -> None:
    bench.deepspeed(
        {
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "activation_checkpointing": {"policy": "full"},
            "gradient_clipping": 1.0,
        }
    )
    composed = bench.load("bf16=null", "activation_checkpointing=null", "zero_optimization.offload_optimizer=null", "gradient_clipping=null")
    assert (composed.precision, composed.checkpoint_policy) == ("fp32", None)
    assert composed.deepspeed["zero_optimization"] == {"stage": 2}
    assert not {"bf16", "activation_checkpointing"} & set(composed.deepspeed)
    assert composed.owners["gradient_clipping"] == "DeepSpeed's default"  # null is not 0


@pytest.mark.parametrize(
    "key", ["zero_optimization", "zero_optimization.stage", "data_types", "data_types.grad_accum_dtype", "optimizer.params", "activation_checkpointing.policy"]
)
def test_null_means_not_stated_at_any_depth(bench, key: str) -> None:
    """A null that reached DeepSpeed, or a comparison with the stage, would crash far from here."""
    composed = bench.load(f"{key}=null", "optimizer.name=sgd")
    assert "null" not in repr(composed.deepspeed) and "None" not in repr(composed.deepspeed)
    assert composed.zero_stage in (0, 1)


@pytest.mark.parametrize("text", ["training.steps", "=3", "", ".x=1", "model..layers=3", "training.=3"])
def test_bad_syntax_is_answered_with_an_example(bench, text: str) -> None:
    problem = bench.problem(text)
    assert f"--set '{text}' is not key=value" in problem.what and "--set training.steps=100" in problem.fix


@pytest.mark.parametrize("text", ["[1, 2", "{a: 1, a: 2}", "'open", "{1: 2}"])
def test_a_value_that_is_not_yaml_is_an_error(bench, text: str) -> None:
    problem = bench.problem(f"schedule={text}")
    assert f"--set schedule: '{text}' is not a YAML value" in problem.what


@pytest.mark.parametrize("text", ["*.txt", "**/*.txt", "@here", "`ls`", "%d", "&co", " *.md "])
def test_what_yaml_keeps_for_itself_is_text(bench, text: str) -> None:
    assert bench.load(f"data.corpus={text}").run.data.corpus == text.strip()


def test_every_mistake_of_set_stands_in_one_error(bench) -> None:
    problems = bench.problems("zero_optimisation.stage=3", "optimizer.lr=fast", "model.width=129", "batch.global_batch_size=63", "a={b", "gradient_clipping=-1")
    said = ["'zero_optimisation'", "'{b' is not a YAML value", "optimizer.lr = 'fast'", "gradient_clipping = -1", "does not divide model.width = 129"]
    assert len(problems) == 6 and all(any(words in p.what for p in problems) for words in said), problems
    assert len(bench.problems("model.layer=3", "model.width=129")) == 2, "a shape can be judged beside an unknown key"
    assert len(bench.problems("model.layers=x", "model.width=129")) == 1, "a section that is not sound cannot"


def test_unknown_sections_are_answered_with_the_nearest_of_both_files(bench) -> None:
    problems = bench.problems("modle.layers=3", "zero_optimisation.stage=1", "xyzzy=1")
    assert [p.fix for p in problems[:2]] == ["did you mean 'model'?", "did you mean 'zero_optimization'?"]
    assert "known: " in problems[2].fix and "train_batch_size" in problems[2].fix and "training" in problems[2].fix


def test_messages_name_set_where_set_gave_the_value(bench) -> None:
    assert "(--set)" in bench.problem("model.layers=0").what
    assert "(--set)" in bench.problem("model={layers: 0, width: 64, heads: 4, context: 32}").what
    assert "(--set)" in bench.problem("zero_optimization={stage: 7}").what
    assert "(--set)" in bench.problem("tensor_parallel.autotp_size=2").what


def test_the_files_themselves_are_left_alone(bench) -> None:
    before = bench.run_path.read_bytes(), bench.deepspeed_path.read_bytes()
    bench.load("training.steps=5", "zero_optimization.stage=3")
    assert (bench.run_path.read_bytes(), bench.deepspeed_path.read_bytes()) == before
