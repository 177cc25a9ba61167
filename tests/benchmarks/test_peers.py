"""Peers: Hugging Face's Trainer trains the same curve from the same JSON, and goals are judged as they should be."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import launch, machine, suite, tables
from benchmarks.cases import Case, read_suite

GOLDEN = Path(__file__).parent / "golden"
TINY = ("model.layers=2", "model.width=32", "model.context=32")


def measured(trainer: str, deepspeed: str, ranks: int) -> dict[str, Any]:
    case = Case("a", "quickstart", ranks, 4, deepspeed, 16, trainer=trainer, threads=1, warmup=1, steps=3, deadline_s=120, overrides=TINY)
    outcome = launch.run(case)
    assert outcome.status == "ok", outcome.message
    return outcome.by_rank[0]


def test_hugging_faces_trainer_trains_the_same_curve_and_is_measured_alike() -> None:
    peer, ours = measured("hf_trainer", "zero2", 2), measured("ds_gpt", "zero2", 2)
    for key in ("losses", "grad_norms"):
        assert peer[key] == pytest.approx(ours[key], rel=1e-5), key
    assert peer["deepspeed"] == ours["deepspeed"] and len(peer["losses"]) == 1 + 3 + 3 + 2 + 2
    for found in (peer, ours):
        assert len(found["steps_s"]) == len(found["cpu_steps_s"]) == 3
        phases = found["breakdown"]["phases_s"]
        assert set(phases) == {"forward", "backward", "optimizer", "bookkeeping"} and all(seconds > 0 for seconds in phases.values())
        assert found["breakdown"]["communication"]["all_reduce"]["bytes"] > 0 < found["overlap"]["communication_s"]
    kinds = ("weights", "gradients", "optimizer")
    assert [peer["memory"]["complete_bytes"][kind] for kind in kinds] == pytest.approx([ours["memory"]["complete_bytes"][kind] for kind in kinds], rel=0.02)


def test_a_peer_that_is_not_installed_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(suite, "find_spec", lambda name: None)
    with (tmp_path / "said").open("w") as said:
        here = machine.Machine("cpu", "CPU", 2, False, None)
        fits = [case.name for case in read_suite("peers").cases if suite._fits(case, here, Console(file=said, width=200))]
    assert fits and not [name for name in fits if name.startswith("hf")]
    assert "left out: hf-z1-2r, because transformers and accelerate cannot be imported: pip install -e '.[peers]'" in (tmp_path / "said").read_text()


def record(name: str, factor: float, **definition: Any) -> dict[str, Any]:
    """A case that takes `factor` times as long, steadily."""
    made = copy.deepcopy(json.loads((GOLDEN / "small-z1-2r.json").read_text()))
    made["case"] = name
    made["definition"] |= definition
    made["repeats"] = [copy.deepcopy(made["repeats"][0]) for _ in range(2)]
    for repeat in made["repeats"]:
        for rank in repeat["by_rank"]:
            rank["steps_s"] = [factor * (0.1 + 0.001 * (step % 3)) for step in range(15)]
    return made


@pytest.mark.parametrize(("factor", "verdict"), [(0.8, "reached"), (0.9, "missed")])
def test_a_goal_is_reached_or_missed(factor: float, verdict: str) -> None:
    table = tables.goals([record("slow", 1.0), record("fast", factor, goals={"slow": 1.2, "elsewhere": 2.0})])
    (row,) = table[1:]
    assert row[2] == f"{1 / factor:.2f}" and row[4:6] == ["1.20", verdict]


def test_a_goal_within_the_noise_is_open() -> None:
    noisy = record("fast", 0.8, goals={"slow": 1.2})
    for rank in noisy["repeats"][0]["by_rank"]:
        rank["steps_s"] = [1.5 * seconds for seconds in rank["steps_s"]]
    (row,) = tables.goals([record("slow", 1.0), noisy])[1:]
    assert row[5].startswith("open")


def test_the_peers_suite_has_every_goal() -> None:
    goals = {(case.name, other): goal for case in read_suite("peers").cases for other, goal in case.goals.items()}
    assert all(goals[f"z{stage}-1r", "plain-1r"] == 0.98 for stage in (0, 1, 2))
    assert goals["z1-2r", "plain-1r-2threads"] == 1.3 and goals["z1-2r", "z1-1r"] == 1.9 and goals["z1-2r", "hf-z1-2r"] == 1.5
