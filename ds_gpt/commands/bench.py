"""``ds-gpt bench``: the benchmarks of the checkout that ds_gpt runs from, the same as ``python -m benchmarks``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ds_gpt.commands.failure import run_or_fail

_CHECKOUT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Hand the arguments over, and end with the status of what they started."""
    run_or_fail(lambda: sys.exit(bench(sys.argv[2:] if arguments is None else arguments)))


def bench(arguments: Sequence[str]) -> int:
    """Run ``python -m benchmarks`` and return its status. Raises ConfigError where there is no checkout around ds_gpt.

    In a process of its own, because ds_gpt imports nothing that is built upon it.
    """
    from ds_gpt.config import ConfigError, Problem

    if not (_CHECKOUT / "benchmarks" / "__main__.py").is_file():
        raise ConfigError(
            Problem("ds-gpt bench needs the repository: this ds_gpt is installed without it", "benchmarks/ and its records are no part of the package", "run it from a checkout")
        )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(_CHECKOUT), os.environ.get("PYTHONPATH")]))}
    return subprocess.run([sys.executable, "-m", "benchmarks", *arguments], env=environment).returncode
