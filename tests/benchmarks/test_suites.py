"""Suites: cases as data, every end of a case recorded, going on after an interruption; the command line."""

from __future__ import annotations

import argparse
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from benchmarks import launch, machine, records, suite
from benchmarks.cases import SUITES, Case, Suite, read_suite
from benchmarks.prediction import predict_record
from benchmarks.results import peak_bytes, summary
from ds_gpt.config import ConfigError, Hardware

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"
CPU = machine.Machine("cpu", "CPU", 2, False, None)


@pytest.mark.parametrize("name", sorted(path.stem for path in SUITES.glob("*.yaml")))
def test_every_shipped_case_composes(name: str) -> None:
    read = read_suite(name)
    for case in read.cases:
        composed = case.composed(read.hardware(case.ranks))
        assert composed.micro_batch_size == case.micro_batch
        assert (composed.checkpoint_policy or "off") == case.checkpointing
        if case.precision in ("fp32", "bf16"):
            assert composed.precision == case.precision


def test_the_a100_suite_has_what_the_published_runs_need() -> None:
    cases = read_suite("a100").cases
    assert {(case.recipe, case.ranks) for case in cases} == {("gpt_1b", 1), ("gpt_1b", 8), ("shakespeare_char", 1), ("shakespeare_char", 8)}
    ladder = [case.micro_batch for case in cases if case.ladder == "1b-z2-8x-full-mbN"]
    assert ladder == [4, 8, 16, 32, 64]


def write_suite(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_everything_wrong_with_a_suite_is_told(tmp_path: Path) -> None:
    text = "device: cpu\ndefaults: {recipe: quickstart, ranks: 1, micro_batch: 8}\ncases:\n  - {name: a, trainer: dpp}\n  - {name: b, microbatch: 4}\n  - {name: c}\n  - {name: c}\n  - {name: d, compile: true}\n"
    with pytest.raises(ConfigError) as error:
        read_suite(write_suite(tmp_path, text))
    assert len(error.value.problems) == 4 and "d compiles on a CPU" in str(error.value)
    assert "did you mean 'micro_batch'?" in str(error.value) and "none of ds_gpt, ddp, fsdp2, hf_trainer" in str(error.value) and "two cases are called 'c'" in str(error.value)


SOUND = "device: cpu\ndefaults: {recipe: quickstart, ranks: 1, micro_batch: 8}\n"
BAD_SUITES = {
    "nothing": ("", "holds no cases"),
    "no mapping": ("- a\n- b\n", "holds no cases"),
    "no YAML": ("cases: [{\n", "cannot be read"),
    "no text": ("\udc93\udcff", "cannot be read"),
    "no cases": (SOUND, "'cases' is missing"),
    "none in the list": (SOUND + "cases: []\n", "cases = [] should have at least 1 item"),
    "no list": (SOUND + "cases: 3\n", "cases = 3 should be a valid list"),
    "cases of another kind": (SOUND + "cases: [a]\n", "cases.0 = 'a' should be a valid dictionary"),
    "no device": ("cases: [{name: a, recipe: quickstart, ranks: 1, micro_batch: 8}]\n", "'device' is missing"),
    "misspelt": (SOUND + "round: 2\ncases: [{name: a}]\n", "did you mean 'rounds'?"),
    "rounds": (SOUND + "rounds: 0\ncases: [{name: a}]\n", "rounds = 0 should be greater than 0"),
    "no recipe": ("device: cpu\ncases: [{name: a, ranks: 1, micro_batch: 8}]\n", "mine.yaml: a: 'recipe' is missing"),
    "no name": (SOUND + "cases: [{steps: 3, grow: true}]\n", "'name' is missing"),
    "ranks": (SOUND + "cases: [{name: a, ranks: two, steps: 0, micro_batch: -1, deadline_s: .nan}]\n", "a: ranks = 'two' should be a valid integer"),
    "overrides": (SOUND + "cases: [{name: a, overrides: model.width=32}]\n", "a: overrides = 'model.width=32' should be a valid list"),
    "matrix": (SOUND + "cases: [{name: a, matrix: {ranks: 2}}]\n", "should be lists by name"),
    "a path": (SOUND + "cases: [{name: ../a}]\n", "a case cannot be called '../a'"),
    "unfilled": (SOUND + "cases: [{name: 'a{rank}', matrix: {ranks: [1, 2]}}]\n", "a case cannot be called 'a{rank}'"),
}


@pytest.mark.parametrize("bad", BAD_SUITES)
def test_a_suite_that_makes_no_sense_is_refused(bad: str, tmp_path: Path) -> None:
    text, said = BAD_SUITES[bad]
    path = tmp_path / "mine.yaml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as error:
        read_suite(str(path))
    assert said in str(error.value)
    assert bad != "ranks" or len(error.value.problems) == 4, "all at once"


def test_a_case_may_share_its_model_out() -> None:
    shared = Case("shared", "quickstart", 4, 2, "zero1", overrides=("parallel.tensor=2",)).composed(Hardware("cpu", "CPU", 4, bf16=False))
    assert (shared.data_ranks, shared.accumulation_steps, shared.run.batch.global_batch_size) == (2, 1, 4)


def test_degrees_may_be_stated_as_a_section() -> None:
    shared = Case("shared", "quickstart", 4, 2, "zero1", overrides=("parallel={tensor: 2}",)).composed(Hardware("cpu", "CPU", 4, bf16=False))
    assert (shared.data_ranks, shared.accumulation_steps, shared.run.batch.global_batch_size) == (2, 1, 4)


@pytest.mark.parametrize(
    ("override", "said"), [("parallel.tensor=two", "parallel.tensor"), ("zero_optimization.stage=9", "stage"), ("parallel.tensor=3", "4 ranks are not")]
)
def test_a_case_that_is_impossible_is_named(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"case wrong: .*{said}"):
        Case("wrong", "quickstart", 4, 2, "zero1", overrides=(override,)).composed(Hardware("cpu", "CPU", 4, bf16=False))


def test_all_impossible_cases_are_told_before_any_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "device: cpu\ndefaults: {recipe: quickstart, ranks: 2, micro_batch: 8, deepspeed: zero3}\ncases:\n  - {name: a}\n  - {name: b, overrides: [parallel.tensor=2]}\n  - {name: c, overrides: [parallel.tensor=3]}\n"
    monkeypatch.setattr(launch, "run", lambda *_: pytest.fail("a case was run"))
    for dry in ([], ["--dry-run"]):
        parser = argparse.ArgumentParser()
        suite.add_arguments(parser)
        options = parser.parse_args(["--suite", write_suite(tmp_path, text), "--records", str(tmp_path), *dry])
        with pytest.raises(ConfigError) as error:
            suite.run(options, Console(file=io.StringIO()))
        assert {problem.what.split(":")[0] for problem in error.value.problems} == {"case b", "case c"}


@pytest.mark.parametrize("price", ["-1", "nan", "inf"])
def test_a_price_that_is_none_is_refused(price: str) -> None:
    parser = argparse.ArgumentParser()
    suite.add_arguments(parser)
    with pytest.raises(ConfigError, match="is not a price"):
        suite.run(parser.parse_args(["--suite", "cpu", "--dry-run", "--price-per-hour", price]))


def test_an_unknown_suite_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'a100'"):
        read_suite("a10")


def test_a_gpu_suite_refuses_a_cpu_and_another_gpu() -> None:
    with pytest.raises(ConfigError, match="needs an A100 GPU, and this machine has none"):
        machine.check(CPU, "a100", "A100")
    other = machine.Machine("cuda", "NVIDIA H200", 1, True, "570")
    with pytest.raises(ConfigError, match="has a NVIDIA H200"):
        machine.check(other, "a100", "A100")
    machine.check(other, "device_smoke", "cuda")
    machine.check(CPU, "scaling", "any")


def finished(case: Case, status: str = "ok", message: str = "") -> launch.Outcome:
    """What a case would bring, from a stored record."""
    by_rank: list[dict[str, Any]] = []
    if status == "ok":
        record = json.loads((GOLDEN / "small-z1-2r.json").read_text())
        once = {key: record[key] for key in suite._ONCE}
        by_rank = [{**rank, **once} for rank in record["repeats"][0]["by_rank"]]
    return launch.Outcome(status, message, launch.command(case), 1.0, by_rank)


def run_of(folder: Path, cases: list[Case], rounds: int = 2) -> tuple[suite.Run, io.StringIO]:
    said = io.StringIO()
    return suite.Run(Suite("mine", "", "cpu", "CPU", False, rounds, tuple(cases)), cases, CPU, folder, None, Console(file=said, width=200)), said


def case(name: str, **fields: Any) -> Case:
    return Case(**{"name": name, "recipe": "quickstart", "ranks": 2, "micro_batch": 8, **fields})


def test_an_interrupted_suite_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def run(case: Case, worker: str) -> launch.Outcome:
        if len(started) == 3:
            raise KeyboardInterrupt
        started.append(case.name)
        return finished(case)

    monkeypatch.setattr(launch, "run", run)
    cases = [case("a"), case("b", checkpointing="full")]
    with pytest.raises(KeyboardInterrupt):
        run_of(tmp_path, cases)[0].all_cases(fresh=False)
    assert started == ["a", "b", "a"], "in turns"
    monkeypatch.setattr(launch, "run", lambda case, worker: started.append(case.name) or finished(case))
    run_of(tmp_path, cases)[0].all_cases(fresh=False)
    assert started == ["a", "b", "a", "b"]
    kept = [json.loads((tmp_path / f"{name}.json").read_text()) for name in "ab"]
    assert [len(record["repeats"]) for record in kept] == [2, 2]
    assert [record["measured"] for record in kept] == [summary(record) for record in kept]
    run_of(tmp_path, cases)[0].all_cases(fresh=False)
    assert len(started) == 4
    run_of(tmp_path, [case("a", steps=30), cases[1]])[0].all_cases(fresh=False)
    assert started[4:] == ["a", "a"], "a case that changed is measured anew"
    run_of(tmp_path, cases)[0].all_cases(fresh=True)
    assert len(started) == 10


def test_a_damaged_record_ends_a_suite_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "run", lambda case, worker: finished(case))
    cases = [case("a"), case("b")]
    run_of(tmp_path, cases, rounds=1)[0].all_cases(fresh=False)
    half = (tmp_path / "b.json").read_text()[:700]
    (tmp_path / "b.json").write_text(half)
    monkeypatch.setattr(launch, "run", lambda *_: pytest.fail("a case was run"))
    with pytest.raises(ConfigError, match=r"b.json' is no record: .* line"):
        run_of(tmp_path, cases, rounds=2)[0].all_cases(fresh=False)
    assert (tmp_path / "b.json").read_text() == half
    monkeypatch.setattr(launch, "run", lambda case, worker: finished(case))
    run_of(tmp_path, cases, rounds=1)[0].all_cases(fresh=True)
    assert json.loads((tmp_path / "b.json").read_text())["status"] == "ok"


def test_records_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="records cannot be written into .*Not a directory"):
        records.require_writable(tmp_path / "file" / "records")
    (tmp_path / "a.json").mkdir()
    with pytest.raises(ConfigError, match=r"a.json' cannot be written: Is a directory"):
        records.save(tmp_path / "a.json", {"case": "a"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "file"], "half of a record is left"


def test_what_fails_is_recorded_and_a_ladder_stops_where_memory_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    ends = {"mb16": "out_of_memory", "late": "timeout", "broken": "crash"}

    def run(case: Case, worker: str) -> launch.Outcome:
        started.append(case.name)
        return finished(case, ends.get(case.name, "ok"), "why it ended")

    monkeypatch.setattr(launch, "run", run)
    ladder = [case(f"mb{micro}", micro_batch=micro, ladder="mbN") for micro in (8, 16, 32)]
    made, said = run_of(tmp_path, [*ladder, case("late", deepspeed="zero1"), case("broken", deepspeed="zero2"), case("last", deepspeed="zero3")], rounds=1)
    made.all_cases(fresh=False)
    assert started == ["mb8", "mb16", "late", "broken", "last"]
    assert "not tried: mb16 ran out of memory already" in said.getvalue()
    for name, status in ends.items():
        record = json.loads((tmp_path / f"{name}.json").read_text())
        assert (record["status"], record["message"], record["measured"]) == (status, "why it ended", None)
        assert record["command"] and record["digest"] and record["versions"] and record["run"] and record["deepspeed"]
    again, _ = run_of(tmp_path, [*ladder], rounds=1)
    again.all_cases(fresh=False)
    assert len(started) == 5, "a recorded failure is a result, too"


REAL_ENDS = {
    "out_of_memory": case("o", ranks=1, overrides=("model.width=262144", "model.heads=4")),
    "crash": case("c", ranks=1, overrides=("data.corpus=/nowhere/at/all.txt",)),
    "timeout": case("t", ranks=2, deadline_s=2.0),
}


@pytest.mark.parametrize("status", sorted(REAL_ENDS))
def test_real_processes_that_end_badly(status: str) -> None:
    outcome = launch.run(REAL_ENDS[status])
    assert (outcome.status, outcome.by_rank) == (status, [])
    assert {"out_of_memory": "allocate", "crash": "/nowhere/at/all.txt", "timeout": "not done after 2 s"}[status] in outcome.message


def test_a_real_case_from_the_command_line(tmp_path: Path) -> None:
    """`ds-gpt bench` to a record and a report, on the smallest model that there is."""
    path = write_suite(
        tmp_path,
        "device: cpu\ndefaults: {recipe: quickstart, ranks: 1, micro_batch: 2, threads: 1, warmup: 1, steps: 3, overrides: [model.layers=1, model.width=32, model.context=16]}\n"
        "cases:\n  - {name: only, deepspeed: zero1}\n  - {name: other}\n"
        "  - {name: pairs, deepspeed: zero1, overrides: [stage=dpo, lora.rank=2, data.corpus=toy_pairs, model.layers=1, model.width=32, model.context=128]}\n",
    )
    command = [sys.executable, "-m", "ds_gpt", "bench", "--suite", path, "--skip", "oth*", "--records", str(tmp_path / "records"), "--price-per-hour", "2"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record = json.loads((tmp_path / "records" / "only.json").read_text())
    assert record["status"] == "ok" and record["deepspeed"]["zero_optimization"]["stage"] == 1
    assert record["measured"]["tokens_per_dollar"] == pytest.approx(record["measured"]["tokens_per_s"] * 1800)
    assert len(record["losses"]) == 1 + 3 + 3 + 2 + 2  # warm-up, timed, by phase, profiled, by kind
    pairs = json.loads((tmp_path / "records" / "pairs.json").read_text())
    assert pairs["tokens_per_step"] % (2 * 2) == 0 and pairs["tokens_per_step"] < 2 * 2 * 128, "two pairs, shorter than the context"
    assert predict_record(pairs).peak_bytes == pytest.approx(peak_bytes(pairs["measured"]), rel=0.02)
    assert not (tmp_path / "records" / "other.json").exists() and (tmp_path / "records" / "report.html").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_suite_and_its_ranks(number: int, tmp_path: Path) -> None:
    path = write_suite(tmp_path, "device: cpu\ncases:\n  - {name: a, recipe: quickstart, ranks: 2, micro_batch: 8, steps: 100000}\n")
    # As a shell starts a background job: with SIGINT ignored.
    command = [sys.executable, "-m", "benchmarks", "--suite", path, "--records", str(tmp_path / "records")]
    ignoring = f"import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv({sys.executable!r}, {command!r})"
    process = subprocess.Popen([sys.executable, "-c", ignoring], cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        end = time.monotonic() + 60
        while len(ranks := psutil.Process(process.pid).children(recursive=True)) < 3:
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        process.wait(timeout=30)
        _, alive = psutil.wait_procs(ranks, timeout=10)
        assert not alive and not (tmp_path / "records" / "a.json").exists()
    finally:
        process.kill()


def test_a_dry_run_lists_and_runs_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--suite", "a100", "--only", "1b-z2-8x-full-*", "--dry-run", "--records", str(tmp_path / "records")]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and ended.stdout.count("1b-z2-8x-full-mb") == 5 and "1.011B" in ended.stdout, ended.stdout
    assert not (tmp_path / "records").exists()
    refused = subprocess.run([sys.executable, "-m", "benchmarks", "--suite", "a100"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, env={"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)})
    assert refused.returncode != 0 and "--dry-run" in refused.stderr
