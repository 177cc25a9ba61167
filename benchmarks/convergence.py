"""Validation loss of a small character model on tinyshakespeare, against the one that nanoGPT's README states.

nanoGPT (https://github.com/karpathy/nanoGPT, README, "I only have a macbook") gives 1.88 for a 4-layer, width-128,
context-64, batch-12 model after 2,000 steps without dropout.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.records import REPOSITORY, write

PUBLISHED_VAL_LOSS = 1.88  # nats a character
STEPS = 2000
SEED = 1337
_SETTINGS = (
    "model.layers=4", "model.width=128", "model.heads=4", "model.context=64", "model.dropout=0.0", "batch.global_batch_size=12",
    "evaluation.every=500", "evaluation.sequences=2000",  # more than there are: the whole split
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--corpus`` and ``--steps``."""
    parser.add_argument("--corpus", default="tinyshakespeare", help="name or path of tinyshakespeare (default: the name)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"fewer than {STEPS} only tries the command out")


def measure(options: argparse.Namespace) -> Path:
    """Train in a process of its own, and record the validation losses."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        arguments = ["ds_gpt/train.py", "--config", "ds_configs/runs/shakespeare_char.yaml"]
        for setting in (*_SETTINGS, f"seed={SEED}", f"data.corpus={options.corpus}", f"training.steps={options.steps}"):
            arguments += ["--set", setting]
        subprocess.run([sys.executable, *arguments, "--run-dir", str(run)], cwd=REPOSITORY, check=True)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        device = json.loads((run / "environment.json").read_text())["device"]
    validation = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}
    measured = {
        "steps": options.steps,
        "val_loss": validation[options.steps],
        "val_loss_by_step": validation,
        "published_val_loss": PUBLISHED_VAL_LOSS,
        "tokens_per_s_median": sorted(line["tokens_per_s"] for line in lines)[len(lines) // 2],
    }
    command = ["python", "-m", "benchmarks", "convergence", "--corpus", options.corpus, "--steps", str(options.steps)]
    return write(options.records, "convergence", command, device, SEED, measured)
