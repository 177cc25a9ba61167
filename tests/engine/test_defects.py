"""Each defect of DeepSpeed that ds_gpt goes around: that DeepSpeed alone still has it, and that ds_gpt does not.

Where DeepSpeed mends one, its first test fails and names what can be removed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked_ranks import run_ranks
from tiny import tiny, tiny_loader, train_curve
from torch import nn

from ds_gpt.config import Composed, ConfigError

LR = 0.01
NAN, INF = math.nan, math.inf


def mended(what: str) -> str:
    return f"mended upstream: remove {what}"


def alone(model: nn.Module, stage: int = 0, **config: Any) -> Any:
    """DeepSpeed's own engine, without anything of ds_gpt."""
    import deepspeed

    base = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0, "betas": [0.9, 0.95], "torch_adam": True}},
    }
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=base | config, dist_init_required=False)[0]


def one_weight() -> nn.Linear:
    """y = 1 x: its gradient for the loss y is the input."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def push(engine: Any, gradient: float) -> float:
    """One step of `one_weight` on that gradient; the weight after it."""
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.tensor([[gradient]], dtype=dtype)).sum())
    engine.step()
    return engine.module.weight.item()


def whole_weights(model: nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters, gathered where ZeRO-3 has split them."""
    import deepspeed

    parameters = list(model.parameters())
    split = hasattr(parameters[0], "ds_id")
    with deepspeed.zero.GatheredParameters(parameters) if split else contextlib.nullcontext():
        return [parameter.detach().clone() for parameter in parameters]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# ---- The first Adam step of ZeRO-0 in bf16 ---------------------------------------------------------------------------


def alone_bf16_first_update(ranks: Any) -> float:
    engine = alone(one_weight(), bf16={"enabled": True})
    before = engine.optimizer.fp32_groups[0][0].clone()
    push(engine, 1.0)
    return (before - engine.optimizer.fp32_groups[0][0]).item() / LR


def test_deepspeeds_first_adam_step_of_bf16_without_zero_is_not_the_first() -> None:
    (update,) = run_ranks(1, alone_bf16_first_update)
    # A second step on gradients 0 and 1, both corrections for step 2: (0.1 / 0.19) / sqrt(0.05 / 0.0975).
    assert update == pytest.approx(0.735, abs=0.01), mended("undo_dummy_step (defects.py)")


def first_update(ranks: Any, composed: Composed) -> float:
    from ds_gpt.engine.engine import Engine

    engine = Engine(composed, ranks)
    masters = engine.deepspeed.optimizer.fp32_groups[0]
    before = [master.clone() for master in masters]
    equal = same([master.to(torch.bfloat16) for master in masters], [p for p in engine.model.parameters() if p.ndim > 1])
    assert equal, "master weights differ from the model's before the first step"
    engine.step(0, tiny_loader(composed, 0, 1).load(0), LR)
    return max((a - b).abs().max().item() for a, b in zip(masters, before, strict=True)) / LR


def test_our_first_adam_step_is_the_first() -> None:
    composed = tiny("zero0", 1, ["bf16.enabled=true", "optimizer.weight_decay=0.0"])
    (update,) = run_ranks(1, first_update, composed)
    assert update == pytest.approx(1.0, abs=1e-3)  # Adam's first step is the learning rate, whatever the gradient


# ---- fp32 without ZeRO: no norm, and NaN reaches the weights ---------------------------------------------------------


def alone_fp32(ranks: Any) -> tuple[float | None, float, bool]:
    engine = alone(one_weight())
    push(engine, 1.0)
    norm = engine.get_global_grad_norm()
    weight = push(engine, NAN if ranks.rank == 1 else 1.0)
    return norm, weight, engine.was_step_applied()


def test_deepspeed_has_no_norm_and_steps_on_nan_in_fp32_without_zero() -> None:
    for norm, weight, applied in run_ranks(2, alone_fp32):
        assert norm is None, mended("the norm of guard_plain_optimizer (defects.py)")
        assert math.isnan(weight) and applied, mended("the skipped step of guard_plain_optimizer (defects.py)")


def own_norm(ranks: Any, cases: list[Composed]) -> list[tuple[float, float]]:
    """(reported, computed here with PyTorch) norm of a first step."""
    from ds_gpt.engine.engine import Engine
    from ds_gpt.model.gpt import GPT

    norms = []
    for composed in cases:
        engine = Engine(composed, ranks)
        reported = engine.step(0, tiny_loader(composed, ranks.rank, ranks.world_size).load(0), LR).grad_norm
        engine.close()
        torch.manual_seed(composed.run.seed)
        model = GPT(composed.run.model)
        for rank in range(ranks.world_size):
            for inputs_BT, targets_BT in tiny_loader(composed, rank, ranks.world_size).load(0):
                loss = F.cross_entropy(model(inputs_BT).flatten(0, 1), targets_BT.flatten())
                (loss / ranks.world_size / composed.accumulation_steps).backward()
        norms.append((reported, torch.nn.utils.get_total_norm(p.grad for p in model.parameters()).item()))
    return norms


def test_our_norm_is_the_whole_gradients_before_clipping() -> None:
    cases = [tiny("zero0", 2, [f"gradient_clipping={clip}", f"gradient_accumulation_steps={k}"]) for clip in (0, 0.01) for k in (1, 2)]
    for norms in run_ranks(2, own_norm, cases):
        for reported, computed in norms:
            assert reported == pytest.approx(computed, rel=1e-5)


# ---- A gradient that is not finite, at every stage and precision -----------------------------------------------------

POISONED_STEP, STEPS = 2, 5


def poison(engine: Any, value: float) -> Any:
    """Make the next gradient of the embedding's output, and nothing else, `value`; the loss stays finite."""
    once = iter([None])

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        for _ in once:
            output.register_hook(lambda gradient: torch.full_like(gradient, value))

    return engine.model.embedding.register_forward_hook(hook)


def poisoned_curve(ranks: Any, composed: Composed, value: float | None) -> tuple[dict[int, Any], bool | None]:
    """The steps' results, and whether the weights outlived the step in which rank 1's first micro-step has a gradient of
    `value`. With `None` that step is left out."""
    from ds_gpt.engine.engine import Engine

    engine = Engine(composed, ranks)
    loader = tiny_loader(composed, ranks.rank, ranks.world_size)
    results, unchanged = {}, None
    for step in range(STEPS):
        if step != POISONED_STEP:
            results[step] = engine.step(step, loader.load(step), LR)
        elif value is not None:
            before = whole_weights(engine.model)
            handle = poison(engine, value) if ranks.rank == 1 else None
            results[step] = engine.step(step, loader.load(step), LR)
            if handle:
                handle.remove()
            unchanged = same(before, whole_weights(engine.model))
    loader.close()
    engine.close()
    return results, unchanged


def poisoned_and_not(ranks: Any, cases: list[Composed]) -> list[list[Any]]:
    return [[poisoned_curve(ranks, composed, value) for value in (None, NAN, INF)] for composed in cases]


def poison_cases(precision: str) -> list[Composed]:
    if precision == "fp16":  # hysteresis 1: the scale falls at the first overflow instead of the second
        settings = ["fp16.initial_scale_power=10", "fp16.hysteresis=1"]
        return [tiny("fp16", 2, [*settings, f"zero_optimization.stage={s}", f"gradient_accumulation_steps={k}"]) for s, k in ((1, 2), (2, 1), (3, 2))]
    settings = [f"bf16.enabled={str(precision == 'bf16').lower()}"]
    files = ["zero0", "zero1", "zero2", "zero3"] + (["zero2_offload", "zero3_offload"] if precision == "fp32" else [])
    return [tiny(file, 2, [*settings, f"gradient_accumulation_steps={1 + number % 2}"]) for number, file in enumerate(files)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(precision: str) -> None:
    cases = poison_cases(precision)
    by_rank = run_ranks(2, poisoned_and_not, cases)
    for curves in by_rank:
        for composed, (without, *poisoned) in zip(cases, curves, strict=True):
            for value, (results, unchanged) in zip((NAN, INF), poisoned, strict=True):
                case = f"ZeRO-{composed.zero_stage}, {precision}, {value}"
                skipped = results.pop(POISONED_STEP)
                assert not skipped.applied and unchanged, f"{case}: the step changed the weights"
                assert math.isfinite(skipped.loss) and not math.isfinite(skipped.grad_norm), case
                assert all(later.applied for later in results.values()), case
                if precision != "fp16":  # nothing of the skipped step is left, not in the optimizer either
                    assert results == without[0], case
                else:
                    assert [r.loss_scale for r in results.values()] == [1024.0, 1024.0, 512.0, 512.0], case
                    assert skipped.loss_scale == 512.0, case
                    assert [r.loss for r in results.values()] == pytest.approx([r.loss for r in without[0].values()], rel=1e-4), case


# ---- fp16: refused on a CPU; the loss scale ---------------------------------------------------------------------------


def alone_fp16(ranks: Any, stage: int, window: int) -> list[tuple[float, float]]:
    """(update / learning rate, reported norm) for steps on a gradient of 1, the loss scale doubling every `window`."""
    from ds_gpt.engine.defects import allow_fp16_on_cpu

    allow_fp16_on_cpu()
    engine = alone(
        one_weight(),
        stage,
        fp16={"enabled": True, "initial_scale_power": 4, "loss_scale_window": window},
        optimizer={"type": "SGD", "params": {"lr": 2.0**-6}},
        zero_allow_untested_optimizer=True,
    )
    weights = [1.0]
    norms = []
    for _ in range(6):
        push(engine, 1.0)
        weights.append(whole_weights(engine.module)[0].item())
        norms.append(float(engine.get_global_grad_norm()))
    return [((before - after) * 2**6, norm) for before, after, norm in zip(weights, weights[1:], norms, strict=False)]


def alone_fp16_refused(ranks: Any) -> str:
    with pytest.raises(ValueError, match="not supported on your device") as error:
        alone(one_weight(), fp16={"enabled": True})
    return str(error.value)


def test_deepspeed_refuses_fp16_on_a_cpu() -> None:
    (message,) = run_ranks(1, alone_fp16_refused)
    assert "fp16" in message, mended("allow_fp16_on_cpu (defects.py)")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_divides_fp16_gradients_by_the_scale_of_the_next_step(stage: int) -> None:
    (steps,) = run_ranks(1, alone_fp16, stage, 2)
    updates, norms = zip(*steps, strict=True)
    assert updates == (1.0, 1.0, 0.5, 1.0, 0.5, 1.0), mended("update_loss_scale_last (defects.py)")
    assert norms == ((1.0, 1.0, 0.5, 1.0, 0.5, 1.0) if stage == 3 else (1.0,) * 6), mended("update_loss_scale_last (defects.py), in part")


def several_curves(ranks: Any, cases: list[Composed], steps: int, lr: float) -> list[Any]:
    return [train_curve(ranks, composed, steps, lr) for composed in cases]


def test_our_fp16_does_not_feel_its_loss_scale_grow() -> None:
    settings = ["optimizer.name=sgd", "gradient_clipping=0.5", "fp16.initial_scale_power=6", "gradient_accumulation_steps=2"]
    cases = [
        tiny("fp16", 2, [*settings, f"zero_optimization.stage={stage}", f"fp16.loss_scale_window={window}"])
        for stage in (1, 2, 3)
        for window in (2, 1000)
    ]
    (curves, _) = run_ranks(2, several_curves, cases, 8, 0.5)
    for growing, constant in zip(curves[::2], curves[1::2], strict=True):
        for found, expected in zip(growing, constant, strict=True):
            assert found == pytest.approx(expected, rel=1e-3)


def test_deepspeed_does_not_scale_the_loss_of_fp16_without_zero() -> None:
    (steps,) = run_ranks(1, alone_fp16, 0, 1000)
    # Never multiplied by the scale, 2^4, yet divided by it.
    assert [update for update, _ in steps] == [2.0**-4] * 6, mended("the refusal of fp16 with ZeRO stage 0 (checks.py)")


def test_we_refuse_fp16_without_zero() -> None:
    with pytest.raises(ConfigError, match=r"(?s)fp16.*ZeRO stage 0.*zero_optimization\.stage: 1"):
        tiny("fp16", 1, ["zero_optimization.stage=0"])


def alone_fp16_autocast(ranks: Any, gradient: float) -> tuple[float, float]:
    """(first update, loss scale after three steps), SGD with clipping at 1."""
    engine = alone(
        one_weight(),
        stage=1,
        gradient_clipping=1.0,
        torch_autocast={"enabled": True, "dtype": "float16"},
        optimizer={"type": "SGD", "params": {"lr": 0.5}},
        zero_allow_untested_optimizer=True,
    )
    weights = [1.0]
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 1)).sum() * gradient)
        engine.step()
        weights.append(engine.module.weight.item())
    return weights[0] - weights[1], engine.optimizer.torch_autocast_gradscaler.get_scale()


def test_deepspeed_clips_scaled_gradients_under_fp16_autocast_and_never_lowers_the_scale() -> None:
    ((update, _),) = run_ranks(1, alone_fp16_autocast, 0.25)
    # Nothing to clip: it should be 1/8. But scaled by 2^16 it was clipped, and it was unscaled after that.
    assert update < 1e-4, mended("the refusal of torch_autocast in fp16 (checks.py)")
    ((update, scale),) = run_ranks(1, alone_fp16_autocast, 1.0)
    assert update == 0.0 and scale == 2.0**16, mended("the refusal of torch_autocast in fp16 (checks.py)")


def test_we_refuse_fp16_autocast() -> None:
    for dtype in ("fp16", "float16", "half"):
        with pytest.raises(ConfigError, match=r"torch_autocast\.dtype"):
            tiny("zero1", 1, ["torch_autocast.enabled=true", f"torch_autocast.dtype={dtype}"])


# ---- What the DeepSpeed config says, or does not ---------------------------------------------------------------------


def clipping_of(ranks: Any, settings: dict[str, Any]) -> float:
    from deepspeed.runtime.config import DeepSpeedConfig

    return DeepSpeedConfig({"train_batch_size": 1, **settings}).gradient_clipping


def test_deepspeed_ignores_a_misspelt_key_and_clips_at_1_unasked() -> None:
    (clipping,) = run_ranks(1, clipping_of, {"gradient_cliping": 0.3})
    assert clipping == 1.0, mended("key_problems (deepspeed_keys.py) or the default clipping (compose.py)")


def test_we_refuse_a_misspelt_key() -> None:
    with pytest.raises(ConfigError, match=r"(?s)gradient_cliping.*gradient_clipping"):
        tiny("zero1", 1, ["gradient_cliping=0.3"])


def test_we_state_the_default_clipping() -> None:
    composed = tiny("zero1", 1, ["gradient_clipping=null"])
    assert composed.deepspeed["gradient_clipping"] == 1.0
    assert any("gradient_clipping" in note for note in composed.notes)


# ---- Noise -----------------------------------------------------------------------------------------------------------


def alone_bf16_noise(ranks: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        alone(one_weight(), 1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
    return printed.getvalue()


def test_deepspeeds_bf16_optimizer_prints() -> None:
    (printed,) = run_ranks(1, alone_bf16_noise)
    assert printed.count("\n") > 10, mended("silence_bf16_optimizer (defects.py)")


def noise(ranks: Any, composed: Composed, folder: Path) -> tuple[str, int]:
    """What a whole life of our engine writes to the two standard streams; how often it resets the peak of memory, once built."""
    from deepspeed.accelerator import get_accelerator

    from ds_gpt.engine.engine import Engine

    file = (folder / f"{ranks.rank}").open("w+")
    sys.stdout.flush()
    for stream in (1, 2):
        os.dup2(file.fileno(), stream)
    engine = Engine(composed, ranks)
    resets: list[None] = []
    get_accelerator().reset_peak_memory_stats = lambda *args: resets.append(None)
    loader = tiny_loader(composed, engine.grid.data_rank, engine.grid.data_ranks)
    engine.step(0, loader.load(0), LR)
    engine.evaluate(loader.load(1))
    loader.close()
    engine.close()
    sys.stdout.flush()
    return (folder / f"{ranks.rank}").read_text(), len(resets)


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("zero0", []), ("zero0", ["bf16.enabled=true"]), ("zero1", ["bf16.enabled=true"]), ("zero3", []), ("fp16", []),
        ("zero1", ["parallel.pipeline=2"]), ("zero1", ["parallel.pipeline=2", "model.tied_head=false", "bf16.enabled=true"]),
    ],
)  # fmt: skip
def test_our_engine_is_quiet(file: str, settings: list[str], tmp_path: Path) -> None:
    assert run_ranks(2, noise, tiny(file, 2, settings), tmp_path) == [("", 0)] * 2


# ---- The bucket of a pipeline ------------------------------------------------------------------------------------------

BUCKET_ELEMENTS = 1_000_000


def alone_pipeline(**config: Any) -> Any:
    from deepspeed.runtime.pipe.module import PipelineModule

    with contextlib.redirect_stdout(io.StringIO()):
        module = PipelineModule([one_weight(), one_weight()], num_stages=2, loss_fn=lambda y, _: y.sum(), partition_method="uniform")
    return alone(module, zero_optimization={"stage": 1, "reduce_bucket_size": BUCKET_ELEMENTS}, **config)


def largest_memory_of_a_step(ranks: Any, composed: Composed | None) -> float:
    """In buckets, of a step in a pipeline of two stages: of our engine, or of DeepSpeed's alone."""
    from ds_gpt.engine.allocations import Allocations
    from ds_gpt.engine.engine import Engine

    engine = Engine(composed, ranks) if composed else alone_pipeline()
    with Allocations() as allocations:
        if composed:
            engine.step(0, tiny_loader(composed, 0, 1).load(0), LR)
        else:
            engine.train_batch(iter([(torch.ones(1, 1), torch.ones(1, 1))]))
        allocations.mark("step")
    return max(phase.peak_bytes for phase, _ in allocations.phases()) / (4 * BUCKET_ELEMENTS)


def test_a_pipeline_has_one_bucket() -> None:
    assert min(run_ranks(2, largest_memory_of_a_step, None)) > 1.9, mended("keep_one_bucket (defects.py)")
    ours = tiny("zero1", 2, ["parallel.pipeline=2", f"zero_optimization.reduce_bucket_size={BUCKET_ELEMENTS}"])
    assert max(run_ranks(2, largest_memory_of_a_step, ours)) < 1.9


def timed_step(ranks: Any, timers: dict[str, Any]) -> None:
    alone_pipeline(gradient_accumulation_steps=2, **timers).train_batch(iter([(torch.ones(1, 1), torch.ones(1, 1))] * 2))


@pytest.mark.parametrize("timers", [{"wall_clock_breakdown": True}, {"flops_profiler": {"enabled": True}}], ids=lambda timers: next(iter(timers)))
def test_deepspeed_s_timers_end_a_pipeline(timers: dict[str, Any]) -> None:
    run_ranks(2, timed_step, {})
    with pytest.raises(AssertionError, match="timer has already been started"):  # mended upstream: refuse them no more (parallel.py)
        run_ranks(2, timed_step, timers)


# ---- ZeRO-3's linear ----------------------------------------------------------------------------------------------------


def alone_linear_gradient(ranks: Any, selective: bool) -> list[list[float]]:
    """The first weight's gradient in linear, GELU, linear, through the linear of ZeRO-3."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    torch.manual_seed(1)
    inner, outer, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(2, 3, 4)
    F.linear = zero3_linear_wrap

    def block(x: torch.Tensor) -> torch.Tensor:
        return outer(F.gelu(inner(x)))

    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])

    y = checkpoint(block, x, use_reentrant=False, context_fn=contexts) if selective else block(x)
    y.square().sum().backward()
    return inner.weight.grad.tolist()


def test_deepspeeds_linear_adds_its_bias_to_a_result_that_is_kept() -> None:
    (kept,), (plain,) = (run_ranks(1, alone_linear_gradient, selective) for selective in (True, False))
    assert not torch.allclose(torch.tensor(kept), torch.tensor(plain), rtol=1e-2), mended("memory_efficient_linear = False (compose.py) and its check (checks.py)")


def alone_linear_after(ranks: Any) -> bool:
    import deepspeed

    before = F.linear
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 1, "zero_optimization": {"stage": 3}}):
        model = one_weight()
    alone(model, 3).destroy()
    return F.linear is before


def test_deepspeeds_linear_outlives_its_engine() -> None:
    assert run_ranks(1, alone_linear_after) == [False], mended("restore_linear (defects.py)")


def test_our_selective_checkpointing_is_right_after_another_engine_of_zero_3() -> None:
    """The biases are zero at first; after some steps they are not, and a bias added twice shows."""
    selective, off = "activation_checkpointing={policy: selective}", "activation_checkpointing=null"
    cases = [tiny(file, 2, [policy]) for file, policy in (("zero3", off), ("zero3", selective), ("zero1", selective), ("zero1", off))]
    (curves, _) = run_ranks(2, several_curves, cases, 6, 0.05)
    assert curves[0] == curves[1] and curves[2] == curves[3]


# ---- One rank sums up with nobody ---------------------------------------------------------------------------


def sums_of_one_step(ranks: Any, of: Composed | int) -> int:
    """Reductions in the backward passes of a step; by `alone` where just a ZeRO stage is given."""
    from ds_gpt.engine.engine import Engine

    engine = alone(one_weight(), of) if isinstance(of, int) else Engine(of, ranks)
    wrapped = engine if isinstance(of, int) else engine.deepspeed
    backward, found = wrapped.backward, []

    def watched(loss: torch.Tensor) -> None:
        with torch.profiler.profile() as profiler:
            backward(loss)
        found.extend(event.name for event in profiler.events() if "reduce" in event.name)

    wrapped.backward = watched
    push(engine, 1.0) if isinstance(of, int) else engine.step(0, tiny_loader(of, 0, 1).load(0), LR)
    return len(found)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_rank_sums_nothing(stage: int) -> None:
    (alone_sums,) = run_ranks(1, sums_of_one_step, stage)
    assert alone_sums > 0, mended("skip_reduction_of_one (defects.py)")
    assert run_ranks(1, sums_of_one_step, tiny(f"zero{stage}", 1)) == [0]


# ---- The C++ op for shared memory, and the compiler for Muon ---------------------------------------------------------

TRAIN_ALONE = """
import json, os, sys
from pathlib import Path
from ds_gpt.engine.ranks import Ranks
from tiny import tiny, train_curve
ranks = Ranks.from_environment()
ranks.connect()
json.dump(train_curve(ranks, tiny("zero2_offload", 1), 2), sys.stdout)
assert "deepspeed.runtime.zero.muon.original_muon" in sys.modules and "torch._inductor.compile_fx" not in sys.modules
ranks.disconnect()
"""


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "deepspeed" in name}


def test_deepspeed_has_functions_of_muon_compiled_whatever_the_optimizer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the module is imported, of which this is a second copy; `deepspeed.initialize` imports it."""
    from deepspeed.runtime import compiler

    decorated: list[str] = []
    monkeypatch.setattr(compiler, "compile", lambda: lambda function: decorated.append(function.__name__) or function)
    spec = importlib.util.find_spec("deepspeed.runtime.zero.muon.original_muon")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert "zeropower_via_newtonschulz5" in decorated, mended("_import_muon_uncompiled in ds_gpt/engine/deepspeed_import.py")


def test_nothing_is_compiled_or_left_in_shared_memory(tmp_path: Path) -> None:
    """In one process without compilers, and in one with a lock on each op, as a killed build leaves it: it waits for ever."""
    before = shared_memory()
    caches = [tmp_path / "empty", tmp_path / "locked"]
    for op in ("deepspeed_shm_comm", "fused_adam", "cpu_adam"):
        (caches[1] / op).mkdir(parents=True)
        (caches[1] / op / "lock").touch()
    caches[0].mkdir()
    contents = [sorted(cache.rglob("*")) for cache in caches]
    processes = []
    for cache, path in zip(caches, (str(caches[0]), os.environ["PATH"]), strict=True):
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "DS_ACCELERATOR")}
        environment |= {"TORCH_EXTENSIONS_DIR": str(cache), "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(tiny.__code__.co_filename).parent)}
        processes.append(subprocess.Popen([sys.executable, "-c", TRAIN_ALONE], env=environment, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "nor is the compiler loaded"
    assert all(len(json.loads(output)) == 2 for output in outputs), outputs
    assert [sorted(cache.rglob("*")) for cache in caches] == contents
    assert shared_memory() <= before
