"""From the run YAML's values to a typed RunConfig, with every problem at once."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from ds_gpt.config.errors import ConfigError, Problem, did_you_mean
from ds_gpt.config.files import ConfigFile
from ds_gpt.config.run import ModelConfig, RunConfig


def parse_run(run: ConfigFile) -> RunConfig:
    """Validate the run YAML.

    Raises:
        ConfigError: unknown keys, missing keys, wrong types, values out of range.
    """
    try:
        return RunConfig.model_validate(run.values)
    except ValidationError as error:
        # A union (`int or "auto"`) reports one error a branch: say each place once, its reasons together.
        places: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for detail in error.errors():
            places.setdefault(_parts(detail["loc"]), []).append(detail)
        raise ConfigError([_problem(run, parts, details) for parts, details in places.items()]) from None


def sound_sections(run: ConfigFile) -> dict[str, Any]:
    """The sections of the run YAML that are sound by themselves, unknown keys aside, whatever is wrong with the others."""
    sound: dict[str, Any] = {}
    for name, field in RunConfig.model_fields.items():
        section, values = field.annotation, run.values.get(name)
        if name not in run.values and not field.is_required():
            sound[name] = field.default
        elif isinstance(section, type) and issubclass(section, BaseModel) and isinstance(values, dict):
            try:
                sound[name] = section.model_validate({key: value for key, value in values.items() if key in section.model_fields})
            except ValidationError:
                continue
    return sound


def _parts(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """The key of a pydantic location, without the names of union branches that pydantic appends."""
    parts: list[str] = []
    model: Any = RunConfig
    for part in loc:
        parts.append(str(part))
        fields = model.model_fields if isinstance(model, type) and issubclass(model, BaseModel) else {}
        if part not in fields:
            break
        model = fields[part].annotation
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            break
    return tuple(parts)


def _section(parts: tuple[str, ...]) -> type[BaseModel]:
    model: type[BaseModel] = RunConfig
    for part in parts[:-1]:
        model = model.model_fields[part].annotation  # type: ignore[assignment]
    return model


def _problem(run: ConfigFile, parts: tuple[str, ...], details: list[dict[str, Any]]) -> Problem:
    detail, key = details[0], ".".join(parts)
    where = run.where(key)
    if detail["type"] == "extra_forbidden":
        return Problem(f"unknown key '{key}' in the run config ({where})", fix=did_you_mean(parts[-1], _section(parts).model_fields))
    if detail["type"] == "missing" and run.get(key) is None:
        return Problem(f"'{key}' is missing from the run config ({run.path.name})", fix=f"add it, or --set {key}=...")
    reasons = " or ".join(dict.fromkeys(_reason(d) for d in details))
    given = run.get(key)
    text = f"{given!r} ({type(given).__name__})" if isinstance(given, str) else repr(given)
    return Problem(f"{key} = {text} ({where}) should {reasons}", fix="correct it in the run config, or with --set")


def _reason(detail: dict[str, Any]) -> str:
    """What pydantic wants, as the end of a sentence that begins "should"."""
    if detail["type"] == "model_type":
        return "be a section: keys with values"
    if detail["type"] == "missing":  # in a list, that is
        return "have more items"
    return detail["msg"].rpartition(" should ")[2]


def shape_problems(model: ModelConfig) -> list[Problem]:
    """What is impossible in the model's shape."""
    problems = []
    if model.width % model.heads:
        problems.append(
            Problem(
                f"model.heads = {model.heads} does not divide model.width = {model.width}",
                "each head gets width / heads channels",
                f"use model.heads: {_nearest_divisor(model.width, model.heads)}",
            )
        )
    elif model.positions == "rotary" and model.head_width % 2:
        problems.append(
            Problem(
                f"model.positions = 'rotary' with heads of {model.head_width} channels (model.width / model.heads)",
                "rotation turns pairs of channels",
                "choose model.heads so that width / heads is even",
            )
        )
    if model.heads % model.key_heads:
        problems.append(
            Problem(
                f"model.kv_heads = {model.key_heads} does not divide model.heads = {model.heads}",
                "each key/value head serves equally many query heads",
                f"use model.kv_heads: {_nearest_divisor(model.heads, model.key_heads)}",
            )
        )
    return problems


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - wanted))


def with_vocabulary(run: RunConfig, needed: int) -> RunConfig:
    """The run with ``model.vocab_size`` settled from what the tokenizer needs.

    Args:
        run: the run.
        needed: number of distinct token ids.

    Raises:
        ConfigError: a stated vocabulary smaller than that.
    """
    if run.model.vocab_size == "auto":
        return run.model_copy(update={"model": run.model.model_copy(update={"vocab_size": needed})})
    if run.model.vocab_size < needed:
        raise ConfigError(
            Problem(
                f"model.vocab_size = {run.model.vocab_size}, but the corpus '{run.data.title}' needs {needed} tokens",
                "a token id past the vocabulary has no embedding",
                f"set model.vocab_size: {needed} or more, or auto",
            )
        )
    return run
