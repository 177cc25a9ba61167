"""Read the run YAML and the DeepSpeed JSON, and lay ``--set key=value`` over them."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ds_gpt.config.errors import ConfigError, Problem, did_you_mean
from ds_gpt.config.run import RunConfig


class _Loader(yaml.SafeLoader):
    """YAML with the floats of YAML 1.2 (PyYAML reads 1e-3 as text) and no silent duplicate keys."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.MarkedYAMLError(problem=f"the key {key!r} is not text", problem_mark=key_node.start_mark)
        if key in seen:
            raise yaml.MarkedYAMLError(problem=f"key '{key}' stands here twice", problem_mark=key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _unique_mapping)


# Aliases, anchors, directives and what is reserved: no value of --set makes sense that begins so, but a file pattern does.
_NEVER_A_VALUE = tuple("*&%@`")


@dataclass(frozen=True)
class ConfigFile:
    """A configuration file, with what was laid over it.

    Attributes:
        path: where it was read from.
        values: its content, nested dictionaries.
        lines: line number (from 1) of each dotted key.
        overridden: dotted keys that ``--set`` gave.
    """

    path: Path
    values: dict[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)
    overridden: frozenset[str] = frozenset()

    def where(self, key: str) -> str:
        """Where a dotted key was stated, for messages."""
        parts = key.split(".")
        if any(".".join(parts[:end]) in self.overridden for end in range(1, len(parts) + 1)):
            return "--set"
        if key in self.lines:
            return f"{self.path.name}:{self.lines[key]}"
        if any(given.startswith(f"{key}.") for given in self.overridden):
            return "--set"
        return self.path.name if self.get(key) is not None else f"the default, {self.path.name} does not state it"

    def get(self, key: str) -> Any:
        """Value at a dotted key, or None."""
        value: Any = self.values
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return None
            value = value[part]
        return value


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, under dotted keys. An empty dictionary is a value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _read_text(path: Path, what: str, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = [p.name for p in path.parent.glob(f"*{path.suffix}")] if path.parent.is_dir() else []
        near = did_you_mean(path.name, siblings) if siblings else f"check the path given to {option}"
        raise ConfigError(Problem(f"{what} '{path}' does not exist", fix=near)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem(f"{what} '{path}' cannot be read: {error}", fix=f"check the path given to {option}")) from None


@functools.lru_cache(maxsize=64)  # a search reads the same two files hundreds of times
def _key_lines(text: str) -> Mapping[str, int]:
    """Line of each dotted key. JSON is read as YAML here, for its positions only."""
    lines: dict[str, int] = {}

    def walk(node: yaml.Node, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key_node, value_node in node.value:
                key = f"{prefix}{key_node.value}"
                lines[key] = key_node.start_mark.line + 1
                walk(value_node, key + ".")

    try:
        root = yaml.compose(text.replace("\t", " "), Loader=_Loader)  # YAML refuses the tabs that JSON allows
    except yaml.YAMLError:  # JSON that YAML does not read: messages then name no line
        return {}
    if root is not None:
        walk(root, "")
    return lines


def _require_mapping(values: Any, what: str, path: Path) -> dict[str, Any]:
    if isinstance(values, dict):
        return values
    found = "is empty" if values is None else f"holds a {type(values).__name__}"
    raise ConfigError(Problem(f"{what} '{path}' {found}, not keys with values", fix="see ds_configs/ for examples"))


def read_run_yaml(path: str | Path) -> ConfigFile:
    """Read a run YAML. Raises ConfigError where it is missing or not YAML."""
    path = Path(path)
    text = _read_text(path, "run config", "--config")
    try:
        values = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error)
        raise ConfigError(Problem(f"run config '{path}' is not valid YAML{line}: {reason}", fix="mend that line")) from None
    return ConfigFile(path, _require_mapping(values, "run config", path), _key_lines(text))


def read_deepspeed_json(path: str | Path) -> ConfigFile:
    """Read a DeepSpeed JSON. Raises ConfigError where it is missing, not JSON, or has a key twice."""
    path = Path(path)
    text = _read_text(path, "DeepSpeed config", "--deepspeed_config")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(Problem(f"DeepSpeed config '{path}' has the key '{key}' twice", fix="keep one of them"))
        return dict(pairs)

    def no_constant(name: str) -> float:
        raise ConfigError(Problem(f"DeepSpeed config '{path}' holds {name}, which is not JSON", fix="write a number"))

    try:
        values = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        if _is_run(_yaml_or_none(text)):
            raise _run_as_deepspeed(path) from None
        raise ConfigError(
            Problem(
                f"DeepSpeed config '{path}' is not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}",
                fix="mend that line (no comments, no trailing commas, double quotes)",
            )
        ) from None
    if _is_run(values):
        raise _run_as_deepspeed(path)
    return ConfigFile(path, _require_mapping(values, "DeepSpeed config", path), _key_lines(text))


def _yaml_or_none(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return None


def _is_run(values: Any) -> bool:
    """Whether a file has what only a run config has: most of the sections that each run must state."""
    return isinstance(values, dict) and len({"model", "batch", "training"} & values.keys()) >= 2


def _run_as_deepspeed(path: Path) -> ConfigError:
    return ConfigError(
        Problem(
            f"'{path}', given as the DeepSpeed config, is a run config",
            "the run config says what is learned, the DeepSpeed config how it runs on the hardware",
            f"--config {path}, and a DeepSpeed JSON (ds_configs/zero2.json) for --deepspeed_config",
        )
    )


def _is_section_key(parts: list[str], deepspeed_keys: Mapping[str, Collection[str]]) -> bool:
    """Whether a section that both files have (``optimizer``) has this key in the DeepSpeed JSON: ``optimizer.params.lr``."""
    return len(parts) > 1 and parts[0] in deepspeed_keys[""] and parts[1] in deepspeed_keys.get(parts[0], ())


def apply_overrides(
    run: ConfigFile, deepspeed: ConfigFile, overrides: Iterable[str], deepspeed_keys: Mapping[str, Collection[str]]
) -> tuple[ConfigFile, ConfigFile]:
    """`lay_over`, where nothing may be wrong. Raises ConfigError with every problem of the overrides."""
    run, deepspeed, problems = lay_over(run, deepspeed, overrides, deepspeed_keys)
    if problems:
        raise ConfigError(problems)
    return run, deepspeed


def lay_over(
    run: ConfigFile, deepspeed: ConfigFile, overrides: Iterable[str], deepspeed_keys: Mapping[str, Collection[str]]
) -> tuple[ConfigFile, ConfigFile, list[Problem]]:
    """Lay ``key=value`` over whichever of the two files owns the key.

    Values are read as YAML; what begins with a sign that YAML keeps for itself (``*.txt``) is text.

    Args:
        run: the run YAML.
        deepspeed: the DeepSpeed JSON.
        overrides: ``dotted.key=value`` each.
        deepspeed_keys: the keys that each section of a DeepSpeed JSON may have; its top level is section "".

    Returns:
        Both files with all that could be laid over them; a problem for each override without ``=``, with a value that
        is not YAML, or with a top-level key that neither file has.
    """
    run_values, deepspeed_values = copy.deepcopy(run.values), copy.deepcopy(deepspeed.values)
    run_keys: set[str] = set()
    json_keys: set[str] = set()
    problems: list[Problem] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        parts = key.split(".")
        if not equals or not all(parts):
            problems.append(Problem(f"--set '{override}' is not key=value", fix="for example --set training.steps=100"))
            continue
        try:
            value = text.strip() if text.lstrip()[:1] in _NEVER_A_VALUE else yaml.load(text, Loader=_Loader)
        except yaml.YAMLError:
            problems.append(Problem(f"--set {key}: '{text}' is not a YAML value", fix=f"quote it: --set '{key}=\"text\"'"))
            continue
        if parts[0] in RunConfig.model_fields and not _is_section_key(parts, deepspeed_keys):
            target, seen = run_values, run_keys
        elif parts[0] in deepspeed_keys[""]:
            target, seen = deepspeed_values, json_keys
        else:
            known = {*RunConfig.model_fields, *deepspeed_keys[""]}
            problems.append(Problem(f"--set {key}: neither file has a key '{parts[0]}'", fix=did_you_mean(parts[0], known)))
            continue
        for part in parts[:-1]:
            inner = target.get(part)
            target[part] = inner if isinstance(inner, dict) else {}
            target = target[part]
        target[parts[-1]] = value
        seen.add(key)
    return (
        ConfigFile(run.path, run_values, run.lines, frozenset(run_keys)),
        ConfigFile(deepspeed.path, deepspeed_values, deepspeed.lines, frozenset(json_keys)),
        problems,
    )
