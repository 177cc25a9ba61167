"""The map of ds_gpt, held by a test: who may import whom, and the few rules that keep it simple.

Floors, low to high. A package imports only from lower floors; siblings on one floor do not import each other.
"""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "ds_gpt"

FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"config"}),
    frozenset({"model", "data", "learning"}),
    frozenset({"generation", "planner", "engine"}),
    frozenset({"checkpoint"}),
    frozenset({"exchange"}),
    frozenset({"trainer"}),
    frozenset({"commands"}),
)
FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names}

# Top-level modules that a package must not import, and why.
CLOSED: dict[str, dict[str, str]] = {
    "config": dict.fromkeys(("torch", "deepspeed", "numpy"), "errors in a config are shown at once, before torch is loaded"),
    "planner": {"torch": "planning needs arithmetic, no framework", "deepspeed": "the planner predicts DeepSpeed without it"},
}

MAX_FILE_LINES, MAX_FUNCTION_LINES = 350, 60
# "path" or "path::function" -> why it may be longer.
LONGER: dict[str, str] = {}


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, wherever it stands; `package` resolves relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]).strip(".")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def import_problems(source: str, module: str) -> list[str]:
    """What a module, for example ``ds_gpt.model.gpt``, imports against the rules."""
    problems = []
    own = module.split(".")[1] if "." in module else ""
    for line, name in imports(ast.parse(source), module.rpartition(".")[0]):
        top, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        where = f"{module}:{line} imports {name}"
        if top == "benchmarks":
            problems.append(f"{where}: ds_gpt never imports benchmarks")
        if top == "deepspeed" and own != "engine":
            problems.append(f"{where}: only ds_gpt.engine imports deepspeed")
        elif top in CLOSED.get(own, {}):
            problems.append(f"{where}: {CLOSED[own][top]}")
        if top == "ds_gpt" and other in FLOOR_OF and own in FLOOR_OF and other != own and FLOOR_OF[other] >= FLOOR_OF[own]:
            problems.append(f"{where}: '{other}' is not below '{own}'")
    return problems


def length_problems(source: str, path: str) -> list[str]:
    """Files and functions that are too long."""
    problems = []
    if (lines := len(source.splitlines())) >= MAX_FILE_LINES and path not in LONGER:
        problems.append(f"{path} has {lines} lines")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length >= MAX_FUNCTION_LINES and f"{path}::{node.name}" not in LONGER:
                problems.append(f"{path}:{node.lineno} {node.name} has {length} lines")
    return problems


def name_problems(source: str, path: str) -> list[str]:
    """Names that say nothing, and notes to do something later."""
    marks = ("TO" + "DO", "FIX" + "ME", "XXX")  # put together here, so that this file does not hold them
    problems = [f"{path}:{number} holds {mark}" for number, line in enumerate(source.splitlines(), 1) for mark in marks if mark in line]
    parts = Path(path).with_suffix("").parts
    problems += [f"{path}: '{part}' says nothing" for part in parts if set(part.split("_")) & {"util", "utils", "helpers", "misc", "common"}]
    return problems


def shadowing(names: Iterable[str], taken: Iterable[str]) -> list[str]:
    """Direct children of ds_gpt/ that would hide a top-level module: a launcher puts ds_gpt/ itself on sys.path."""
    return sorted(set(names) & set(taken))


def children() -> set[str]:
    return {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p.is_dir() and any(p.rglob("*.py")))}


def relative(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


@pytest.mark.parametrize("path", python_files(), ids=relative)
def test_every_module_keeps_the_rules(path: Path) -> None:
    source, name = path.read_text(encoding="utf-8"), relative(path)
    module = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    assert import_problems(source, module) + length_problems(source, name) + name_problems(source, name) == []


def test_every_package_has_a_floor() -> None:
    assert {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.rglob("*.py"))} <= set(FLOOR_OF)


def test_no_child_of_ds_gpt_hides_a_top_level_module() -> None:
    installed = set(importlib.metadata.packages_distributions()) - {"ds_gpt"}
    assert {"torch", "numpy", "deepspeed", "yaml"} <= installed
    assert shadowing(children() - {"__init__", "__main__"}, sys.stdlib_module_names | installed) == []


def test_the_launch_entry_defines_no_classes_and_repairs_the_path_first() -> None:
    tree = ast.parse((PACKAGE / "train.py").read_text(encoding="utf-8"))
    assert [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)] == []
    repair = next(n.lineno for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "sys.path.insert")
    assert repair < min(line for line, name in imports(tree, "ds_gpt") if name.startswith("ds_gpt."))


def test_exceptions_are_still_needed() -> None:
    for key, reason in LONGER.items():
        path, _, function = key.partition("::")
        source = (REPOSITORY / path).read_text(encoding="utf-8")
        assert reason and any(function in problem for problem in length_problems(source, f"{path} unexcused")), f"{key} is short by now"


def test_tests_have_unique_file_names() -> None:
    """Without __init__.py two test files of one name collide."""
    names = [p.name for p in (REPOSITORY / "tests").rglob("*.py") if p.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ds_gpt.model.gpt", "from ds_gpt.engine import Engine"),
        ("ds_gpt.model.gpt", "from ds_gpt.data import prepare"),  # a sibling
        ("ds_gpt.model.gpt", "def f():\n    import ds_gpt.trainer.loop"),
        ("ds_gpt.model.gpt", "from ds_gpt import trainer"),
        ("ds_gpt.model.gpt", "from ..trainer import loop"),
        ("ds_gpt.model.gpt", "from .. import trainer"),
        ("ds_gpt.config.run", "from ds_gpt.model import gpt"),
        ("ds_gpt.config.run", "import torch.nn"),
        ("ds_gpt.planner.memory", "from torch import nn"),
        ("ds_gpt.planner.memory", "import deepspeed"),
        ("ds_gpt.trainer.loop", "if True:\n    from deepspeed.comm import barrier"),
        ("ds_gpt.train", "import deepspeed"),
        ("ds_gpt.commands.bench", "from benchmarks import cases"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    assert len(import_problems(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ds_gpt.model.gpt", "import torch\nfrom ds_gpt.config import RunConfig\nfrom ds_gpt.model.attention import attend\nfrom . import counts"),
        ("ds_gpt.engine.engine", "import deepspeed\nfrom ds_gpt.learning.loss import x"),
        ("ds_gpt.commands.train", "from ds_gpt.trainer.loop import train\nfrom ds_gpt import __version__"),
        ("ds_gpt.train", "from ds_gpt.commands.train import main"),
    ],
)
def test_a_lawful_import_is_not(module: str, source: str) -> None:
    assert import_problems(source, module) == []


def test_length_names_and_shadowing_are_found() -> None:
    assert len(length_problems("x = 1\n" * MAX_FILE_LINES, "a.py")) == 1
    assert len(length_problems("def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES, "a.py")) == 1
    assert length_problems("class A:\n    def f(self):\n" + "        x = 1\n" * (MAX_FUNCTION_LINES - 2), "a.py") == []
    assert len(name_problems("x = 1  # " + "TO" + "DO later\n", "ds_gpt/model/gpt.py")) == 1
    assert len(name_problems("", "ds_gpt/model/tensor_utils.py")) == len(name_problems("", "ds_gpt/utils/x.py")) == 1
    assert shadowing({"config", "types", "data"}, {"types", "torch"}) == ["types"]
