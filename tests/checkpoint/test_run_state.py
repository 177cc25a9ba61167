"""The few numbers from which everything else of a run follows."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from faults import at_steps
from forked_ranks import run_ranks
from made import make
from running import train_run

from ds_gpt.checkpoint.resume import check_fits, differences, state_from
from ds_gpt.checkpoint.run_state import RunState
from ds_gpt.checkpoint.shards import ShardReader
from ds_gpt.config import ConfigError

ROLLED_BACK = RunState(step=5, data_step=9, tokens=1280, lr_factor=0.25, lr_factor_until=7, rollbacks=2, skipped=((2, 3), (6, 7)))


def test_it_survives_json_among_other_facts() -> None:
    for state in (RunState(), ROLLED_BACK):
        assert state_from(json.loads(json.dumps({**asdict(state), "val_loss": 1.0, "facts": {}}))) == state


def test_a_step_moves_step_data_and_tokens_alone() -> None:
    after = ROLLED_BACK.after_step(256)
    assert differences(asdict(ROLLED_BACK), asdict(after)) == {"step": (5, 6), "data_step": (9, 10), "tokens": (1280, 1536)}


def test_the_learning_rate_is_reduced_until_its_step_and_not_longer() -> None:
    state, factors = ROLLED_BACK, []
    for _ in range(4):
        factors.append(state.factor())
        state = state.after_step(1)
    assert factors == [0.25, 0.25, 1.0, 1.0]
    assert RunState().factor() == 1.0


def test_differences_are_named_by_their_dotted_keys() -> None:
    saved = {"model": {"width": 8, "heads": 2}, "gone": {"x": 1}, "same": [1, 2]}
    assert differences(saved, {"model": {"width": 16, "heads": 2}, "same": [1, 2], "new": None, "other": 3}) == {
        "model.width": (8, 16), "gone.x": (1, None), "other": (None, 3),
    }  # fmt: skip


def test_another_model_is_refused_whatever_the_option() -> None:
    saved = {"model": {"layers": 2, "norm": "layernorm", "dropout": 0.1}, "seed": 1}
    with pytest.raises(ConfigError) as refused:
        check_fits(Path("step"), saved, {"model": {"layers": 3, "norm": "rmsnorm", "dropout": 0.0}, "seed": 2})
    assert [problem.what.split()[0] for problem in refused.value.problems] == ["model.layers", "model.norm"]
    newer = {"model": {**saved["model"], "dropout": 0.0, "bias": True}, "seed": 1}  # type: ignore[dict-item]
    assert check_fits(Path("step"), saved, newer) == ["model.bias: None when saved, True now", "model.dropout: 0.1 when saved, 0.0 now"]


def test_a_parameter_that_was_not_saved_does_not_start_at_zero(tmp_path: Path) -> None:
    with ShardReader(make(tmp_path, 1)) as shards:
        assert shards.read("w", "exp_avg", 0, 16) is None
        with pytest.raises(ValueError, match="no parameter 'v'"):
            shards.read("v", "weight", 0, 16)
        with pytest.raises(ValueError, match="lacks elements 16 to 17"):
            shards.read("w", "weight", 0, 18)


def resumed_after_a_rollback(ranks: Any, folder: Path) -> dict[str, Any]:
    """The run is as if it had been rolled back at step 4: interrupted at 6, resumed, and not interrupted at all."""
    from ds_gpt.trainer.loop import Trainer

    real = Trainer.train

    def train(self: Any, state: RunState) -> Any:
        from dataclasses import replace

        begun = state == RunState()
        return real(self, replace(state, data_step=4, lr_factor=0.5, lr_factor_until=8, rollbacks=1, skipped=((0, 3),)) if begun else state)

    Trainer.train = train  # type: ignore[method-assign]

    def stop() -> None:
        raise ConfigError([])

    settings = ["training.steps=12", "checkpoints.every=3"]
    whole = train_run(ranks, str(folder / "whole"), "zero1", settings)
    try:
        with at_steps({7: stop}):
            train_run(ranks, str(folder / "resumed"), "zero1", settings)
    except ConfigError:
        pass
    resumed = train_run(ranks, str(folder / "resumed"), "zero1", settings)
    return {"whole": whole, "resumed": resumed}


def test_a_resumed_run_remembers_its_rollback(tmp_path: Path) -> None:
    for results in run_ranks(2, resumed_after_a_rollback, tmp_path):
        assert results["resumed"]["from"] == 6
        state = results["resumed"]["state"]
        assert state == results["whole"]["state"] == RunState(12, 16, 12 * 256, 0.5, 8, 1, ((0, 3),))
        assert results["resumed"]["weights"] == results["whole"]["weights"]
    lines = {name: [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in ("whole", "resumed")}
    assert [line["step"] for line in lines["resumed"]] == list(range(1, 13))
    for key in ("lr", "loss", "grad_norm", "tokens"):
        assert [line[key] for line in lines["resumed"]] == [line[key] for line in lines["whole"]]
