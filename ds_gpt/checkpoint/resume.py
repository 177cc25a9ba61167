"""Find a checkpoint to go on from, see that it fits the run, and load it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ds_gpt.checkpoint.folder import complete, damage, read_state, step_of
from ds_gpt.checkpoint.run_state import RunState
from ds_gpt.checkpoint.shards import ShardReader
from ds_gpt.config import ConfigError, Problem, flatten
from ds_gpt.engine.engine import Engine
from ds_gpt.engine.ranks import Ranks

# Without these the saved tensors mean something else, or fit nowhere: all of the model, whatever options it will have,
# and its adapters.
_MODEL, _HARMLESS = ("model.", "lora.", "stage"), frozenset({"model.dropout", "lora.dropout"})
_TOKENIZER = "tokenizer_identity"


def newest_intact(checkpoints: Path, ranks: Ranks, warn: Callable[[str], None], until_step: int | None = None) -> Path | None:
    """The newest checkpoint whose every file is what its manifest says; None where there is none.

    The ranks share the reading and agree on the verdict; every rank must call it.

    Args:
        checkpoints: folder of the checkpoints.
        ranks: this process among the others.
        warn: told of every damaged checkpoint that was passed over.
        until_step: later ones are not wanted.
    """
    for path in ranks.agree(complete(checkpoints)):
        if until_step is not None and step_of(path) > until_step:
            continue
        wrong = shared_damage(path, ranks)
        if wrong is None:
            return path
        warn(f"checkpoint {path.name} is damaged and was passed over: {wrong}")
    return None


def shared_damage(checkpoint: Path, ranks: Ranks) -> str | None:
    """What is wrong with a checkpoint, by any rank's account; every rank must call it."""
    mine = damage(checkpoint, lambda index: index % ranks.world_size == ranks.rank)
    found = [wrong for wrong in ranks.gather(mine) if wrong is not None]
    return found[0] if found else None


def require_intact(checkpoint: Path, ranks: Ranks) -> None:
    """Refuse a damaged checkpoint that was asked for by name; every rank must call it.

    Raises:
        ConfigError: what is wrong with it.
    """
    if (wrong := shared_damage(checkpoint, ranks)) is not None:
        raise ConfigError(
            Problem(
                f"checkpoint '{checkpoint}' is damaged: {wrong}",
                "a run resumed from it would not be the run that was saved",
                f"resume from '{checkpoint.parent.parent}': the newest intact checkpoint is found there",
            )
        )


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with (saved, current)."""
    before, after = flatten(saved), flatten(current)
    return {key: (before.get(key), after.get(key)) for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)}


def check_fits(checkpoint: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Compare the facts of the saved run with those of this one.

    Returns:
        A sentence for each field that differs and may.

    Raises:
        ConfigError: a field differs without which the saved state is meaningless.
    """
    changed, known = differences(saved, current), flatten(saved)
    refused = [
        Problem(
            f"{key} is {after!r}, but the checkpoint '{checkpoint}' was saved with {before!r}",
            "its token ids mean other text" if key == _TOKENIZER else "its tensors have other shapes, or another meaning",
            "resume with the saved value, or start a new run",
        )
        for key, (before, after) in changed.items()
        # An option that is newer than the checkpoint is only named.
        if key in known and (key == _TOKENIZER or key.startswith(_MODEL) and key not in _HARMLESS)
    ]
    if refused:
        raise ConfigError(refused)
    return [f"{key}: {before!r} when saved, {after!r} now" for key, (before, after) in changed.items()]


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint said.

    Attributes:
        state: where the run stands.
        saved: content of ``run_state.json``.
        absent: kinds of optimizer state that were not saved, and start at zero.
    """

    state: RunState
    saved: dict[str, Any]
    absent: list[str]


def load(engine: Engine, checkpoint: Path) -> Loaded:
    """Fill the engine from an intact checkpoint of any world size, ZeRO stage or precision; every rank must call it."""
    saved = read_state(checkpoint)
    with ShardReader(checkpoint) as shards:
        absent = engine.load(shards.read, saved)
    return Loaded(state_from(saved), saved, absent)


def state_from(saved: Mapping[str, Any]) -> RunState:
    """The run state in the content of ``run_state.json``."""
    values = {field.name: saved[field.name] for field in fields(RunState)}
    values["skipped"] = tuple((first, last) for first, last in values["skipped"])
    return RunState(**values)
