"""Faults in the data of real runs on two ranks: the run goes back, passes them, and ends as well as one that had none."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_ranks
from trainer_bench import scalars

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
from running import RUN, _poison, tiny_dataset, train_run  # noqa: E402

STAGES = ("zero0", "zero1", "zero2", "zero3")
SETTINGS = [
    "training.steps=120", "schedule.warmup_steps=10", "evaluation.every=40", "evaluation.sequences=64", "checkpoints.every=10", "checkpoints.keep_last=null",
    "health.lr_factor_steps=20",
]  # fmt: skip
AT = 50  # the global batch from which on the data are bad; it is trained on in step 51


def stretch(harm: str, length: int) -> dict[int, str]:
    return dict.fromkeys(range(AT, AT + length), harm)


def lines(folder: Path, name: str = "events.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def events(folder: Path, *names: str) -> list[dict[str, Any]]:
    return [line for line in lines(folder) if line["event"] in names]


def runs(ranks: Any, folder: Path, cases: dict[str, tuple[list[str], dict[int, str]]]) -> dict[str, Any]:
    """Each case's end state and said error; all ranks end alike."""
    from ds_gpt.config import RunStopped

    results = {}
    for name, (overrides, poison) in cases.items():
        try:
            results[name] = train_run(ranks, str(folder / name), "zero2", [*SETTINGS, *overrides], poison)
        except RunStopped as error:
            results[name] = str(error)
    return results


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Runs that differ in what is wrong with their data and in what is to be done about it."""
    folder = tmp_path_factory.mktemp("runs")
    cases = {
        "clean": ([], {}),
        "spike": (["logging.tensorboard=true"], stretch("loss", 3)),
        "long": ([], stretch("loss", 20)),
        "lone": ([], {AT: "loss", AT + 9: "nan"}),
        "nan": ([], stretch("nan", 3)),
        "endless": (["checkpoints.every=5"], stretch("loss", 1000)),
        "warn": (["health.action=warn"], stretch("loss", 5)),
        "stop": (["health.action=stop"], stretch("loss", 5)),
        "unsaved": (["checkpoints.every=null"], stretch("loss", 5)),
        "lost": (["checkpoints.every=null"], stretch("nan", 1000)),
        "due": ([], {AT - 1: "loss"}),
    }
    first, other = run_ranks(2, runs, folder, cases, deadline_s=300)
    for name in cases:
        if isinstance(first[name], str):
            assert first[name] == other[name]
        else:
            assert first[name]["state"] == other[name]["state"], "every rank stands at the same place"
    return folder, first


def test_a_confirmed_spike_takes_the_run_back_and_past_its_data(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, results = ran
    state = results["spike"]["state"]
    (spike,) = events(folder / "spike", "loss_spike")
    assert spike["since"] == 51 and spike["step"] == 53 and "limit" in spike["text"] and "go back" in spike["text"]
    (back,) = events(folder / "spike", "rollback")
    assert (back["step"], back["to_step"], back["skipped"], back["lr_factor"], back["lr_factor_until"]) == (53, 40, [40, 52], 0.5, 73)
    assert state.skipped == ((40, 52),) and state.rollbacks == 1
    assert (state.step, state.data_step) == (120, 133), "every batch once, but those that were skipped"
    assert state.tokens == 120 * 256, "tokens that are in the weights"


def test_the_learning_rate_is_lower_for_a_while_and_then_the_schedule_s(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = ran
    clean = {line["step"]: line["lr"] for line in lines(folder / "clean", "metrics.jsonl")}
    found = lines(folder / "spike", "metrics.jsonl")
    assert [line["step"] for line in found] == [*range(1, 54), *range(41, 121)]
    for number, line in enumerate(found):
        lowered = number >= 53 and line["step"] <= 73
        assert line["lr"] == clean[line["step"]] * (0.5 if lowered else 1), line


def test_it_is_in_the_metrics_and_in_tensorboard(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = ran
    noted = [(line["step"], line["rolled_back_from"]) for line in lines(folder / "spike", "metrics.jsonl") if "rolled_back_from" in line]
    assert noted == [(41, 53)]
    assert scalars(folder / "spike")["train/rolled_back_from"] == {41: 53}


def test_the_end_is_as_good_as_without_the_fault(ran: tuple[Path, dict[str, Any]]) -> None:
    """Another 13 to 42 batches, and 32 steps at half the rate: 0.02 nats, a tenth of what counts as a spike."""
    folder, _ = ran
    loss = {name: lines(folder / name, "metrics.jsonl")[-1]["val_loss"] for name in ("clean", "spike", "long", "nan", "lone", "due")}
    for name, value in loss.items():
        assert value == pytest.approx(loss["clean"], abs=0.02), name


def test_a_stretch_longer_than_patience_is_passed_in_few_rollbacks(ran: tuple[Path, dict[str, Any]]) -> None:
    """Each rollback sees 3 bad batches of 20; every next one skips twice as far, or the run would give up."""
    folder, results = ran
    state = results["long"]["state"]
    assert state.rollbacks == 2 and state.step == 120
    (skipped,) = state.skipped
    assert skipped[0] < AT and skipped[1] >= AT + 19 - 2, "of the whole stretch, patience - 1 may be left: those are clipped and forgotten"
    assert [line["lr_factor"] for line in events(folder / "long", "rollback")] == [0.5, 0.25]


def test_a_lone_bad_batch_and_a_lone_nan_cause_no_rollback(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, results = ran
    assert results["lone"]["state"].rollbacks == 0 and results["lone"]["state"].data_step == 120
    assert events(folder / "lone", "rollback") == []
    (nan,) = events(folder / "lone", "non_finite")
    assert nan["step"] == AT + 10 and "the step was skipped" in nan["text"]
    skipped = [line["step"] for line in lines(folder / "lone", "metrics.jsonl") if line.get("skipped")]
    assert skipped == [AT + 10]


def test_nan_that_lasts_takes_the_run_back(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, results = ran
    (back,) = events(folder / "nan", "rollback")
    assert (back["step"], back["to_step"], back["skipped"]) == (53, 40, [40, 52])
    assert results["nan"]["weights"] == results["spike"]["weights"], "the same data, whatever was wrong with what was skipped"


def test_what_does_not_end_stops_the_run_after_max_rollbacks(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, results = ran
    assert len(events(folder / "endless", "rollback")) == 3
    said = results["endless"]
    assert "the run is sick at step" in said and "after 3 rollbacks (health.max_rollbacks = 3)" in said
    assert "nothing was saved since" in said and "--resume" in said
    saved = [int(path.name[5:]) for path in (folder / "endless" / "checkpoints").glob("step_*")]
    assert max(saved) == events(folder / "endless", "rollback")[-1]["to_step"], "no checkpoint from inside the spike"


def test_warn_only_says_it_and_goes_on_saving(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, results = ran
    assert results["warn"]["state"].data_step == 120 and events(folder / "warn", "rollback") == []
    assert len(events(folder / "warn", "loss_spike")) == 1
    saved = sorted(int(path.name[5:]) for path in (folder / "warn" / "checkpoints").glob("step_*"))
    assert saved == list(range(10, 121, 10))


def test_stop_ends_the_run_with_its_reason(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, results = ran
    assert results["stop"].startswith("the run is sick at step 53: loss ")
    assert lines(folder / "stop", "metrics.jsonl")[-1]["step"] == 53
    assert (folder / "stop" / "checkpoints" / "latest").read_text().strip() == "step_0000050"


def test_without_a_checkpoint_it_is_said_and_training_goes_on(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, results = ran
    (event,) = events(folder / "unsaved", "no_rollback")
    assert "set checkpoints.every" in event["text"]
    assert results["unsaved"]["state"].step == results["unsaved"]["state"].data_step == 120


def test_a_run_that_has_no_way_back_and_applies_no_step_is_ended(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, results = ran
    assert "the run is sick at step 114, and there is no checkpoint from before: " in results["lost"]
    assert "the 64. step in a row without an update" in results["lost"]
    assert [event["step"] for event in events(folder / "lost", "no_rollback")] == [53]


def test_a_save_that_falls_on_a_suspect_step_is_made_up_for(ran: tuple[Path, dict[str, Any]]) -> None:
    """Where checkpoints are a thousand steps apart, one odd batch must not cost a thousand steps."""
    saved = sorted(int(path.name[5:]) for path in (ran[0] / "due" / "checkpoints").glob("step_*"))
    assert saved == [10, 20, 30, 40, 51, 60, 70, 80, 90, 100, 110, 120]


# A rollback and a stop


STOPPED = ("zero2", "zero3")
CONSTANT = ["schedule.name=constant", "schedule.warmup_steps=0", "optimizer.lr=0.003", "model.dropout=0.1"]


def stops_and_goes_on(ranks: Any, folder: Path) -> dict[str, Any]:
    whole = [*SETTINGS, *CONSTANT, "training.steps=90"]
    poison = stretch("loss", 3)
    results = {}
    for deepspeed in STOPPED:
        name = str(folder / f"{deepspeed}-stopped")
        train_run(ranks, name, deepspeed, [*whole, "training.steps=60"], poison, report=False)  # stops at lr x 0.5
        results[deepspeed] = (
            train_run(ranks, str(folder / f"{deepspeed}-whole"), deepspeed, whole, poison),
            train_run(ranks, name, deepspeed, whole, poison),
        )
    # Stopped in the spike's second step, before it is confirmed, and saved there because the user asked for an end.
    name = str(folder / "inside")
    train_run(ranks, name, "zero1", [*whole, f"training.steps={AT + 2}"], stretch("loss", 5), report=False)
    results["inside"] = train_run(ranks, name, "zero1", whole, stretch("loss", 5), report=False)
    return results


def crashes_and_goes_on(ranks: Any, folder: Path) -> Any:
    """A crash at the second step after the rollback: in the whole stretch of data that is not to be seen again."""
    from ds_gpt.trainer.loop import Trainer

    settings, poison, load_of = [*SETTINGS, *CONSTANT, "training.steps=90"], stretch("loss", 3), Trainer.__init__

    def crashing(self: Any, *args: Any) -> None:
        load_of(self, *args)
        load = self.loader.load
        self.loader.load = lambda step: 1 / 0 if step == AT + 4 else load(step)

    Trainer.__init__ = crashing  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        train_run(ranks, str(folder / "crashed"), "zero1", settings, poison, report=False)
    Trainer.__init__ = load_of  # type: ignore[method-assign]
    return train_run(ranks, str(folder / "crashed"), "zero1", settings, poison)


def test_a_rollback_is_remembered_across_a_stop_bit_for_bit(tmp_path: Path) -> None:
    for results in run_ranks(2, stops_and_goes_on, tmp_path, deadline_s=240):
        for deepspeed in STOPPED:
            whole, stopped = results[deepspeed]
            assert stopped["from"] == 60 and stopped["state"] == whole["state"] and whole["state"].skipped == ((40, 52),)
            assert stopped["weights"] == whole["weights"], deepspeed
        assert results["inside"]["from"] == AT + 2 and results["inside"]["state"].step == 90
    (back,) = events(tmp_path / "inside", "rollback")
    assert back["to_step"] == 50 and back["step"] == AT + 5, "the level that the spike is compared with was saved"
    assert not (tmp_path / "inside" / "checkpoints" / f"step_{AT + 2:07d}").exists()


def test_a_crash_right_after_a_rollback_does_not_forget_it(tmp_path: Path) -> None:
    for result in run_ranks(2, crashes_and_goes_on, tmp_path):
        assert result["from"] == 41 and result["state"].skipped == ((40, 52),) and result["state"].rollbacks == 1
    assert len(events(tmp_path / "crashed", "rollback")) == 1


def as_if_it_had_never_been(ranks: Any, folder: Path) -> list[tuple[Any, Any]]:
    """For every way to keep the state: the weights after a rollback in the running engine, and those of a new engine that loads the same."""
    from saving import weights

    from ds_gpt.checkpoint.resume import load
    from ds_gpt.engine.engine import Engine
    from ds_gpt.trainer.loop import Trainer
    from ds_gpt.trainer.run_folder import RunFolder
    from tiny import tiny

    results = []
    cases = [(deepspeed, []) for deepspeed in STAGES] + [("zero1", ["bf16.enabled=true"]), ("fp16", ["fp16.initial_scale_power=8", "fp16.loss_scale_window=7"])]
    for number, (deepspeed, precision) in enumerate(cases):
        overrides = [*SETTINGS, *CONSTANT, *precision, "training.steps=54", "gradient_accumulation_steps=2", "gradient_clipping=0.5"]
        rolled_back = train_run(ranks, str(folder / f"{number}"), deepspeed, overrides, stretch("loss", 3))
        assert rolled_back["state"].skipped == ((40, 52),), (deepspeed, rolled_back["state"])
        composed = tiny(deepspeed, ranks.world_size, [*RUN, *overrides])
        (folder / f"{number}-new").mkdir(exist_ok=True)
        engine = Engine(composed, ranks)
        trainer = Trainer(composed, tiny_dataset(), engine, RunFolder(folder / f"{number}-new"), None)
        state = load(engine, folder / f"{number}" / "checkpoints" / "step_0000040").state
        _poison(trainer, engine, {})
        ended = rolled_back["state"]
        trainer.train(replace(state, data_step=53, lr_factor=ended.lr_factor, lr_factor_until=ended.lr_factor_until))
        results.append((rolled_back["weights"], weights(engine)))
        engine.close()
    return results


def test_nothing_of_the_spike_is_left_in_the_engine(tmp_path: Path) -> None:
    for results in run_ranks(2, as_if_it_had_never_been, tmp_path, deadline_s=240):
        for number, (rolled_back, new) in enumerate(results):
            assert rolled_back == new, number


# Numbers that are not finite


def around_a_nan(ranks: Any) -> list[tuple[Any, ...]]:
    """With NaN in the last rank's gradient in step 2 only: that step's result, what it changed, and the next step with and without it."""
    from saving import build, weights

    results = []
    for deepspeed in STAGES:
        engine, loader = build(ranks, deepspeed, ["gradient_clipping=0.5"])
        armed = [False]
        engine.model.norm.weight.register_hook(lambda gradient: gradient * float("nan") if armed[0] else gradient)
        for step in range(2):
            engine.step(step, loader.load(step), 0.003)
        before = weights(engine)
        armed[0] = ranks.rank == ranks.world_size - 1
        result = engine.step(2, loader.load(2), 0.003)
        armed[0] = False
        after = weights(engine)
        engine.step(3, loader.load(3), 0.003)
        following = weights(engine)
        engine.close()
        engine, loader = build(ranks, deepspeed, ["gradient_clipping=0.5"])
        for step in (0, 1, 3):
            engine.step(step, loader.load(step), 0.003)
        results.append((deepspeed, result, before == after, following == weights(engine)))
        engine.close()
    return results


def test_nan_in_one_rank_s_gradient_is_seen_by_all_and_reaches_no_weight() -> None:
    for results in run_ranks(2, around_a_nan, deadline_s=240):
        for deepspeed, result, unchanged, as_without in results:
            assert not result.applied and not abs(result.grad_norm) < float("inf"), deepspeed
            assert unchanged and as_without, deepspeed


def test_an_fp16_loss_scale_that_collapses_does_not_end_the_run_by_deepspeed_s_exception(tmp_path: Path) -> None:
    """With the scale at its least and still overflowing, DeepSpeed raises a bare Exception; here health decides."""
    fp16 = ["fp16.enabled=true", "bf16.enabled=false", "fp16.initial_scale_power=6", "fp16.hysteresis=1"]
    cases = {"fp16": (fp16, stretch("nan", 14)), "hopeless": ([*fp16, "health.max_rollbacks=1"], stretch("nan", 1000))}
    results = run_ranks(2, runs, tmp_path, cases, deadline_s=240)[0]
    assert results["fp16"]["state"].step == 120 and results["fp16"]["state"].rollbacks >= 1
    collapsed = events(tmp_path / "fp16", "loss_scale")
    assert any("still overflowing" in line["text"] for line in collapsed)
    assert "the run is sick" in results["hopeless"] and "bf16, or a lower lr" in results["hopeless"]
