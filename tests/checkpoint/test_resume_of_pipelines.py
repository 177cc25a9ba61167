"""Checkpoints of pipelines: resumed by any other arrangement of ranks, and read as the checkpoint of one model."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from running import train_run
from saving import load_and_train, train_and_save

from ds_gpt.engine.state import WEIGHT

# fp32 sums in another order, as in tests/parity.
FP32_TOLERANCE = 1e-5
HARD = ["model.dropout=0.1", "gradient_accumulation_steps=2", "gradient_clipping=0.75"]
# (ranks, settings); the model has four layers
WAYS: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "two ranks": (2, []),
    "two stages": (2, ["parallel.pipeline=2"]),
    "two stages twice": (4, ["parallel.pipeline=2"]),
    "four stages": (4, ["parallel.pipeline=4"]),
    "shared sequences": (4, ["parallel.pipeline=2", "parallel.sequence=2"]),
}
FOUR_LAYERS = ["model.layers=4", "gradient_accumulation_steps=2"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resume_is_exact_at_the_same_arrangement(precision: str, tmp_path: Path) -> None:
    settings = [*HARD, "parallel.pipeline=2", f"bf16.enabled={str(precision == 'bf16').lower()}"]
    for world_size in (2, 4) if precision == "fp32" else (4,):
        cases = [(stage, settings, tmp_path / f"{world_size}-{stage}") for stage in ("zero0", "zero1")]
        cases += [("zero1", [*settings, "model.tied_head=false"], tmp_path / f"{world_size}-untied")]
        never_stopped = run_ranks(world_size, train_and_save, cases, 3, 6)
        resumed = run_ranks(world_size, load_and_train, cases, 6)
        for expected, found in zip(never_stopped, resumed, strict=True):
            assert found == expected, "losses, norms, weights or moments differ"


def test_resume_at_any_arrangement(tmp_path: Path) -> None:
    expected, sources = {}, {}
    for name, (world_size, settings) in WAYS.items():
        cases = [("zero1", [*FOUR_LAYERS, *settings], tmp_path / name)]
        ((expected[name], _),) = run_ranks(world_size, train_and_save, cases, 4, 7)[0]
        sources[name] = tmp_path / name
    staged = [name for name, (_, settings) in WAYS.items() if settings]
    for target, (world_size, settings) in WAYS.items():
        wanted = [name for name in sources if name in staged or target in staged]
        cases = [("zero1", [*FOUR_LAYERS, *settings], sources[name]) for name in wanted]
        results = run_ranks(world_size, load_and_train, cases, 7)[0]
        for source, (curve, _) in zip(wanted, results, strict=True):
            pairs = itertools.chain.from_iterable(zip(a, b, strict=True) for a, b in zip(curve, expected[source], strict=True))
            worst = max(abs(found - right) / abs(right) for found, right in pairs)
            assert worst < FP32_TOLERANCE, f"saved by {source}, resumed by {target}: {worst}"


def test_pipelines_and_other_zero_stages_resume_each_other(tmp_path: Path) -> None:
    """Through ZeRO-3 and ZeRO-0 too: the files know nothing of either."""
    plain = [(stage, FOUR_LAYERS, tmp_path / stage) for stage in ("zero0", "zero3")]
    expected = [curve for curve, _ in run_ranks(2, train_and_save, plain, 3, 5)[0]]
    staged = [("zero1", [*FOUR_LAYERS, "parallel.pipeline=4"], folder) for *_, folder in plain]
    for (curve, _), wanted in zip(run_ranks(4, load_and_train, staged, 5)[0], expected, strict=True):
        assert torch.tensor(curve).allclose(torch.tensor(wanted), rtol=FP32_TOLERANCE, atol=0)
    saved = [("zero1", [*FOUR_LAYERS, "parallel.pipeline=4"], tmp_path / "staged")]
    ((wanted, _),) = run_ranks(4, train_and_save, saved, 3, 5)[0]
    for curve, _ in run_ranks(2, load_and_train, [(stage, FOUR_LAYERS, tmp_path / "staged") for stage in ("zero0", "zero3")], 5)[0]:
        assert torch.tensor(curve).allclose(torch.tensor(wanted), rtol=FP32_TOLERANCE, atol=0)


RUN = ["model.layers=4", "training.steps=4", "evaluation.every=4", "evaluation.sequences=64", "optimizer.name=sgd", "optimizer.lr=0.3"]


@pytest.mark.parametrize("head", ["true", "false"])
def test_a_trained_pipelines_run_is_the_run_of_one_process(head: str, tmp_path: Path) -> None:
    """Trainer, checkpoint, metrics and the saved model: equal but for rounding. Nothing of the model is saved twice."""
    settings = [*RUN, f"model.tied_head={head}"]
    run_ranks(1, train_run, str(tmp_path / "plain"), "zero1", settings)
    run_ranks(4, train_run, str(tmp_path / "staged"), "zero1", [*settings, "parallel.pipeline=2"])
    plain, staged = (contents(tmp_path / name) for name in ("plain", "staged"))
    assert plain["weights"].keys() == staged["weights"].keys()
    for name, weight in plain["weights"].items():
        torch.testing.assert_close(staged["weights"][name], weight, rtol=1e-5, atol=1e-7)
    assert staged["elements"] == plain["elements"] == sum(weight.numel() for weight in plain["weights"].values())
    assert staged["sample"] == plain["sample"]
    assert staged["losses"] == pytest.approx(plain["losses"], rel=1e-5)


SICK = ["training.steps=40", "evaluation.every=20", "evaluation.sequences=8", "checkpoints.every=5", "checkpoints.keep_last=null"]


def test_a_run_whose_gradients_are_nan_on_the_last_stage_goes_back_as_any_other(tmp_path: Path) -> None:
    poison = dict.fromkeys((20, 21, 22), "nan")
    (plain,) = run_ranks(1, train_run, str(tmp_path / "plain"), "zero1", SICK, poison)
    by_rank = run_ranks(2, train_run, str(tmp_path / "staged"), "zero1", [*SICK, "parallel.pipeline=2"], poison)
    assert plain["state"].rollbacks == 1 and plain["state"].step == 40
    assert [found["state"] for found in by_rank] == [plain["state"]] * 2
    assert events(tmp_path / "staged") == events(tmp_path / "plain")
    assert {"non_finite", "rollback"} <= {kind for _, kind in events(tmp_path / "staged")}


def events(run: Path) -> list[tuple[int, str]]:
    return [(event["step"], event["event"]) for event in map(json.loads, (run / "events.jsonl").read_text().splitlines())]


def contents(run: Path) -> dict[str, Any]:
    """The saved model as it is used, and what the run recorded."""
    from safetensors import safe_open

    from ds_gpt.checkpoint.folder import complete
    from ds_gpt.checkpoint.saved_model import find_saved_model

    elements = 0
    for path in complete(run / "checkpoints")[0].glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            elements += sum(file.get_slice(key).get_shape()[0] for key in file.keys() if key.startswith(f"{WEIGHT}:"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "weights": dict(find_saved_model(run).load().named_parameters()),
        "elements": elements,
        "sample": (run / "sample.txt").read_text(),
        "losses": [value for line in lines for value in (line["loss"], line["grad_norm"], line.get("val_loss")) if value],
    }
