"""Where a run starts: in a new folder, or where another one stopped."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_gpt.checkpoint.folder import LATEST, STATE, complete, read_state, remove
from ds_gpt.checkpoint.resume import check_fits, newest_intact, require_intact
from ds_gpt.config import Composed, ConfigError, Problem
from ds_gpt.config.files import read_run_yaml
from ds_gpt.config.shipped import DEFAULT_DEEPSPEED, DEFAULT_RUN
from ds_gpt.data import Dataset
from ds_gpt.engine.ranks import Ranks
from ds_gpt.trainer.run_folder import STATED, RunFolder, check_unused, environment

AUTO = "auto"
_CACHED_S = 60.0  # for as long a node may believe that a folder on a network disk is not there (NFS: acdirmax)


@dataclass(frozen=True)
class Start:
    """What rank 0 found at the paths that the user gave; told to all ranks.

    Attributes:
        folder: the run's folder.
        checkpoint: the checkpoint that was asked for by name, or None.
        continues: whether the folder is an earlier run's, to go on in from its newest intact checkpoint.
    """

    folder: Path
    checkpoint: Path | None
    continues: bool


def check_start(run_dir: str | None, resume: str | None, name: str) -> None:
    """Refuse what cannot be started from. Creates nothing, so it can run before ranks meet.

    Raises:
        ConfigError: a ``--run-dir`` that is in use, or a ``--resume`` that is neither a run nor a checkpoint.
    """
    if resume is None or resume == AUTO or _is_checkpoint(Path(resume)):
        if run_dir and not (resume == AUTO and _is_run(Path(run_dir))):
            check_unused(run_dir)
    else:
        _require_run(Path(resume))
        if run_dir and Path(run_dir).resolve() != Path(resume).resolve():
            raise ConfigError(
                Problem(
                    f"--run-dir '{run_dir}' is not the run to resume, '{resume}'",
                    "a run goes on in its own folder",
                    "leave --run-dir out; or give a checkpoint folder to --resume, which starts a new run from it",
                )
            )


def make_start(run_dir: str | None, resume: str | None, composed: Composed, dataset: Dataset) -> Start:
    """Find or make the run's folder; rank 0 alone calls it.

    No ``resume``: a new folder. A checkpoint: a new folder too, a branch from it. A run's folder: that one. ``auto``:
    `run_dir`, or the newest of ``runs/NAME``, ``runs/NAME-2``, ...; where there is none, a new one.
    """
    if resume is not None and resume != AUTO and not _is_checkpoint(Path(resume)):
        return Start(Path(resume), None, continues=True)
    if resume == AUTO:
        existing = Path(run_dir) if run_dir else _newest(composed.run.name)
        if existing is not None and _is_run(existing):
            return Start(existing, None, continues=True)
    folder = RunFolder.create(run_dir, composed, dataset.tokenizer, dataset.digest)
    return Start(folder.path, Path(resume) if resume and resume != AUTO else None, continues=False)


def appears(file: Path, within_s: float | None = None) -> bool:
    """Whether this node sees a file that another one has just made; by default it gets the time that a network disk may need."""
    within_s = _CACHED_S if within_s is None else within_s
    end = time.monotonic() + within_s
    while not (seen := file.is_file()) and time.monotonic() < end:
        time.sleep(min(1.0, within_s))
    return seen


def require_shared(folder: Path, ranks: Ranks) -> None:
    """Refuse a run's folder that some ranks do not see, before any step is trained; every rank must call it.

    Raises:
        ConfigError: on every rank.
    """
    seen = appears(folder / "run.yaml")
    blind = sorted({node for node in ranks.gather(None if seen else platform.node()) if node is not None})
    if blind:
        raise ConfigError(
            Problem(
                f"the run folder '{folder.absolute()}', made on the node of rank 0, is not there on {', '.join(blind)}",
                "every rank writes its part of a checkpoint into it: no checkpoint could be saved, or read",
                "start in a folder that all nodes share, or give one of those as --run-dir",
            )
        )


def find_checkpoint(start: Start, composed: Composed, dataset: Dataset, ranks: Ranks, say: Callable[[str], None]) -> Path | None:
    """The checkpoint to load, checked against this run; every rank must call it.

    Args:
        start: what rank 0 found.
        composed: this run.
        dataset: its tokens.
        ranks: this process among the others.
        say: told what was passed over, and every field that differs from the saved run.

    Raises:
        ConfigError: some rank does not see the folder, a checkpoint asked for by name is damaged, or the saved state has
            no meaning in this run.
    """
    try:
        require_shared(start.folder, ranks)
        return _fitting_checkpoint(start, composed, dataset, ranks, say)
    except ConfigError:
        if ranks.is_first and not start.continues:  # just made: the next --resume would take it for the newest run
            remove(start.folder)
        raise


def _fitting_checkpoint(start: Start, composed: Composed, dataset: Dataset, ranks: Ranks, say: Callable[[str], None]) -> Path | None:
    if start.checkpoint is not None:
        require_intact(start.checkpoint, ranks)
        checkpoint = start.checkpoint
    elif start.continues:
        found = newest_intact(start.folder / "checkpoints", ranks, say)
        if found is None:
            say(f"no intact checkpoint in '{start.folder}': starting from step 0")
            return None
        checkpoint = found
    else:
        return None
    for sentence in check_fits(checkpoint, read_state(checkpoint)["facts"], facts(composed, dataset)):
        say(f"changed since it was saved: {sentence}")
    return checkpoint


def facts(composed: Composed, dataset: Dataset) -> dict[str, Any]:
    """What a checkpoint remembers of its run, to name what has changed when it is resumed."""
    run = composed.run.model_dump(mode="json")
    run["model"] |= {"ffn_width": composed.run.model.hidden_width, "kv_heads": composed.run.model.key_heads}
    known = environment(composed, dataset.digest)
    return {
        **run,
        # The global batch, whatever DeepSpeed is told where ranks share sequences.
        "deepspeed": {**composed.deepspeed, "train_batch_size": composed.run.batch.global_batch_size},
        "tokenizer_identity": dataset.tokenizer.identity,
        **{key: known[key] for key in ("dataset_digest", "world_size", "precision", "activation_checkpointing", "compiled", "device", "versions")},
    }


def _is_checkpoint(path: Path) -> bool:
    return (path / STATE).is_file()


def _is_run(path: Path) -> bool:
    return (path / "run.yaml").is_file()


def _require_run(path: Path) -> None:
    if not _is_run(path):
        near = f"; '{complete(path)[0]}' is one" if path.is_dir() and complete(path) else ""
        raise ConfigError(
            Problem(
                f"--resume '{path}' is neither the folder of a run nor a checkpoint",
                "there is nothing in it to go on from",
                f"give runs/NAME, or runs/NAME/checkpoints/step_NNNNNNN{near}; alone, --resume takes the newest run of this name",
            )
        )


def _newest(name: str) -> Path | None:
    """Of ``runs/NAME``, ``runs/NAME-2``, ... the one that was started last, among those with a checkpoint if any has one."""
    numbered = re.compile(re.escape(name) + r"(-\d+)?")
    found = [path for path in Path("runs").glob(f"{name}*") if numbered.fullmatch(path.name) and _is_run(path)]
    return max(found, key=lambda path: ((path / "checkpoints" / LATEST).exists(), (path / "run.yaml").stat().st_mtime), default=None)


def configuration(config: str | None, deepspeed_config: str | None, overrides: Sequence[str], run_dir: str | None, resume: str | None) -> tuple[Path, Path]:
    """The two files to compose: those that were given, else those of the run to resume, else the defaults.

    Args:
        config: ``--config``.
        deepspeed_config: ``--deepspeed_config``.
        overrides: each ``--set``; one may name the run.
        run_dir: ``--run-dir``.
        resume: ``--resume``.
    """
    named = config or DEFAULT_RUN
    resumed: Path | None = None
    if resume == AUTO:
        names = [text.removeprefix("name=") for text in overrides if text.startswith("name=")] or [read_run_yaml(named).values.get("name")]
        resumed = Path(run_dir) if run_dir else _newest(str(names[-1]))
    elif resume is not None:
        # resolve: a link to a checkpoint, or ".", is not in the run's folder by its name
        resumed = Path(resume).resolve().parent.parent if _is_checkpoint(Path(resume)) else Path(resume)
    if resumed is None or not (resumed / STATED).is_file():
        return Path(named), Path(deepspeed_config or DEFAULT_DEEPSPEED)
    return Path(config or resumed / "run.yaml"), Path(deepspeed_config or resumed / STATED)
