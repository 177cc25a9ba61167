"""What the trainer and DeepSpeed cost over a bare PyTorch loop: one rank, ZeRO-0, the same model and batches.

The two run in turns, each in a process of its own, so that a noisy machine disturbs both alike; their ratio is what
counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.records import REPOSITORY, write

SEED = 1337
_WARMUP_STEPS = 20
_SMALL = ("model.layers=1", "model.width=32", "model.heads=2", "model.context=32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--rounds``, ``--steps`` and ``--quick``."""
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default: 5)")
    parser.add_argument("--steps", type=int, default=100, help=f"steps timed in each turn, a multiple of {_WARMUP_STEPS} (default: 100)")
    parser.add_argument("--quick", action="store_true", help="a model without size, which only tries the command out")


def measure(options: argparse.Namespace) -> Path:
    """Run both in turns and record their tokens a second and the ratio."""
    trainer, bare = [], []
    for turn in range(options.rounds):
        # Who goes first changes, so that a machine that slows down while it warms up favours neither.
        pair = [(trainer, _trainer_tokens_per_s), (bare, _bare_tokens_per_s)]
        for results, run in pair if turn % 2 == 0 else reversed(pair):
            results.append(run(options.steps, _settings(options)))
        print(f"turn {turn + 1} of {options.rounds}: trainer {trainer[-1]:,.0f}, bare loop {bare[-1]:,.0f} tokens/s, ratio {trainer[-1] / bare[-1]:.3f}")
    measured = {
        "ratio_of_medians": statistics.median(trainer) / statistics.median(bare),
        "trainer_tokens_per_s": trainer,
        "bare_tokens_per_s": bare,
        "steps_timed": options.steps,
    }
    command = ["python", "-m", "benchmarks", "overhead", "--rounds", str(options.rounds), "--steps", str(options.steps)]
    command += ["--quick"] if options.quick else []
    return write(options.records, "overhead", command, "CPU", SEED, measured)


def _settings(options: argparse.Namespace) -> list[str]:
    total = _WARMUP_STEPS + options.steps
    settings = (f"training.steps={total}", f"logging.every={_WARMUP_STEPS}", f"evaluation.every={total}", "sample.tokens=0", f"seed={SEED}")
    return [argument for setting in (*settings, *(_SMALL if options.quick else ())) for argument in ("--set", setting)]


def _trainer_tokens_per_s(steps: int, settings: list[str]) -> float:
    """Tokens a second of ``ds_gpt/train.py``, all its logging included, after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "ds_gpt/train.py", "--deepspeed_config", "ds_configs/zero0.json", "--run-dir", str(run), *settings]
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if line["step"] > _WARMUP_STEPS]
    tokens = timed[-1]["tokens"] * steps / (_WARMUP_STEPS + steps)
    return tokens / sum(line["step_s"] * _WARMUP_STEPS for line in timed)


def _bare_tokens_per_s(steps: int, settings: list[str]) -> float:
    """Tokens a second of ``benchmarks.bare_loop``."""
    command = [sys.executable, "-m", "benchmarks.bare_loop", "--warmup-steps", str(_WARMUP_STEPS), *settings]
    return float(subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True).stdout)
