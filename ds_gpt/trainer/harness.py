"""EleutherAI's lm-evaluation-harness on a run's model, which reaches it as an export for transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ds_gpt.checkpoint.saved_model import SavedModel
from ds_gpt.config import ConfigError, Problem
from ds_gpt.data.tokenizer_json import separator_name
from ds_gpt.exchange.exporting import export


def run_tasks(
    saved: SavedModel, tasks: Sequence[str], device: torch.device, limit: int | None, tasks_dir: Path | None
) -> dict[str, dict[str, Any]]:
    """The harness's measures by task, as it prints them.

    Args:
        saved: the model; a class of transformers must express it.
        tasks: names of tasks, as ``lm-eval ls tasks`` lists them.
        device: what to compute on.
        limit: examples of each task; None: all.
        tasks_dir: a folder with tasks of one's own.

    Raises:
        ConfigError: the harness is not installed, or does not know a task; the model has no class in transformers,
            or its tokenizer no separator.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            Problem(
                f"--tasks needs the lm-evaluation-harness: {error}",
                "it is an optional extra",
                "pip install 'ds_gpt[eval]'",
            )
        ) from None
    separator = _separator(saved)
    manager = TaskManager(include_path=str(tasks_dir) if tasks_dir else None)
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise ConfigError(
            Problem(
                f"--tasks: the harness does not know {', '.join(map(repr, unknown))}",
                fix="lm-eval ls tasks lists what it knows",
            )
        )
    with tempfile.TemporaryDirectory(prefix="ds_gpt-eval-") as folder:
        path = Path(folder) / saved.run.name
        export(saved, path, "hf")
        tokenizer = AutoTokenizer.from_pretrained(path, **separator)
        arguments = {
            "pretrained": str(path),
            "tokenizer": tokenizer,
            "dtype": "float32",
            "max_length": saved.run.model.context,
        }
        results = simple_evaluate(
            "hf", model_args=arguments, tasks=list(tasks), device=str(device), limit=limit, task_manager=manager
        )
    return results["results"]


def _separator(saved: SavedModel) -> dict[str, str]:
    """What to tell transformers of the token that begins a text. Raises ConfigError where the tokenizer has none."""
    if saved.tokenizer.separator is None:
        raise ConfigError(
            Problem(
                "--tasks: the run's tokenizer has no token that begins a text",
                "the harness puts one before every text that it scores",
                "train with the tokenizer gpt2 or bpe, or on text with line ends",
            )
        )
    if separator_name(saved.tokenizer) is not None:
        return {}  # its files say it
    # Characters have no special token: the line feed takes its place, here and nowhere else.
    return {"eos_token": saved.tokenizer.decode([saved.tokenizer.separator])}
