"""A trained model out of a run's folder: its weights alone, on one device, without DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn
from torch.overrides import TorchFunctionMode

from ds_gpt.checkpoint.folder import MANIFEST, STATE, complete, damage, read_state
from ds_gpt.checkpoint.initial import Initial
from ds_gpt.config import ConfigError, Problem
from ds_gpt.config.errors import did_you_mean
from ds_gpt.config.run import RunConfig
from ds_gpt.data import Tokenizer, load_tokenizer
from ds_gpt.model.gpt import GPT


@dataclass(frozen=True)
class SavedModel:
    """An intact checkpoint and what is needed to use it; no weights are in memory yet.

    Attributes:
        checkpoint: its folder.
        run: the configuration that it was saved under, ``model.vocab_size`` settled.
        tokenizer: of the run.
        state: content of ``run_state.json``: step, tokens, validation loss, ``facts``.
    """

    checkpoint: Path
    run: RunConfig
    tokenizer: Tokenizer
    state: dict[str, Any]

    def load(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> GPT:
        """The model in evaluation mode; adapters are merged.

        Of the files only the fp32 weights are read, one parameter at a time: beside the model itself there is never
        more in host memory than the largest of them, twice.

        Raises:
            ConfigError: the checkpoint lacks weights of this model.
        """
        with torch.device("meta"), _Undrawn():  # no memory, and no weights drawn that are replaced anyway
            model = GPT(self.run.model)
        filled: dict[nn.Parameter, nn.Parameter] = {}
        with Initial(self.checkpoint, self.state["facts"]) as stored:
            for name, parameter in model.named_parameters():
                try:
                    values = stored.read(name, parameter.numel())
                except ValueError as error:
                    raise self._unfit(str(error)) from None
                filled[parameter] = nn.Parameter(values.view(parameter.shape).to(device, dtype), requires_grad=False)
        for module in model.modules():  # one that several modules share is shared again
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, filled[parameter])
        return model.eval()

    def _unfit(self, wrong: str) -> ConfigError:
        return ConfigError(
            Problem(
                f"checkpoint '{self.checkpoint}' does not hold the weights of the model that its {STATE} describes: {wrong}",
                "a model with weights missing computes nothing of use",
                "use the version of ds_gpt that saved it (environment.json in the run folder names it)",
            )
        )


class _Undrawn(TorchFunctionMode):
    """Leaves out ``torch.nn.init``: on the meta device it draws nothing, but imports PyTorch's compiler, for seconds."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def find_saved_model(path: str | Path, warn: Callable[[str], None] = lambda text: None) -> SavedModel:
    """The checkpoint at `path`; or the newest intact one of the run at `path`.

    Args:
        path: ``runs/NAME``, or ``runs/NAME/checkpoints/step_NNNNNNN``.
        warn: told of every damaged checkpoint that was passed over.

    Raises:
        ConfigError: there is none, it is damaged, or its tokenizer is missing or another.
    """
    path = Path(path)
    if (path / STATE).is_file() or (path / MANIFEST).is_file():
        if (wrong := _damage(path)) is not None:
            raise ConfigError(
                Problem(
                    f"checkpoint '{path}' is damaged: {wrong}",
                    "its model is not the one that was saved",
                    f"give '{path.absolute().parent.parent}': the newest intact checkpoint is found there",
                )
            )
        return _described(path, path.absolute().parent.parent)
    passed_over = []
    for checkpoint in complete(path / "checkpoints"):
        if (wrong := _damage(checkpoint)) is None:
            return _described(checkpoint, path)
        passed_over.append(f"checkpoint {checkpoint.name} is damaged and was passed over: {wrong}")
        warn(passed_over[-1])
    raise _nothing_at(path, passed_over)


def _damage(checkpoint: Path) -> str | None:
    """`damage`, the files shared among threads: a checksum is bound to one processor."""
    threads = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        found = pool.map(lambda share: damage(checkpoint, lambda index: index % threads == share), range(threads))
        return next((wrong for wrong in found if wrong is not None), None)


def _nothing_at(path: Path, passed_over: list[str]) -> ConfigError:
    if passed_over:
        what, fix = f"the run '{path}' has no intact checkpoint: {'; '.join(passed_over)}", "restore one from a copy"
    elif (path / "run.yaml").is_file():
        what, fix = f"the run '{path}' has no checkpoint yet", "wait for its first one (checkpoints.every), or its end"
    else:
        what = (
            f"'{path}' is neither the folder of a run nor a checkpoint" if path.exists() else f"'{path}' does not exist"
        )
        runs = [str(found.parent) for found in (path if path.is_dir() else path.parent).glob("*/run.yaml")]
        fix = "give runs/NAME, or runs/NAME/checkpoints/step_NNNNNNN" + (
            f"; {did_you_mean(str(path), runs)}" if runs else ""
        )
    return ConfigError(Problem(what, "there is no model in it", fix))


def _described(checkpoint: Path, run_folder: Path) -> SavedModel:
    state = read_state(checkpoint)
    facts = state.get("facts", {})
    try:
        run = RunConfig.model_validate({key: facts[key] for key in RunConfig.model_fields if key in facts})
    except ValidationError as error:
        details = "; ".join(f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors())
        raise ConfigError(
            Problem(
                f"'{checkpoint / STATE}' does not describe a run that this version knows: {details}",
                "the model's shape is taken from it",
                "use the version of ds_gpt that saved it (environment.json in the run folder names it)",
            )
        ) from None
    if not run.generates:
        raise ConfigError(
            Problem(
                f"the model of '{checkpoint}' does not predict the next token "
                f"(stage: {run.stage}, objective: {run.objective.name})",
                "text can neither be made nor measured with it",
                "give another run, or the one that it started from",
            )
        )
    tokenizer = load_tokenizer(run_folder / "tokenizer.json")
    if tokenizer.identity != facts.get("tokenizer_identity"):
        raise ConfigError(
            Problem(
                f"'{run_folder / 'tokenizer.json'}' is not the tokenizer that '{checkpoint}' was trained with",
                "its token ids mean other text",
                "restore the file from the run that trained the model",
            )
        )
    return SavedModel(checkpoint, run, tokenizer, state)
