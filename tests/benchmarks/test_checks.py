"""What a GPU's records must show: every check passes on records that show it, and each fails on those that do not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checks, report
from benchmarks.cases import read_suite
from benchmarks.checks import Check
from ds_gpt.planner import Prediction

GIB = 2**30
# GiB that the made records hold, and the planner says.
HELD = {"1b-z2-off": 28.0, "1b-z2-full": 18.0, "1b-z2-selective": 24.0, "10m-z1-math": 3.0}

Records = dict[str, dict[str, Any]]


def records() -> Records:
    """Records of the whole suite as a GPU that does everything right would leave them."""
    golden = json.loads((Path(__file__).parent / "golden" / "small-z1-1r.json").read_text())
    made: Records = {}
    for case in read_suite("device_smoke").cases:
        each = copy.deepcopy(golden)
        each |= {"case": case.name, "suite": "device_smoke", "precision": "bf16", "wall_s": 20.0, "driver": "570", "losses": [4.2, 4.1, 4.0]}
        each["definition"] |= {"trainer": case.trainer, "attention": case.attention, "compile": case.compile, "checkpointing": case.checkpointing}
        each["measured"] |= {"mfu": 0.45, "memory": {"allocated_peak_bytes": int(HELD.get(case.name, 1.4) * GIB), "reserved_peak_bytes": 30 * GIB}}
        plain = case.attention == "math"
        seen = {"communication_s": 0.0, "hidden_s": 0.0, "attention": ["_scaled_dot_product_attention_math" if plain else "_scaled_dot_product_flash_attention"]}
        seen["attention_kernels"] = [] if plain else ["void pytorch_flash::flash_bwd_kernel<...>(...)", "void pytorch_flash::flash_fwd_kernel<...>(...)"]
        for repeat in each["repeats"]:
            for rank in repeat["by_rank"]:
                rank["overlap"] = copy.deepcopy(seen)
        made[case.name] = each
    return made


def predict(record: dict[str, Any]) -> Prediction | None:
    return Prediction(int(HELD.get(record["case"], 1.4) * GIB), None) if record["definition"]["trainer"] == "ds_gpt" else None


def judged(made: Records) -> dict[str, Check]:
    return {check.what: check for check in checks.judge(list(made.values()), predict)}


def test_records_that_show_everything_pass_every_check() -> None:
    found = judged(records())
    assert {check.verdict for check in found.values()} == {"passed"}, [check for check in found.values() if not check.passed]
    assert sum(what.startswith("ZeRO") for what in found) == 4 and sum("checkpointing saves" in what for what in found) == 2
    assert sum(what.startswith("1.011B") for what in found) == 3 and "torch.compile on, against off" in found


def overlap_of(record: dict[str, Any]) -> dict[str, Any]:
    return record["repeats"][0]["by_rank"][0]["overlap"]


def fp32(made: Records) -> None:
    made["10m-z3"]["precision"] = "fp32"


def other_curve(made: Records) -> None:
    made["10m-z1-compile"]["losses"][2] *= 1.02


def no_number(made: Records) -> None:
    made["10m-z0"]["losses"][1] = float("nan")


def plain_kernel(made: Records) -> None:
    overlap_of(made["10m-z2"])["attention"] = ["_scaled_dot_product_attention_math"]


def no_kernel(made: Records) -> None:
    overlap_of(made["10m-z1-flash"])["attention_kernels"] = []


def flash_in_math(made: Records) -> None:
    overlap_of(made["10m-z1-math"])["attention"].append("_scaled_dot_product_flash_attention")


def saves_less(made: Records) -> None:
    made["1b-z2-selective"]["measured"]["memory"]["allocated_peak_bytes"] += GIB // 2


def needs_more(made: Records) -> None:
    made["10m-z1"]["measured"]["memory"]["allocated_peak_bytes"] *= 2


def too_fast(made: Records) -> None:
    made["1b-z2-off"]["measured"]["mfu"] = 1.2


def crashed(made: Records) -> None:
    made["10m-z1-compile"] |= {"status": "crash", "measured": None}


def slow(made: Records) -> None:
    made["10m-z0"]["wall_s"] = 500.0


@pytest.mark.parametrize(
    ("break_it", "failing"),
    [
        (fp32, "ZeRO 3 runs in bf16"),
        (other_curve, "losses of 10m-z1-compile are those of plain PyTorch"),
        (no_number, "losses of 10m-z0 are those of plain PyTorch"),
        (plain_kernel, "10m-z2 attends with a flash kernel"),
        (no_kernel, "10m-z1-flash attends with a flash kernel"),
        (flash_in_math, "10m-z1-math forms the whole score matrix"),
        (saves_less, "selective checkpointing saves what the planner says"),
        (needs_more, "peak of 10m-z1 is the planner's"),
        (too_fast, "1.011B parameters, context 2048: 1b-z2-off"),
        (crashed, "torch.compile on, against off"),
        (slow, "the whole suite"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_check_fails_where_the_records_do_not_show_it(break_it: Callable[[Records], None], failing: str, tmp_path: Path) -> None:
    made = records()
    break_it(made)
    assert judged(made)[failing].passed is False
    for name, record in made.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    assert checks.say(tmp_path) == 1


def test_a_gpu_that_is_too_small_leaves_checks_open() -> None:
    made = records()
    made["1b-z2-off"] |= {"status": "out_of_memory", "measured": None}
    found = judged(made)
    still = [check.what for check in found.values() if check.passed is None]
    assert sorted(still) == ["1.011B parameters, context 2048: 1b-z2-off", "full checkpointing saves what the planner says", "selective checkpointing saves what the planner says"]
    assert not [check for check in found.values() if check.passed is False]


def test_the_report_of_the_suite_shows_its_checks() -> None:
    section = next(section for section in report.build(list(records().values()), predict) if section.heading == "Checks")
    assert ["ZeRO 0 runs in bf16", "bf16", "bf16", "passed"] in section.table


def test_other_suites_have_no_checks(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text((Path(__file__).parent / "golden" / "small-z1-1r.json").read_text())
    assert checks.say(tmp_path) == 0 == checks.say(tmp_path / "nothing")
