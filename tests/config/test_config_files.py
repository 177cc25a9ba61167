"""Reading the two files: YAML 1.2 numbers, duplicates, corruption with its line, missing files with near names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from config_bench import CPU

from ds_gpt.config import ConfigError, flatten, load
from ds_gpt.config.files import read_deepspeed_json, read_run_yaml

SHIPPED = Path(__file__).resolve().parents[2] / "ds_configs"
BOTH = [(read_run_yaml, "--config", "run.yaml"), (read_deepspeed_json, "--deepspeed_config", "zero2.json")]


def only_problem(error: ConfigError) -> str:
    (problem,) = error.problems
    return f"{problem.what} | {problem.why} | {problem.fix}"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1E5", 1e5), ("6e-4", 6e-4), ("-2.5e+10", -2.5e10), (".5e3", 500.0), ("+1e2", 100.0), ("1.5", 1.5), ("3", 3)],
)
def test_numbers_are_those_of_yaml_1_2(tmp_path: Path, text: str, value: float) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"x: {text}\n")
    found = read_run_yaml(path).values["x"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", ["e3", "1e", "v1e-3", "'1e-3'", "1e-3x"])
def test_what_is_no_number_stays_text(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"x: {text}\n")
    assert read_run_yaml(path).values["x"] == text.strip("'")


def test_duplicate_yaml_key_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  layers: 2\n  width: 64\n  layers: 3\n")
    with pytest.raises(ConfigError) as caught:
        read_run_yaml(path)
    assert "line 4" in only_problem(caught.value) and "'layers'" in only_problem(caught.value)


@pytest.mark.parametrize("text", ["1: 2\n", "? [a, b]\n: c\n", "true: 1\n"])
def test_yaml_key_that_is_not_text_is_an_error_and_no_crash(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="line 1.*is not text"):
        read_run_yaml(path)


def test_duplicate_json_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"bf16": {"enabled": true, "enabled": false}}')
    with pytest.raises(ConfigError, match="'enabled' twice"):
        read_deepspeed_json(path)


@pytest.mark.parametrize(
    ("text", "line"), [("a: [1,\nb: 2\n", 3), ("a: 1\n\tb: 2\n", 2), ("a: 1\nb: 'x\n", 3), ("a: 1\n b: 2\n", 2), ("a: 1\n---\nb: 2\n", 2)]
)
def test_corrupt_yaml_names_its_line(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"not valid YAML at line {line}, column"):
        read_run_yaml(path)


@pytest.mark.parametrize(
    ("text", "line"),
    [('{\n  "a": 1,\n}', 3), ("{\n  // no\n}", 2), ("{'a': 1}", 1), ('{\n "a": 1\n "b": 2}', 3), ('{"a": 1', 1), ("", 1), ('{"a": True}', 1)],
)
def test_corrupt_json_names_its_line(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"not valid JSON at line {line}, column"):
        read_deepspeed_json(path)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_json_without_finite_numbers_is_refused(tmp_path: Path, word: str) -> None:
    """Python's json reads these words, JSON has none: NaN compares false with every bound and would slip through."""
    path = tmp_path / "ds.json"
    path.write_text(f'{{"gradient_clipping": {word}}}')
    with pytest.raises(ConfigError, match=f"holds {word}"):
        read_deepspeed_json(path)


@pytest.mark.parametrize(("read", "option", "near"), BOTH)
def test_missing_file_is_answered_with_the_nearest_name(tmp_path: Path, read: object, option: str, near: str) -> None:
    (tmp_path / near).write_text("{}")
    mistyped = tmp_path / near.replace("r", "")
    with pytest.raises(ConfigError) as caught:
        read(mistyped)  # type: ignore[operator]
    assert str(mistyped) in only_problem(caught.value) and f"did you mean '{near}'" in only_problem(caught.value)
    with pytest.raises(ConfigError, match=option):
        read(tmp_path / "nowhere" / near)  # type: ignore[operator]


@pytest.mark.parametrize(("read", "option", "name"), BOTH)
@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None])
def test_unreadable_file_is_a_config_error(tmp_path: Path, read: object, option: str, name: str, content: bytes | None) -> None:
    path = tmp_path / name
    path.write_bytes(content) if content is not None else path.mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        read(path)  # type: ignore[operator]


@pytest.mark.parametrize(("text", "said"), [("- a\n- b\n", "holds a list"), ("", "is empty"), ("just text", "holds a str")])
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_run_yaml(path)


@pytest.mark.parametrize("indent", ["  ", "\t", ""])
def test_where_names_the_line_of_a_key(tmp_path: Path, indent: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(f'{{\n{indent}"bf16": {{\n{indent}"enabled": true\n}}\n}}')
    file = read_deepspeed_json(path)
    assert (file.where("bf16"), file.where("bf16.enabled")) == ("ds.json:2", "ds.json:3")
    assert file.where("fp16.enabled") == "the default, ds.json does not state it"


def test_importing_the_config_needs_no_torch_and_takes_under_half_a_second() -> None:
    """``ds-gpt show-config`` and every error message start here: nobody waits for torch to read that a key is misspelt."""
    code = (
        "import time; start = time.process_time(); import ds_gpt.config; spent_s = time.process_time() - start; import sys; "
        "print(spent_s, *{m.split('.')[0] for m in sys.modules} & {'torch', 'deepspeed', 'numpy'})"
    )
    # Of the processor's time, the shortest of three: the machine may be busy, the import is what is bounded.
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() for _ in range(3)]
    assert [run[1:] for run in runs] == [[], [], []]
    assert min(float(run[0]) for run in runs) < 0.5


@pytest.mark.parametrize("name", ["zero2.json", "zero3_offload.json", "fp16.json"])
def test_a_deepspeed_json_in_the_place_of_the_run_config_is_one_problem(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(SHIPPED / name, SHIPPED / "zero0.json", CPU)
    assert "given as the run config, is a DeepSpeed config" in only_problem(caught.value) and f"--deepspeed_config {SHIPPED / name}" in only_problem(caught.value)


@pytest.mark.parametrize("name", ["quickstart", "gpt_1b", "gpt2_124m"])
def test_a_run_yaml_in_the_place_of_the_deepspeed_config_is_one_problem(tmp_path: Path, name: str) -> None:
    run = SHIPPED / "runs" / f"{name}.yaml"
    with pytest.raises(ConfigError) as caught:
        load(run, run, CPU)
    assert "given as the DeepSpeed config, is a run config" in only_problem(caught.value) and f"--config {run}" in only_problem(caught.value)
    (tmp_path / "run.json").write_text('{"model": {}, "batch": {}, "training": {}}')
    with pytest.raises(ConfigError, match="is a run config"):
        read_deepspeed_json(tmp_path / "run.json")


def test_both_exchanged_and_both_missing_are_two_problems(tmp_path: Path) -> None:
    for run, deepspeed in ((SHIPPED / "zero2.json", SHIPPED / "runs" / "quickstart.yaml"), (tmp_path / "x.yaml", tmp_path / "x.json")):
        with pytest.raises(ConfigError) as caught:
            load(run, deepspeed, CPU)
        assert len(caught.value.problems) == 2


def test_flatten() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": {}}, "e": [{"f": 2}]}) == {"a.b.c": 1, "a.d": {}, "e": [{"f": 2}]}
    assert flatten({"a": 1}, "x.") == {"x.a": 1} and flatten({}) == {}
