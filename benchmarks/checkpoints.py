"""What checkpoints cost: seconds of stall per save in the foreground and behind training, seconds to resume, bytes a parameter."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.records import REPOSITORY, write

RANKS = 2
SEED = 1337


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--saves`` and ``--quick``."""
    parser.add_argument("--saves", type=int, default=5, help="saves timed of each kind (default: 5)")
    parser.add_argument("--quick", action="store_true", help="a model without size, which only tries the command out")


def measure(options: argparse.Namespace) -> Path:
    """Launch the ranks and record what they found."""
    arguments = ["--saves", str(options.saves), *(["--quick"] if options.quick else [])]
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        subprocess.run([*launch, "-m", "benchmarks.checkpoint_ranks", *arguments, "--folder", folder], cwd=REPOSITORY, check=True)
        measured = json.loads((Path(folder) / "measured.json").read_text())
    return write(options.records, "checkpoints", ["python", "-m", "benchmarks", "checkpoints", *arguments], "CPU", SEED, measured)
