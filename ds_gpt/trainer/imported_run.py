"""The run folder of a model that was trained elsewhere: to train on, to fine-tune, to generate from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from ds_gpt.config import Hardware
from ds_gpt.config.compose import compose
from ds_gpt.config.files import ConfigFile, read_deepspeed_json
from ds_gpt.config.shipped import DEFAULT_DEEPSPEED
from ds_gpt.data import Dataset
from ds_gpt.exchange.importing import ORIGIN, ForeignModel, write_checkpoint
from ds_gpt.exchange.new_folder import new_folder
from ds_gpt.trainer.run_folder import RunFolder
from ds_gpt.trainer.start import facts

# For fine-tuning on a few million tokens; `--set`, or run.yaml in the folder, changes any of it.
_LEARNING: dict[str, Any] = {
    "batch": {"global_batch_size": 8},
    "optimizer": {"lr": 2e-5},
    "schedule": {"name": "cosine", "warmup_steps": 50, "min_lr": 2e-6},
    "training": {"steps": 1000},
    "evaluation": {"every": 100, "sequences": 64},
}


def import_run(foreign: ForeignModel, run_dir: str | None, hardware: Hardware) -> Path:
    """Make a run folder that holds the model as its checkpoint at step 0; it appears whole or not at all.

    Args:
        foreign: the model.
        run_dir: the folder, where the user chose it, which then names the run; otherwise ``runs/NAME``, with the name
            of the model's folder.
        hardware: what the run's configuration is composed for.

    Raises:
        ConfigError: the folder exists or cannot be written; the weights are not what config.json says.
    """
    named_by = Path(run_dir) if run_dir else foreign.folder
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", named_by.resolve().name).lstrip("._-") or "imported"
    path = Path(run_dir or Path("runs") / name)
    # Where the corpus is chosen later, the tokenizer is not: it must be the one that the model knows.
    data = {"corpus": "python_docs", "tokenizer": str((path / "tokenizer.json").absolute())}
    values = {"name": name, "model": foreign.model.model_dump(mode="json"), "data": data, **_LEARNING}
    composed = compose(ConfigFile(path / "run.yaml", values), read_deepspeed_json(DEFAULT_DEEPSPEED), hardware)
    nothing = Dataset.cut(np.empty(0, dtype=np.uint16), 0.1, foreign.tokenizer, digest="none: imported")
    with new_folder(path, "--run-dir") as partial:
        folder = RunFolder.create(str(partial), composed, foreign.tokenizer, nothing.digest)
        origin = {"name": foreign.folder.resolve().name, "config": foreign.config}
        (partial / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        write_checkpoint(foreign, folder.checkpoints, facts(composed, nothing))
    return path
