"""What torch.compile gains over eager PyTorch: one rank, ZeRO-1, GPT-2's architecture and Llama's.

The two take their steps in turns in one process, so that a noisy machine disturbs both alike. Beside the durations
stands the processor time, of which other work takes nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.records import REPOSITORY, write
from ds_gpt.config import Hardware, load

SEED = 1337
SHAPES: Mapping[str, tuple[str, ...]] = {
    "gpt2": (),
    "llama": ("model.positions=rotary", "model.norm=rmsnorm", "model.ffn=swiglu", "model.kv_heads=2", "model.bias=false"),
}
_SETTINGS = ("model.vocab_size=96", f"seed={SEED}", "zero_optimization.reduce_bucket_size=1000000")
_WARMUP_STEPS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--steps``."""
    parser.add_argument("--steps", type=int, default=40, help="steps timed of each (default: 40)")


def measure(options: argparse.Namespace) -> Path:
    """Step both in turns and record medians, the speed-up, and how far the losses are apart."""
    import torch

    from ds_gpt.engine.deepspeed_import import import_deepspeed
    from ds_gpt.engine.ranks import Ranks

    import_deepspeed("cpu")
    ranks = Ranks.from_environment()
    ranks.connect()
    torch.set_num_threads(1)
    measured = {name: _compare(ranks, overrides, options.steps) for name, overrides in SHAPES.items()}
    for name, found in measured.items():
        print(f"{name}: {found['speed_up']:.2f} x by processor time, {found['speed_up_by_clock']:.2f} x by the clock")
    return write(options.records, "compile", ["python", "-m", "benchmarks", "compile", "--steps", str(options.steps)], "CPU", SEED, measured)


def _compare(ranks: Any, overrides: tuple[str, ...], steps: int) -> dict[str, Any]:
    from ds_gpt.engine.engine import Engine

    engines = {name: Engine(_composed(overrides, name == "compiled"), ranks) for name in ("eager", "compiled")}
    first = {name: _step(engine, 0)[0] for name, engine in engines.items()}  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in engines}
    apart = 0.0
    for step in range(1, 1 + _WARMUP_STEPS + steps):
        losses = []
        for name, engine in engines.items():
            elapsed, cpu, loss = _step(engine, step)
            losses.append(loss)
            if step > _WARMUP_STEPS:
                seconds[name].append(elapsed)
                cpu_seconds[name].append(cpu)
        apart = max(apart, abs(losses[1] / losses[0] - 1))
    for engine in engines.values():
        engine.close()
    clock, cpu = ({name: statistics.median(values) for name, values in found.items()} for found in (seconds, cpu_seconds))
    return {
        "speed_up": cpu["eager"] / cpu["compiled"],
        "speed_up_by_clock": clock["eager"] / clock["compiled"],
        "cpu_step_s": cpu,
        "step_s": clock,
        "first_step_s": first,
        "largest_relative_difference_of_losses": apart,
        "steps_timed": steps,
    }


def _composed(overrides: tuple[str, ...], compiled: bool) -> Any:
    hardware = Hardware("cpu", "CPU", 1, bf16=False)
    configs = REPOSITORY / "ds_configs"
    settings = [*_SETTINGS, *overrides, f"compile.enabled={str(compiled).lower()}"]
    return load(configs / "runs" / "quickstart.yaml", configs / "zero1.json", hardware, settings)


def _step(engine: Any, step: int) -> tuple[float, float, float]:
    """Seconds, processor seconds and loss of one step on random tokens, the same for both."""
    import torch

    run = engine.composed.run
    generator = torch.Generator().manual_seed(step)
    tokens_BT = torch.randint(run.model.vocabulary, (engine.composed.micro_batch_size, run.model.context + 1), generator=generator)
    started, cpu_started = time.perf_counter(), time.process_time()
    result = engine.step(step, [(tokens_BT[:, :-1], tokens_BT[:, 1:])], 1e-3)
    return time.perf_counter() - started, time.process_time() - cpu_started, result.loss
