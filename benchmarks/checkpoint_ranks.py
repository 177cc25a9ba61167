"""The ranks of the case ``checkpoints``: an engine for each ZeRO stage and precision in turn takes steps, saves, and loads what was saved."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints import SEED, add_arguments
from benchmarks.records import REPOSITORY
from ds_gpt.checkpoint.resume import load as load_checkpoint
from ds_gpt.checkpoint.resume import newest_intact
from ds_gpt.checkpoint.run_state import RunState
from ds_gpt.checkpoint.saver import Saved, Saver
from ds_gpt.config import Composed, load
from ds_gpt.config.run import CheckpointsConfig
from ds_gpt.engine.engine import Engine
from ds_gpt.engine.ranks import Ranks
from ds_gpt.model.counts import parameters

STAGES, PRECISIONS = (0, 1, 2, 3), ("fp32", "bf16")
_SETTINGS = (
    "model.layers=4", "model.width=256", "model.heads=4", "model.context=64", "model.vocab_size=512", "batch.global_batch_size=16", f"seed={SEED}",
)  # fmt: skip
_SMALL = ("model.layers=1", "model.width=32", "model.heads=2")
_STEPS_BETWEEN_SAVES = 2


def main() -> None:
    """Every case in turn; the first rank writes the result to ``measured.json``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint_ranks")
    add_arguments(parser)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    ranks = Ranks.from_environment()
    ranks.connect()
    cases = []
    for precision in PRECISIONS:
        for stage in STAGES:
            settings = (*_SETTINGS, *(_SMALL if options.quick else ()), f"zero_optimization.stage={stage}", f"bf16.enabled={str(precision == 'bf16').lower()}")
            composed = load(REPOSITORY / "ds_configs/runs/quickstart.yaml", REPOSITORY / "ds_configs/zero1.json", ranks.hardware(), settings)
            case = {"stage": stage, "precision": precision, **_case(composed, ranks, options.folder / f"{stage}-{precision}", options.saves)}
            cases.append(case)
            if ranks.is_first:
                foreground, background = case["foreground_stall_s_median"], case["background_stall_s_median"]
                print(f"ZeRO {stage}, {precision}: stall {foreground:.3f} s, behind training {background:.3f} s, {case['bytes_per_parameter']:.2f} bytes a parameter")
    if ranks.is_first:
        measured = {"parameters": parameters(composed.run.model), "ranks": ranks.world_size, "cases": cases}
        (options.folder / "measured.json").write_text(json.dumps(measured))
    ranks.disconnect()
    sys.stdout.flush()
    os._exit(0)  # as ds_gpt.commands.train ends, and for its reason


def _case(composed: Composed, ranks: Ranks, folder: Path, saves: int) -> dict[str, Any]:
    """Save in the foreground and behind training, and load into a new engine."""
    engine = Engine(composed, ranks)
    trained = _Steps(engine)
    saved: dict[bool, list[Saved]] = {False: [], True: []}
    while_writing: list[float] = []
    for background, found in saved.items():
        saver = Saver(engine, folder, CheckpointsConfig(keep_last=2, background=background))
        for _ in range(saves):
            trained.take(_STEPS_BETWEEN_SAVES)
            done = saver.save(RunState(step=trained.steps), {})
            while done is None:
                while_writing += trained.take(1)
                done = saver.poll()
            found.append(done)
        saver.close()
    alone = trained.take(10)
    size_bytes = sum(path.stat().st_size for path in saved[True][-1].path.iterdir())
    engine.close()
    engine = Engine(composed, ranks)
    start = time.perf_counter()
    checkpoint = newest_intact(folder, ranks, print)
    assert checkpoint is not None
    checked = time.perf_counter()
    load_checkpoint(engine, checkpoint)
    loaded = time.perf_counter()
    engine.close()
    stalls = {kind: [one.stall_s for one in saved[background]] for kind, background in (("foreground", False), ("background", True))}
    return {
        **{f"{kind}_stall_s_median": statistics.median(values) for kind, values in stalls.items()},
        **{f"{kind}_stall_s": values for kind, values in stalls.items()},
        "background_total_s_median": statistics.median(one.total_s for one in saved[True]),
        "step_s_median": statistics.median(alone),
        "step_s_median_while_writing": statistics.median(while_writing),
        "resume_s": loaded - start,
        "resume_check_s": checked - start,
        "resume_load_s": loaded - checked,
        "bytes": size_bytes,
        "bytes_per_parameter": size_bytes / parameters(composed.run.model),
    }


class _Steps:
    """Takes steps on random tokens."""

    def __init__(self, engine: Engine) -> None:
        composed, self.steps = engine.composed, 0
        shape = (composed.micro_batch_size, composed.run.model.context)
        tokens_BT = torch.randint(composed.run.model.vocabulary, shape, generator=torch.Generator().manual_seed(SEED))
        self._engine, self._batches = engine, [(tokens_BT, tokens_BT.roll(-1, 1))] * composed.accumulation_steps

    def take(self, count: int) -> list[float]:
        """Seconds of each."""
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            self._engine.step(self.steps, self._batches, 1e-4)
            self.steps += 1
            seconds.append(time.perf_counter() - start)
        return seconds


if __name__ == "__main__":
    main()
