"""Values of the DeepSpeed JSON that DeepSpeed would answer with a traceback are told by us, with key, reason and remedy.

``tests/engine/test_deepspeed_refusals.py`` shows that DeepSpeed still does.
"""

from __future__ import annotations

import importlib.util

import pytest
from config_bench import A100, CPU

from ds_gpt.config import Hardware

ZERO = "zero_optimization"
REFUSED = [
    (CPU, 2, "prescale_gradients=true", "prescale_gradients = True (--set) with ZeRO stage 2 or 3"),
    (CPU, 3, "gradient_predivide_factor=2.0", "gradient_predivide_factor = 2.0"),
    (A100, 1, "gradient_allreduce_op=sum", "gradient_allreduce_op = 'sum'"),
    (CPU, 1, f"{ZERO}.compute_grad_norm=false", f"{ZERO}.compute_grad_norm = False"),
    (CPU, 3, f"{ZERO}.override_module_apply=false", f"{ZERO}.override_module_apply = False"),
    (CPU, 1, f"{ZERO}.legacy_stage1=true", f"{ZERO}.legacy_stage1 = True"),
    (A100, 2, f"{ZERO}.zenflow={{topk_ratio: 0.1}}", f"{ZERO}.zenflow = "),
    (CPU, 3, f"{ZERO}.zero_quantized_weights=true", f"{ZERO}.zero_quantized_weights = True (--set) on a CPU"),
    (CPU, 3, f"{ZERO}.offload_optimizer={{device: cpu, ratio: 0.5}}", f"{ZERO}.offload_optimizer.ratio = 0.5"),
    (A100, 2, f"{ZERO}.offload_optimizer={{device: cpu, ratio: 0.5}}", f"{ZERO}.offload_optimizer.ratio = 0.5"),
    (CPU, 3, f"{ZERO}.offload_optimizer={{device: cpu, super_offload: true}}", f"{ZERO}.offload_optimizer.super_offload = True"),
    (A100, 2, f"{ZERO}.offload_optimizer={{device: nvme, nvme_path: /x}}", f"{ZERO}.offload_optimizer.device = 'nvme' with ZeRO stage 2"),
    (A100, 3, f"{ZERO}.offload_param={{device: nvme}}", f"{ZERO}.offload_param.device = 'nvme' without nvme_path"),
    (CPU, 1, "steps_per_print=0", "steps_per_print = 0"),
    (CPU, 1, "data_types.grad_accum_dtype=fp23", "data_types.grad_accum_dtype = 'fp23'"),
    (A100, 1, "fp16={enabled: true, fp16_master_weights_and_grads: true}", "fp16.fp16_master_weights_and_grads = True"),
    (A100, 3, "bf16={enabled: true, bf16_master_weights_and_grads: true}", "bf16.bf16_master_weights_and_grads = True"),
    (CPU, 1, "activation_checkpointing={contiguous_memory_optimization: true}", "activation_checkpointing.contiguous_memory_optimization"),
]


@pytest.mark.parametrize(("on", "stage", "setting", "what"), REFUSED, ids=lambda value: str(value)[:60])
def test_it_is_told_at_compose_time(bench, on: Hardware, stage: int, setting: str, what: str) -> None:
    settings = [setting] + ["bf16.enabled=false"] * setting.startswith("fp16")
    problem = bench.problem(f"{ZERO}.stage={stage}", *settings, on=on)
    assert problem.what.startswith(what) and problem.why and problem.fix


@pytest.mark.parametrize(
    ("on", "stage", "setting"),
    [
        (CPU, 1, "prescale_gradients=true"),
        (CPU, 0, "gradient_predivide_factor=2.0"),
        (CPU, 1, f"{ZERO}.compute_grad_norm=true"),
        (A100, 3, f"{ZERO}.zero_quantized_weights=true"),
        (A100, 3, f"{ZERO}.offload_optimizer={{device: cpu, ratio: 0.5}}"),
        (A100, 3, f"{ZERO}.offload_param={{device: nvme, nvme_path: /x}}"),
        (A100, 3, f"{ZERO}.offload_optimizer={{device: cpu}}"),
    ],
)
def test_where_deepspeed_takes_it_so_do_we(bench, on: Hardware, stage: int, setting: str) -> None:
    bench.load(f"{ZERO}.stage={stage}", setting, on=on)


def test_a_value_of_the_wrong_type_is_left_to_deepspeeds_own_words(bench) -> None:
    bench.load(f"{ZERO}.offload_optimizer={{device: cpu, ratio: half}}")


def test_a_reporter_that_is_not_installed(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("ds_gpt.config.refusals.find_spec", lambda name: None if name == "wandb" else found(name))
    problem = bench.problem("wandb.enabled=true")
    assert "no package 'wandb'" in problem.what and problem.fix.startswith("pip install wandb")
    bench.load("wandb.enabled=false")
