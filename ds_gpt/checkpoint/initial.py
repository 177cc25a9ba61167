"""Weights to start from: those of another run, with its adapters merged where it trained adapters only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from ds_gpt.checkpoint.folder import STATE, complete, read_state
from ds_gpt.checkpoint.shards import ShardReader
from ds_gpt.config import ConfigError, ModelConfig, Problem
from ds_gpt.config.run import DataConfig, RunConfig
from ds_gpt.config.stage import LoraConfig
from ds_gpt.engine.state import WEIGHT
from ds_gpt.model.lora import adapter_weight

_FREE = frozenset({"dropout", "vocab_size"})  # what may differ from the model that is started from


@dataclass(frozen=True)
class Initial:
    """The checkpoint that a run starts from.

    Attributes:
        checkpoint: its folder.
        facts: of the run that saved it.
    """

    checkpoint: Path
    facts: dict[str, Any]

    @property
    def run_folder(self) -> Path:
        """The folder of the run that saved it."""
        return self.checkpoint.absolute().parent.parent

    @property
    def model(self) -> ModelConfig:
        """The shape of the model, its vocabulary settled."""
        known = {key: value for key, value in self.facts["model"].items() if key in ModelConfig.model_fields}
        return ModelConfig.model_validate(known)

    def read(self, name: str, numel: int) -> Tensor:
        """A whole parameter of the model, by its name in a model without adapters; flat, fp32.

        Raises:
            ValueError: the checkpoint lacks it.
        """
        lora = LoraConfig.model_validate(self.facts.get("lora", {}))
        if lora.rank is None:
            return self._stored(name, numel)
        weight = self._base.read(name, numel)
        adapters = [name.removesuffix(".weight") + f".lora_{matrix}.weight" for matrix in "AB"]
        if not self._shards.numel(adapters[0]):
            return weight
        a, b = (self._stored(adapter, self._shards.numel(adapter)) for adapter in adapters)
        return weight + adapter_weight(a.view(lora.rank, -1), b.view(-1, lora.rank), lora.alpha / lora.rank).flatten()

    def __enter__(self) -> Initial:
        return self

    def __exit__(self, *error: object) -> None:
        if "_shards" in self.__dict__:
            self._shards.close()
        if "_base" in self.__dict__:
            self._base.__exit__(*error)

    @cached_property
    def _base(self) -> Initial:
        """What the adapters stand beside. Raises ConfigError where it is gone."""
        return initial_at(self.facts["init_from"])

    @cached_property
    def _shards(self) -> ShardReader:
        return ShardReader(self.checkpoint)

    def _stored(self, name: str, numel: int) -> Tensor:
        found = self._shards.read(name, WEIGHT, 0, numel)
        assert found is not None, "a weight that is not there is an error"
        return found


def find_initial(run: RunConfig) -> Initial | None:
    """What `run` starts from; None where its weights are drawn.

    Raises:
        ConfigError: it is not there, or there are to be adapters beside weights that learned nothing.
    """
    if run.init_from is not None:
        return initial_at(run.init_from)
    if run.lora.rank is None:
        return None
    raise ConfigError(
        Problem(
            f"lora.rank = {run.lora.rank} without init_from",
            "the weights beside the adapters are frozen, and would stay as they are drawn",
            "set init_from: runs/NAME, or leave lora out",
        )
    )


def initial_at(path: str | Path) -> Initial:
    """The checkpoint at `path`, or the newest of the run at `path`. Its files are not checked.

    Raises:
        ConfigError: there is none.
    """
    path = Path(path)
    checkpoint = path if (path / STATE).is_file() else next(iter(complete(path / "checkpoints")), None)
    if checkpoint is None:
        raise ConfigError(
            Problem(
                f"init_from = '{path}' is neither a checkpoint nor the folder of a run with one",
                "its weights are what is trained on from",
                "give runs/NAME, or runs/NAME/checkpoints/step_NNNNNNN",
            )
        )
    return Initial(checkpoint, read_state(checkpoint)["facts"])


def started_from(run: RunConfig, initial: Initial) -> RunConfig:
    """The run with what it takes over settled: which checkpoint, its tokenizer, its vocabulary.

    Raises:
        ConfigError: the model of the run is not the one that it starts from; every field that differs is named.
    """
    theirs, ours = initial.model, run.model
    problems = [
        Problem(
            f"model.{key} = {getattr(ours, key)!r}, but the model at init_from = '{run.init_from}' has "
            f"{getattr(theirs, key)!r}",
            "its weights have no place in another model",
            f"set model.{key}: {getattr(theirs, key)}",
        )
        for key in (
            "layers",
            "width",
            "heads",
            "context",
            "hidden_width",
            "key_heads",
            *sorted(ModelConfig.model_fields),
        )
        if key not in _FREE | {"ffn_width", "kv_heads"} and getattr(ours, key) != getattr(theirs, key)
    ]
    if problems:
        raise ConfigError({problem.what: problem for problem in problems}.values())
    data = run.data
    if data.tokenizer == "auto":
        data = data.model_copy(update={"tokenizer": str(initial.run_folder / "tokenizer.json")})
    model = ours.model_copy(update={"vocab_size": theirs.vocab_size})
    return run.model_copy(update={"init_from": str(initial.checkpoint.absolute()), "data": data, "model": model})


def pretraining_of(initial: Initial) -> DataConfig | None:
    """The data of the pre-training at the beginning of a chain of runs; None where it is not known."""
    while initial.facts.get("stage", "pretrain") != "pretrain":
        if initial.facts.get("init_from") is None:
            return None
        initial = initial_at(initial.facts["init_from"])
    data = DataConfig.model_validate(initial.facts["data"])
    return (
        data.model_copy(update={"tokenizer": str(initial.run_folder / "tokenizer.json")})
        if data.tokenizer == "auto"
        else data
    )
