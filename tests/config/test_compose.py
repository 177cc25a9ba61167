"""Composition: batch arithmetic, disagreements, precision, optimizer, owners."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from config_bench import A100, CPU, DEEPSPEED, RUN, V100

from ds_gpt.config import ConfigError, Hardware, load

SHIPPED = Path(__file__).resolve().parents[2] / "ds_configs"
SIZES = (None, 1, 2, 3, 8, 12)


def cpu(world_size: int) -> Hardware:
    return Hardware("cpu", "CPU", world_size, False)


def batch_overrides(total: int, micro: int | None, accumulation: int | None, micro_key: str) -> list[str]:
    overrides = [f"batch.global_batch_size={total}"]
    overrides += [f"{micro_key}={micro}"] if micro else []
    return overrides + ([f"gradient_accumulation_steps={accumulation}"] if accumulation else [])


def suggestions(fix: str) -> Iterator[tuple[str, int]]:
    """Every (key, number) that a remedy of the batch names."""
    for part in fix.removeprefix("set ").split(", or "):
        key, _, numbers = part.partition(" to ")
        yield from ((key, int(number)) for number in numbers.split(" or "))


@pytest.mark.parametrize("micro_key", ["batch.micro_batch_size", "train_micro_batch_size_per_gpu"])
def test_batch_arithmetic_holds_and_every_suggestion_works(bench, micro_key: str) -> None:
    """micro x accumulation x ranks = global wherever it composes; where it does not, each remedy alone mends it."""
    composed_count, suggestion_count = 0, 0
    for total, ranks, micro, accumulation in itertools.product((1, 7, 12, 16, 64), (1, 2, 3, 8), SIZES, SIZES):
        stated = {"batch.global_batch_size": total, micro_key: micro, "gradient_accumulation_steps": accumulation}
        overrides = batch_overrides(total, micro, accumulation, micro_key)
        divides = total % (ranks * (micro or 1) * (accumulation or 1)) == 0
        possible = divides if not (micro and accumulation) else total == ranks * micro * accumulation
        try:
            composed = bench.load(*overrides, on=cpu(ranks))
        except ConfigError as error:
            assert not possible, (stated, ranks)
            (problem,) = error.problems
            named = list(suggestions(problem.fix))
            assert named, problem.fix
            for key, number in named:
                on = cpu(number) if key == "the number of ranks" else cpu(ranks)
                assert key in stated or key == "the number of ranks", key
                mended = bench.load(*overrides, *([f"{key}={number}"] if key in stated else []), on=on)
                assert mended.micro_batch_size * mended.accumulation_steps * on.world_size == mended.run.batch.global_batch_size
            suggestion_count += len(named)
            continue
        assert possible, (stated, ranks)
        composed_count += 1
        assert composed.micro_batch_size * composed.accumulation_steps * ranks == total
        assert micro in (None, composed.micro_batch_size) and accumulation in (None, composed.accumulation_steps)
        if micro is None and accumulation is None:
            assert composed.accumulation_steps == 1  # "auto": no accumulation
        keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        assert tuple(composed.deepspeed[key] for key in keys) == (total, composed.micro_batch_size, composed.accumulation_steps)
    assert composed_count > 80 and suggestion_count > 1000


@pytest.mark.parametrize("key", ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "true", "x"])
def test_batch_numbers_must_be_positive_integers(bench, key: str, value: str) -> None:
    problem = bench.problem(f"{key}={value}")
    assert key in problem.what and "positive integer" in problem.what


STATED = {
    "train_batch_size": (32, "batch.global_batch_size", 64),
    "train_micro_batch_size_per_gpu": (4, "batch.micro_batch_size", 8),
    "optimizer.type": ("SGD", "optimizer.name", "adamw"),
    "optimizer.params.lr": (0.1, "optimizer.lr", 0.001),
    "optimizer.params.weight_decay": (0.3, "optimizer.weight_decay", 0.2),
    "optimizer.params.betas": ([0.5, 0.6], "optimizer.betas", [0.9, 0.95]),
    "optimizer.params.eps": (1e-3, "optimizer.eps", 1e-8),
}


def nested(values: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        section = result
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return result


def test_every_disagreement_is_listed_with_both_values_and_the_line_to_delete(bench, merged: Callable) -> None:
    bench.run(merged(RUN, {"batch": {"micro_batch_size": 8}, "optimizer": {"weight_decay": 0.2}}))
    bench.deepspeed(merged(DEEPSPEED, {**nested({key: stated for key, (stated, _, _) in STATED.items()}), "scheduler": {"type": "WarmupLR"}}))
    lines = bench.deepspeed_path.read_text().splitlines()
    problems = {p.what.split(" = ")[0]: p for p in bench.problems()}
    assert set(problems) == {*STATED, next(k for k in problems if k.startswith("scheduler"))}
    for key, (stated, run_key, value) in STATED.items():
        what, fix = problems[key].what, problems[key].fix
        assert f"{key} = {stated!r}" in what and f"{run_key} = {value!r}" in what
        match = re.search(r"delete it at ds\.json:(\d+)", fix)
        assert match and f'"{key.split(".")[-1]}"' in lines[int(match[1]) - 1], fix
    scheduler = next(p for key, p in problems.items() if key.startswith("scheduler"))
    assert "ds.json:" in scheduler.what and "schedule" in scheduler.fix


def test_a_value_that_the_run_left_to_its_default_is_called_so(bench, merged: Callable) -> None:
    bench.deepspeed(merged(DEEPSPEED, nested({"optimizer.params.eps": 1e-3})))
    assert "the default, run.yaml does not state it" in bench.problem().what


def test_a_disagreeing_set_is_to_be_dropped(bench) -> None:
    assert bench.problem("optimizer.params.lr=0.1").fix == "drop that --set"


@pytest.mark.parametrize("word", ["auto", "the same"])
def test_agreement_and_auto_are_accepted(bench, merged: Callable, word: str) -> None:
    same = {
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4, "optimizer.type": "AdamW", "optimizer.params.lr": 1e-3,
        "optimizer.params.weight_decay": 0.1, "optimizer.params.betas": [0.9, 0.95], "optimizer.params.eps": 1e-8,
    }  # fmt: skip
    stated = same if word == "the same" else dict.fromkeys(same, "auto") | {"scheduler": "auto"}
    bench.deepspeed(merged(DEEPSPEED, nested(stated)))
    bench.run(merged(RUN, {"batch": {"micro_batch_size": 8}}))
    composed = bench.load()
    assert {key: lookup(composed.deepspeed, key) for key in same} == same
    assert "scheduler" not in composed.deepspeed


def lookup(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


@pytest.mark.parametrize("value", ['"auto"', "null"])
@pytest.mark.parametrize("key", ["optimizer", "optimizer.params", "scheduler"])
def test_whole_sections_may_be_auto(bench, merged: Callable, key: str, value: str) -> None:
    bench.deepspeed(merged(DEEPSPEED, nested({key: json.loads(value)})))
    assert bench.load().deepspeed["optimizer"]["params"]["lr"] == 0.001


@pytest.mark.parametrize("value", [3, [1], "AdamW"])
def test_optimizer_params_must_be_a_section(bench, merged: Callable, value: Any) -> None:
    bench.deepspeed(merged(DEEPSPEED, {"optimizer": {"params": value}}))
    assert "optimizer.params" in bench.problem().what


@pytest.mark.parametrize(
    "key", ["zero_optimization.reduce_bucket_size", "zero_optimization.stage", "gradient_clipping", "data_types.param_dtype", "fp16.loss_scale", "fp16.enabled"]
)
def test_auto_that_nobody_fills_is_refused(bench, key: str) -> None:
    """Hugging Face fills these; DeepSpeed itself would get the word."""
    assert f"{key} = " in bench.problem(f"{key}=auto").what


def walk(values: Any) -> Iterator[Any]:
    yield values
    for value in values.values() if isinstance(values, dict) else values if isinstance(values, list) else ():
        yield from walk(value)


@pytest.mark.parametrize("on", [CPU, A100, V100], ids=lambda h: h.name)
@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda p: p.stem)
def test_no_auto_is_left_and_every_key_has_one_owner(path: Path, on: Hardware) -> None:
    for overrides in ((), ("optimizer.name=sgd",), ("gradient_accumulation_steps=1",)):
        composed = load(SHIPPED / "runs" / "quickstart.yaml", path, on, overrides)
        assert "auto" not in [value for value in walk(composed.deepspeed) if isinstance(value, str)]
        assert set(composed.owners) == set(leaves(composed.deepspeed))
        assert all(composed.owners.values())


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def test_owners_name_who_stated_it(bench, merged: Callable) -> None:
    bench.deepspeed(merged(DEEPSPEED, {"gradient_clipping": 1.0}))
    owners = bench.load("gradient_accumulation_steps=2", "zero_optimization.stage=2", on=A100).owners
    assert owners["gradient_clipping"] == "DeepSpeed config (ds.json:8)"
    assert owners["zero_optimization.stage"] == owners["gradient_accumulation_steps"] == "DeepSpeed config (--set)"
    assert owners["train_batch_size"] == "run config: batch (run.yaml) and 8 ranks"
    assert owners["optimizer.params.lr"] == "run config: optimizer (run.yaml)"
    assert owners["optimizer.params.torch_adam"] == "ds_gpt"
    assert owners["bf16.enabled"] == '"auto": NVIDIA A100-SXM4-40GB computes bf16 at full speed: on'


@pytest.mark.parametrize(
    ("on", "overrides", "precision", "enabled"),
    [
        (A100, (), "bf16", True),
        (CPU, (), "fp32", False),
        (V100, (), "fp32", False),
        (CPU, ("bf16.enabled=true",), "bf16", True),
        (A100, ("bf16.enabled=false",), "fp32", False),
        (A100, ("fp16.enabled=true",), "fp16", False),
        (V100, ("fp16.enabled=true",), "fp16", False),
        (A100, ("torch_autocast.enabled=true",), "bf16", False),
        (CPU, ("torch_autocast={enabled: true, dtype: bfloat16}",), "bf16", False),
        (A100, ("torch_autocast.enabled=false",), "bf16", True),
    ],
)
def test_precision(bench, on: Hardware, overrides: tuple[str, ...], precision: str, enabled: bool) -> None:
    composed = bench.load(*overrides, on=on)
    assert composed.precision == precision
    assert composed.deepspeed["bf16"]["enabled"] is enabled


def test_auto_precision_says_what_it_chose_and_why(bench) -> None:
    def note(*overrides: str, on: Hardware) -> list[str]:
        return [note for note in bench.load(*overrides, on=on).notes if "bf16" in note and "accumulate" not in note]

    assert note(on=A100) == ['bf16 is "auto" and NVIDIA A100-SXM4-40GB computes bf16 at full speed: on']
    assert note(on=V100) == ['bf16 is "auto" and Tesla V100-SXM2-32GB does not compute bf16 at full speed: fp32']
    assert note("fp16.enabled=true", on=A100) == ['bf16 is "auto" and fp16 is enabled: off']
    assert note("bf16.enabled=true", on=CPU) == []


@pytest.mark.parametrize("section", ["fp16", "torch_autocast"])
def test_two_precisions_are_refused(bench, section: str) -> None:
    assert f"bf16 and {section} are both enabled" in bench.problem("bf16.enabled=true", f"{section}.enabled=true").what


def test_fp16_needs_zero(bench) -> None:
    problem = bench.problem("fp16.enabled=true", "zero_optimization.stage=0")
    assert "fp16 with ZeRO stage 0" in problem.what and "stage: 1" in problem.fix


@pytest.mark.parametrize("setting", ["bf16.enabled=maybe", "bf16.enabled=1", "fp16.enabled=auto", "fp16.enabled=0", "torch_autocast.enabled='true'"])
def test_enabled_is_a_boolean(bench, setting: str) -> None:
    key = setting.partition("=")[0]
    assert f"{key} = " in bench.problem(setting).what


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("overrides", "bf16"), [(("bf16.enabled=true",), True), (("bf16.enabled=false",), False), (("bf16=null", "fp16.enabled=true"), False)]
)
def test_auto_accumulation_dtype(bench, stage: int, overrides: tuple[str, ...], bf16: bool) -> None:
    if "fp16.enabled=true" in overrides and stage == 0:
        pytest.skip("refused: test_fp16_needs_zero")
    composed = bench.load("data_types.grad_accum_dtype=auto", f"zero_optimization.stage={stage}", *overrides, on=A100)
    if bf16 and stage > 0:
        assert composed.deepspeed["data_types"] == {"grad_accum_dtype": "fp32"}
        assert "fp32" in composed.owners["data_types.grad_accum_dtype"]
    else:
        assert "data_types" not in composed.deepspeed
    loud = composed.precision != "fp32" and not (bf16 and stage > 0)
    assert any("gradients accumulate in" in note for note in composed.notes) is loud


def test_auto_accumulation_dtype_leaves_its_neighbours(bench) -> None:
    composed = bench.load("data_types={grad_accum_dtype: auto, buffer_dtype: fp32}")
    assert composed.deepspeed["data_types"] == {"buffer_dtype": "fp32"}


def test_fp32_accumulation_of_bf16_needs_zero(bench) -> None:
    overrides = ("bf16.enabled=true", "data_types.grad_accum_dtype=fp32")
    assert "ZeRO stage 0" in bench.problem(*overrides, "zero_optimization.stage=0").what
    assert bench.load(*overrides, "zero_optimization.stage=1").deepspeed["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize(
    ("on", "overrides", "torch_adam", "fused"),
    [
        (CPU, (), True, True),
        (A100, (), True, True),
        (CPU, ("zero_optimization.offload_optimizer.device=cpu",), True, True),
        (A100, ("zero_optimization.offload_optimizer.device=cpu",), None, None),  # DeepSpeedCPUAdam
        (A100, ("zero_optimization.stage=3", "zero_optimization.offload_optimizer={device: nvme, nvme_path: /nvme}"), None, None),
        (A100, ("zero_optimization.offload_optimizer.device=none",), True, True),
        (A100, ("zero_optimization.offload_optimizer.device=null",), True, True),
        (A100, ("optimizer.params.torch_adam=false",), False, None),
        (A100, ("optimizer.params.fused=false",), True, False),  # stated: not overridden in silence
        (A100, ("optimizer.params.fused=auto",), True, True),
    ],
)
def test_optimizer_implementation(bench, on: Hardware, overrides: tuple[str, ...], torch_adam: bool | None, fused: bool | None) -> None:
    if "fused=auto" in "".join(overrides):
        assert "not filled" in bench.problem(*overrides, on=on).what
        return
    optimizer = bench.load(*overrides, on=on).deepspeed["optimizer"]
    assert optimizer["type"] == "AdamW"
    assert (optimizer["params"].get("torch_adam"), optimizer["params"].get("fused")) == (torch_adam, fused)


@pytest.mark.parametrize("stage", [0, 1])
def test_sgd(bench, stage: int) -> None:
    composed = bench.load("optimizer.name=sgd", f"zero_optimization.stage={stage}", "optimizer.params.momentum=0.9")
    assert composed.deepspeed["optimizer"] == {"type": "SGD", "params": {"momentum": 0.9, "lr": 0.001, "weight_decay": 0.1}}
    assert composed.deepspeed.get("zero_allow_untested_optimizer") is (True if stage else None)


@pytest.mark.parametrize("stage", ["4", "-1", "1.0", "true", "two"])
def test_stage_is_0_to_3(bench, stage: str) -> None:
    assert "should be 0, 1, 2 or 3" in bench.problem(f"zero_optimization.stage={stage}").what


@pytest.mark.parametrize(("section", "needs"), [("offload_optimizer", 1), ("offload_param", 3)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_offload_needs_zero_and_the_suggested_stage_works(bench, section: str, needs: int, stage: int) -> None:
    overrides = (f"zero_optimization.{section}.device=cpu", f"zero_optimization.stage={stage}")
    if stage >= needs:
        assert bench.load(*overrides).zero_stage == stage
        return
    problem = bench.problem(*overrides)
    match = re.search(r"zero_optimization\.stage: (\d)", problem.fix)
    assert match and bench.load(*overrides, f"zero_optimization.stage={match[1]}").zero_stage == int(match[1])


def test_offload_device_is_known(bench) -> None:
    assert "should be none, cpu or nvme" in bench.problem("zero_optimization.offload_optimizer.device=gpu").what


@pytest.mark.parametrize("key", ["partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"])
def test_selective_checkpointing_excludes_deepspeeds_own(bench, key: str) -> None:
    assert f"'selective' with {key}" in bench.problem("activation_checkpointing.policy=selective", f"activation_checkpointing.{key}=true", on=A100).what
    bench.load("activation_checkpointing.policy=full", f"activation_checkpointing.{key}=true", "activation_checkpointing.partition_activations=true", on=A100)


def test_checkpointing_policy(bench) -> None:
    assert bench.load().checkpoint_policy is None
    assert bench.load("activation_checkpointing={}").checkpoint_policy == "full"  # present means on
    assert bench.load("activation_checkpointing.policy=selective").checkpoint_policy == "selective"
    assert "should be full or selective" in bench.problem("activation_checkpointing.policy=most").what
    assert "policy" not in bench.load("activation_checkpointing.policy=full").deepspeed["activation_checkpointing"]


def test_cpu_checkpointing_alone_fails_on_a_cpu(bench) -> None:
    key = "activation_checkpointing.cpu_checkpointing=true"
    assert "without partition_activations on a CPU" in bench.problem(key).what
    bench.load(key, on=A100)
    bench.load(key, "activation_checkpointing.partition_activations=true")


@pytest.mark.parametrize("value", ["-1", "true", "lots", ".nan", ".inf"])
def test_gradient_clipping_is_a_number(bench, value: str) -> None:
    assert "gradient_clipping" in bench.problem(f"gradient_clipping={value}").what
    assert bench.load("gradient_clipping=0").deepspeed["gradient_clipping"] == 0


def test_accumulation_boundaries_belong_to_deepspeed(bench) -> None:
    assert "managed_gradient_accumulation" in bench.problem("managed_gradient_accumulation=false").what
    bench.load("managed_gradient_accumulation=true")


@pytest.mark.parametrize("name", ["cosine", "constant", "noam"])
@pytest.mark.parametrize(("warmup_steps", "peak"), [(9, None), (10, "only in the last one"), (50, "never")])
def test_a_warm_up_as_long_as_the_run_is_noted(bench, name: str, warmup_steps: int, peak: str | None) -> None:
    notes = bench.load(f"schedule.name={name}", f"schedule.warmup_steps={warmup_steps}").notes
    found = [note for note in notes if "schedule.warmup_steps" in note]
    expected = [f"schedule.warmup_steps = {warmup_steps} of training.steps = 10: the learning rate rises to the end, and reaches its peak {peak}"]
    assert found == (expected if peak else [])


def test_compiling_is_off_unless_the_json_says_so(bench) -> None:
    assert not bench.load().compiled
    assert not bench.load("compile.enabled=false").compiled
    composed = bench.load("compile.enabled=true")
    assert composed.compiled and composed.deepspeed["compile"] == {}, "our own word is not DeepSpeed's"


def test_what_cannot_be_compiled_is_said(bench) -> None:
    assert "compile.enabled = 'yes, please'" in bench.problem("compile.enabled='yes, please'").what
    assert "without compile.enabled" in bench.problem("compile.deepcompile=true", on=A100).what
    bench.load("compile={enabled: true, deepcompile: true}", on=A100)
    assert bench.problem("compile={enabled: true, deepcompile: true}").why.endswith("CUDA extension")
