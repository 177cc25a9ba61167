"""Write the golden composed configs again: ``python tests/golden/regenerate.py``, then read ``git diff tests/golden``.

One file per (run YAML, machine) holds what every shipped DeepSpeed JSON composes to, so that a changed default shows as
one changed line in a review. ``tests/config/test_golden_configs.py`` compares; nothing else writes these files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_gpt.config import Hardware, load

GOLDEN = Path(__file__).resolve().parent
CONFIGS = GOLDEN.parents[1] / "ds_configs"

MACHINES: dict[str, Hardware] = {
    "8xA100-40GB": Hardware(kind="cuda", name="NVIDIA A100-SXM4-40GB", world_size=8, bf16=True),
    "2xCPU": Hardware(kind="cpu", name="CPU", world_size=2, bf16=False),
}


def golden_names() -> list[tuple[str, str]]:
    """Every (run YAML, machine) that has a golden file: all that are shipped."""
    return [(path.stem, machine) for path in sorted((CONFIGS / "runs").glob("*.yaml")) for machine in MACHINES]


def golden_path(run: str, machine: str) -> Path:
    """Where the golden file of a run on a machine lies."""
    return GOLDEN / f"{run}.{machine}.json"


def golden_text(run: str, machine: str) -> str:
    """What every shipped JSON composes to with this run on this machine, as the text of its golden file."""
    return json.dumps(dict(_composed(run, machine)), indent=2, sort_keys=True) + "\n"


def _composed(run: str, machine: str) -> Iterator[tuple[str, Any]]:
    for path in sorted(CONFIGS.glob("*.json")):
        composed = load(CONFIGS / "runs" / f"{run}.yaml", path, MACHINES[machine])
        yield path.name, {
            "deepspeed": composed.deepspeed,
            "precision": composed.precision,
            "checkpoint_policy": composed.checkpoint_policy,
            "tokens_per_step": composed.tokens_per_step,
            "notes": list(composed.notes),
        }


def main() -> None:
    """Write all golden files and remove those whose YAML is gone."""
    wanted = {golden_path(*name): golden_text(*name) for name in golden_names()}
    for stale in set(GOLDEN.glob("*.json")) - set(wanted):
        stale.unlink()
        print(f"removed {stale.name}")
    for path, text in wanted.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
