"""Reports come from records alone: a golden one, the arithmetic under it, comparisons; and the committed ones are fresh."""

from __future__ import annotations

import copy
import json
import re
import shutil
import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare, report
from benchmarks.__main__ import main
from benchmarks.results import curve_difference, interval, quantile, read, summary
from ds_gpt.config import ConfigError, ModelConfig
from ds_gpt.model.counts import parameters
from ds_gpt.planner import Prediction

GOLDEN = Path(__file__).parent / "golden"
COMMITTED = Path(__file__).resolve().parents[2] / "benchmarks" / "records" / "cpu"
# Rounding of another order of fp32 sums: 25 steps of a model that learns.
CURVE_TOLERANCE = 1e-4


def record(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def test_the_report_of_stored_records_is_the_golden_one(tmp_path: Path) -> None:
    for path in GOLDEN.glob("*.json"):
        shutil.copy(path, tmp_path)
    report.write(tmp_path, predict=lambda record: None)
    assert (tmp_path / "report.md").read_text() == (GOLDEN / "report.md").read_text(), f"if meant: python -m benchmarks report {GOLDEN}"
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 5
    assert not re.search(r"(src|href)=\"(?!data:)|@import|url\(", page), "the page loads nothing"
    assert "planner" not in page and "Published elsewhere" in page and "58,300" in page


def test_what_was_published_stays_apart(tmp_path: Path) -> None:
    sections = list(report.build(read(GOLDEN), predict=lambda record: None))
    holding = [section for section in sections if any("58,300" in cell for row in section.table for cell in row)]
    assert [section.heading for section in holding] == ["Published elsewhere"] and holding[0].picture is None


def test_the_planners_column_appears_with_the_planner() -> None:
    sections = list(report.build(read(GOLDEN), predict=lambda record: Prediction(40 * 2**20, 20_000.0)))
    table = next(section.table for section in sections if section.heading == "Throughput and peak memory")
    assert [cell for cell in table[0] if "planner" in cell] == ["planner: peak", "planner: tokens/s"]
    measured = record("small-z1-2r")["measured"]
    row = next(row for row in table if row[0] == "ZeRO 1, 2 ranks")
    peak = sum(measured["memory"]["peak_bytes"].values())
    assert "40.0" in row and f"{40 * 2**20 / peak - 1:+.1%}" in row and f"{20_000 / measured['tokens_per_s'] - 1:+.1%}" in row


def test_a_summary_is_arithmetic_on_the_raw_numbers() -> None:
    made = record("small-z1-2r")
    first, second = made["repeats"][0]["by_rank"]
    first["steps_s"], second["steps_s"] = [0.1, 0.2, 0.3], [0.2, 0.1, 0.4]
    made["repeats"], made["price_per_hour"] = made["repeats"][:1], 3.6
    found = summary(made)
    assert found["step_s"] == {"median": 0.2, "p10": pytest.approx(0.2), "p90": pytest.approx(0.36)}  # of 0.2, 0.2, 0.4: the slower rank
    assert found["tokens_per_s"] == made["tokens_per_step"] / 0.2 == 2 * found["tokens_per_s_per_rank"]
    assert found["tokens_per_dollar"] == pytest.approx(found["tokens_per_s"] * 1000)
    assert quantile([1, 2, 3, 4], 0.5) == 2.5


def test_an_interval_holds_the_truth_and_repeats_widen_it() -> None:
    steps = [[1.0 + 0.01 * (index % 7) for index in range(40)] for _ in range(4)]
    low, high = interval(steps, steps, lambda a, b: statistics.median(a) / statistics.median(b))
    assert 0.97 < low <= 1 <= high < 1.03
    lucky = [[seconds * luck for seconds in steps[0]] for luck in (0.8, 1.0, 1.2, 1.4)]
    wide = interval(lucky, lucky, lambda a, b: statistics.median(a) / statistics.median(b))
    assert wide[1] - wide[0] > 5 * (high - low), "steps of one process share its luck"


def compared(tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> int:
    for name, content in (("a", before), ("b", after)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return compare.run(Namespace(before=tmp_path / "a.json", after=tmp_path / "b.json", threshold=0.95, memory_threshold=1.05))


def test_a_comparison_fails_only_past_a_threshold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = record("small-z1-2r")
    for index, repeat in enumerate(before["repeats"]):  # as steady as a quiet machine is
        for rank in repeat["by_rank"]:
            rank["steps_s"] = [0.1 + 0.001 * ((step + index) % 5) for step in range(16)]
    assert compared(tmp_path, before, before) == 0
    slower = copy.deepcopy(before)
    for repeat in slower["repeats"]:
        for rank in repeat["by_rank"]:
            rank["steps_s"] = [1.25 * seconds for seconds in rank["steps_s"]]
    assert compared(tmp_path, before, slower) == 1 and "0.800" in capsys.readouterr().out
    assert compared(tmp_path, slower, before) == 0
    larger = copy.deepcopy(before)
    for repeat in larger["repeats"]:
        for rank in repeat["by_rank"]:
            rank["memory"]["peak_bytes"]["activations"] *= 2
    assert compared(tmp_path, before, larger) == 1 and "more memory" in capsys.readouterr().out
    assert compared(tmp_path, before, {**before, "status": "out_of_memory", "measured": None}) == 1
    assert "it ran before" in capsys.readouterr().out


DAMAGE = {
    "half of it": (lambda text: text[:700], "line"),
    "nothing": (lambda text: "", "Expecting value"),
    "a merge": (lambda text: f"<<<<<<< HEAD\n{text}", "Expecting value"),
    "another kind": (lambda text: f"[{text}]", "a list"),
    "no bytes of text": (lambda text: "\udcff" + text, "utf-8"),
    "keys are gone": (lambda text: json.dumps({"definition": json.loads(text)["definition"]}), "lacks case, suite, status"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_named(damage: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "kept")
    change, said = DAMAGE[damage]
    path = tmp_path / "kept" / "small-z1-2r.json"
    path.write_bytes(change(path.read_text()).encode(errors="surrogateescape"))
    limits = {"threshold": 0.95, "memory_threshold": 1.05}
    for use in (
        lambda: report.write(tmp_path / "kept"),
        lambda: compare.run(Namespace(before=GOLDEN, after=tmp_path / "kept", **limits)),
        lambda: compare.run(Namespace(before=GOLDEN / path.name, after=path, **limits)),
    ):
        with pytest.raises(ConfigError, match=rf"small-z1-2r.json' is no (whole )?record: .*{said}"):
            use()


@pytest.mark.parametrize("threshold", ["nan", "0", "-1", "inf", "much"])
def test_a_threshold_that_nothing_could_miss_is_refused(threshold: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--threshold", "--memory-threshold"):
        with pytest.raises(SystemExit) as ended:
            main(["compare", str(GOLDEN), str(GOLDEN), option, threshold])
        assert ended.value.code == 2 and option in capsys.readouterr().err


def test_a_curve_that_is_off_is_seen() -> None:
    records = read(GOLDEN)
    assert max(value for value in curve_difference(records).values() if value is not None) < CURVE_TOLERANCE
    wrong = [{**each, "losses": [loss * 1.01 for loss in each["losses"]]} if each["case"] == "small-z1-2r" else each for each in records]
    assert curve_difference(wrong)["small-z1-2r"] > 0.009


needs_records = pytest.mark.skipif(not COMMITTED.is_dir(), reason="no records of the cpu suite are committed")


@needs_records
def test_nothing_is_benchmarked_that_does_not_train_right() -> None:
    differences = curve_difference(read(COMMITTED))
    small = {name: value for name, value in differences.items() if name.startswith("small")}
    assert len(small) >= 16 and all(value is not None and value < CURVE_TOLERANCE for value in small.values()), small
    wide = [made["losses"] for made in read(COMMITTED) if made["case"].startswith("wide")]
    assert all(losses == pytest.approx(wide[0], rel=CURVE_TOLERANCE) for losses in wide)


@needs_records
def test_the_committed_report_is_that_of_the_committed_records(tmp_path: Path) -> None:
    for path in COMMITTED.glob("*.json"):
        shutil.copy(path, tmp_path)
    report.write(tmp_path)
    assert (tmp_path / "report.md").read_text() == (COMMITTED / "report.md").read_text(), f"run: python -m benchmarks report {COMMITTED}"
    for made in read(COMMITTED):
        assert made["measured"] == summary(made), made["case"]


@needs_records
def test_zero_divides_the_memory_of_the_committed_run() -> None:
    found = {stage: json.loads((COMMITTED / f"wide-z{stage}-2r.json").read_text()) for stage in range(4)}
    count = parameters(ModelConfig(**found[0]["run"]["model"]))
    for stage, made in found.items():
        complete = made["measured"]["memory"]["complete_bytes"]
        assert complete["optimizer"] == pytest.approx(8 * count if stage == 0 else 6 * count, rel=0.01)
        assert complete["weights"] == pytest.approx(4 * count if stage < 3 else 2 * count, rel=0.02)  # stage 3 keeps small ones whole
    training = [max(sum(found[stage]["measured"]["memory"]["peak_by_phase_bytes"][phase].values()) for phase in ("forward", "backward")) for stage in range(4)]
    assert training[0] > training[1] > training[2] > training[3]
