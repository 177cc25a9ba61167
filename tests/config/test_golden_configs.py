"""Every shipped JSON x YAML composes to what ``tests/golden/`` holds, on 8 x A100-40GB and on two CPU ranks."""

from __future__ import annotations

import difflib
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest


def _regenerate() -> ModuleType:
    # tests/ is no package, so the module that both this test and `python tests/golden/regenerate.py` use is loaded by path.
    path = Path(__file__).resolve().parents[1] / "golden" / "regenerate.py"
    spec = importlib.util.spec_from_file_location("golden_regenerate", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


golden = _regenerate()


def readable_diff(name: str, expected: str, found: str) -> str:
    """The lines that changed, with the section around each, and how to accept them."""
    lines = difflib.unified_diff(expected.splitlines(), found.splitlines(), f"golden {name}", "composed now", n=3, lineterm="")
    return "\n".join([*lines, "", "if that is meant: python tests/golden/regenerate.py, and commit the difference"])


@pytest.mark.parametrize(("run", "machine"), golden.golden_names())
def test_shipped_configs_compose_to_the_golden_ones(run: str, machine: str) -> None:
    path = golden.golden_path(run, machine)
    assert path.exists(), f"{path.name} is missing: python tests/golden/regenerate.py"
    expected, found = path.read_text(encoding="utf-8"), golden.golden_text(run, machine)
    if found != expected:
        pytest.fail(readable_diff(path.name, expected, found), pytrace=False)


def test_no_golden_file_is_left_behind() -> None:
    assert {path.name for path in golden.GOLDEN.glob("*.json")} == {golden.golden_path(*name).name for name in golden.golden_names()}


def test_a_golden_file_holds_every_shipped_json() -> None:
    shipped = {path.name for path in golden.CONFIGS.glob("*.json")}
    assert len(shipped) >= 7
    for name in golden.golden_names():
        assert set(json.loads(golden.golden_path(*name).read_text(encoding="utf-8"))) == shipped


def test_a_changed_default_is_a_one_line_diff() -> None:
    """The comparison can fail, and what it prints names the line."""
    expected = golden.golden_path("quickstart", "2xCPU").read_text(encoding="utf-8")
    one = json.loads(expected)
    one["zero2.json"]["deepspeed"]["gradient_clipping"] = 0.5
    diff = readable_diff("quickstart", expected, json.dumps(one, indent=2, sort_keys=True) + "\n")
    changed = [line for line in diff.splitlines() if line.startswith(("+", "-")) and not line.startswith(("+++", "---"))]
    assert [line.replace(" ", "") for line in changed] == ['-"gradient_clipping":1.0,', '+"gradient_clipping":0.5,']


def test_regenerating_writes_the_same_files_and_drops_stale_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "GOLDEN", tmp_path)
    (tmp_path / "gone.2xCPU.json").write_text("{}")
    golden.main()
    here = Path(golden.__file__).parent
    assert {p.name: p.read_bytes() for p in tmp_path.glob("*.json")} == {p.name: p.read_bytes() for p in here.glob("*.json")}
