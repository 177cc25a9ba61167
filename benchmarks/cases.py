"""Cases as data: ``suites/*.yaml`` to a list of `Case`. Imports no torch, so listing them takes no time."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from benchmarks.records import REPOSITORY
from ds_gpt.config import Composed, ConfigError, Hardware, Problem, load
from ds_gpt.config.errors import did_you_mean
from ds_gpt.config.section import NonNegativeInt, PositiveFloat, PositiveInt
from ds_gpt.planner.degrees import stated

SUITES = Path(__file__).parent / "suites"
_CONFIGS = REPOSITORY / "ds_configs"
_CHOICES = {
    "trainer": ("ds_gpt", "ddp", "fsdp2", "hf_trainer"),
    "launcher": ("torchrun", "deepspeed"),
    "checkpointing": ("off", "full", "selective"),
    "precision": ("auto", "fp32", "bf16", "fp16"),
    "attention": ("auto", "flash", "efficient", "math"),
}


@dataclass(frozen=True)
class Case:
    """One way to run a recipe.

    Attributes:
        name: of the case in its suite; also of its record's file.
        recipe: a run YAML, ``ds_configs/runs/RECIPE.yaml``.
        ranks: processes, a device each.
        micro_batch: sequences that a rank takes at a time.
        deepspeed: a DeepSpeed JSON, ``ds_configs/DEEPSPEED.json``; a baseline takes the run's numbers from it.
        global_batch: sequences a step; None: micro_batch x data-parallel ranks, without accumulation (weak scaling).
        checkpointing: of activations: ``off``, ``full`` or ``selective``.
        precision: ``auto`` leaves it to the JSON.
        attention: the kernel that attention is held to; ``auto`` leaves it to PyTorch.
        trainer: ``ds_gpt``, or a peer: PyTorch alone with ``ddp`` (one rank: the bare loop) or ``fsdp2``; or ``hf_trainer``,
            Hugging Face's Trainer with the same DeepSpeed JSON.
        compile: whether the model goes through torch.compile.
        launcher: what starts the ranks: ``torchrun`` or ``deepspeed``.
        threads: CPU threads a rank; None: ds_gpt's own choice.
        warmup: steps before the clock starts.
        steps: steps timed.
        deadline_s: after which the case's processes are ended.
        overrides: ``key=value`` of either file, as ``--set`` takes them.
        ladder: cases that differ in their micro-batch alone share it: where one runs out of memory, larger ones are not tried.
        goals: tokens/s that it should reach, as multiples of those of other cases of the suite, by their names.
    """

    name: str
    recipe: str
    ranks: PositiveInt
    micro_batch: PositiveInt
    deepspeed: str = "zero0"
    global_batch: PositiveInt | None = None
    checkpointing: str = "off"
    precision: str = "auto"
    attention: str = "auto"
    trainer: str = "ds_gpt"
    compile: bool = False
    launcher: str = "torchrun"
    threads: PositiveInt | None = None
    warmup: NonNegativeInt = 5
    steps: PositiveInt = 20
    deadline_s: PositiveFloat = 300.0
    overrides: tuple[str, ...] = ()
    ladder: str | None = None
    goals: dict[str, PositiveFloat] = field(default_factory=dict)

    @property
    def ranks_a_copy(self) -> int:
        """Ranks that share one copy of the model, as the recipe says, or ``parallel`` among the overrides."""
        return stated(*self._files(), self.overrides).product

    def _files(self) -> tuple[str, str]:
        return str(_CONFIGS / "runs" / f"{self.recipe}.yaml"), str(_CONFIGS / f"{self.deepspeed}.json")

    def settings(self) -> list[str]:
        """The case as ``--set`` arguments over its two files."""
        checkpointing = "null" if self.checkpointing == "off" else f"{{policy: {self.checkpointing}}}"
        settings = [
            f"batch.global_batch_size={self.global_batch or self.micro_batch * self.ranks // self.ranks_a_copy}",
            f"batch.micro_batch_size={self.micro_batch}",
            f"activation_checkpointing={checkpointing}",
        ]
        if self.precision in ("fp32", "bf16"):
            settings.append(f"bf16.enabled={str(self.precision == 'bf16').lower()}")
        if self.compile:
            settings.append("compile.enabled=true")
        return [*settings, *self.overrides]

    def composed(self, hardware: Hardware) -> Composed:
        """The configuration that this case runs. Raises ConfigError, which names the case, where it is impossible."""
        try:
            return load(*self._files(), hardware, self.settings())
        except ConfigError as error:
            raise ConfigError(replace(problem, what=f"case {self.name}: {problem.what}") for problem in error.problems) from None


@dataclass(frozen=True)
class Suite:
    """A file of cases.

    Attributes:
        name: of the file.
        about: its first comment lines.
        device: ``cpu``, ``cuda``, ``any``, or words of a GPU's name (``A100``) which it then must be.
        devices: how the planner and ``--dry-run`` name the device it is meant for.
        bf16: whether that device computes bf16 at full speed.
        rounds: how often each case is run, each time in processes of its own.
        cases: in the order of the file.
        source: how the command line named it.
    """

    name: str
    about: str
    device: str
    devices: str
    bf16: bool
    rounds: int
    cases: tuple[Case, ...]
    source: str = ""

    def hardware(self, ranks: int) -> Hardware:
        """The devices that the suite is meant for."""
        kind = "cpu" if self.device in ("cpu", "any") else "cuda"
        return Hardware(kind, self.devices, ranks, bf16=self.bf16)


class _File(BaseModel):
    """A suite as its file gives it; the cases are still to be expanded."""

    model_config = ConfigDict(extra="forbid", strict=True)
    device: str
    devices: str | None = None
    bf16: bool = False
    rounds: PositiveInt = 1
    defaults: dict[str, Any] = {}
    cases: list[dict[str, Any]] = Field(min_length=1)


def read_suite(name: str) -> Suite:
    """The suite of that name, or at that path. Raises ConfigError with everything that is wrong with it."""
    path = Path(name) if name.endswith(".yaml") else SUITES / f"{name}.yaml"
    if not path.is_file():
        known = [file.stem for file in SUITES.glob("*.yaml")]
        raise ConfigError(Problem(f"there is no suite '{name}'", fix=did_you_mean(name, known)))
    text, content = _parsed(path)
    about = " ".join(line.lstrip("# ") for line in itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()))
    problems: list[Problem] = []
    cases = [case for entry in content.cases for case in _expand({**content.defaults, **entry}, path.name, problems)]
    names = [case.name for case in cases]
    twice = sorted({name for name in names if names.count(name) > 1})
    problems += [Problem(f"{path.name}: two cases are called '{name}'", fix="put what differs into the name") for name in twice]
    for case in cases:
        if case.compile and content.device == "cpu":
            why = "the tensors of compiled code are not counted there, and memory would be recorded wrong"
            problems.append(Problem(f"{path.name}: {case.name} compiles on a CPU", why, "python -m benchmarks compile measures its speed"))
        strangers = [name for name in case.goals if name not in names]
        problems += [Problem(f"{path.name}: {case.name} has a goal against '{name}', which is no case", fix=did_you_mean(name, names)) for name in strangers]
    if problems:
        raise ConfigError(problems)
    return Suite(path.stem, about, content.device, content.devices or content.device, content.bf16, content.rounds, tuple(cases), name)


def _parsed(path: Path) -> tuple[str, _File]:
    form = "see benchmarks/suites/cpu.yaml for its form"
    try:
        text = path.read_text(encoding="utf-8")
        values = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(Problem(f"the suite '{path}' cannot be read: {error}", fix=form)) from None
    if not isinstance(values, Mapping):
        raise ConfigError(Problem(f"the suite '{path}' holds no cases", fix=form))
    try:
        return text, _File.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_problem(path.name, each, _File.model_fields) for each in error.errors()) from None


def _problem(where: str, error: Mapping[str, Any], known: Iterable[str]) -> Problem:
    """What pydantic found, in our words."""
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return Problem(f"{where}: unknown key '{key}'", fix=did_you_mean(key, known))
    if error["type"] == "missing":
        return Problem(f"{where}: '{key}' is missing", fix="add it; what all cases share goes into 'defaults'")
    wanted = error["msg"].rpartition(" should ")[2].replace("tuple", "list")  # YAML has no tuples
    return Problem(f"{where}: {key} = {error['input']!r} should {wanted}", fix="correct it")


def _expand(entry: Mapping[str, Any], where: str, problems: list[Problem]) -> Iterator[Case]:
    """One case for each combination of the entry's ``matrix``; its names fill the ``{...}`` of the other values."""
    matrix = entry.get("matrix", {})
    if not isinstance(matrix, dict) or not all(isinstance(values, list) and values for values in matrix.values()):
        problems.append(Problem(f"{where}: matrix = {matrix!r} should be lists by name", fix="for example matrix: {ranks: [1, 2]}"))
        return
    for combination in itertools.product(*matrix.values()):
        case, wrong = _case(entry, dict(zip(matrix, combination, strict=True)), where)
        if case is None:
            problems += wrong
            return
        yield case


def _case(entry: Mapping[str, Any], chosen: Mapping[str, Any], where: str) -> tuple[Case | None, list[Problem]]:
    """An entry with one combination of its matrix, or what is wrong with it."""
    known = {each.name for each in fields(Case)}
    values = {**{key: value for key, value in entry.items() if key not in ("matrix", "grow")}, **{k: v for k, v in chosen.items() if k in known}}
    filled = {key: _fill(value, chosen) for key, value in values.items()}
    if entry.get("grow"):
        filled["ladder"] = _fill(entry.get("name"), {**chosen, "micro_batch": "N"})
    wrong = [Problem(f"{where}: '{key}' is no field of a case", fix=did_you_mean(str(key), known)) for key in filled if key not in known]
    for key, choices in _CHOICES.items():
        if filled.get(key, choices[0]) not in choices:
            wrong.append(Problem(f"{where}: {key} = {filled[key]!r} is none of {', '.join(choices)}"))
    try:
        case = TypeAdapter(Case).validate_python(filled)
    except ValidationError as error:
        place = f"{where}: {filled['name']}" if "name" in filled else where
        return None, [*wrong, *(_problem(place, each, known) for each in error.errors() if each["loc"][0] in known)]
    if not re.fullmatch(r"[\w.+-]+", case.name):
        why = "it is the name of its record's file as well"
        wrong.append(Problem(f"{where}: a case cannot be called '{case.name}'", why, "take letters, digits, '.', '_' and '-'; in {...} what the matrix has"))
    if not wrong and case.trainer != "ds_gpt" and case.ranks_a_copy > 1:
        wrong.append(Problem(f"{where}: {case.name} has parallel degrees with trainer {case.trainer}", "it is data parallel", "trainer: ds_gpt"))
    return (None if wrong else case), wrong


def _fill(value: Any, chosen: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        for name, given in chosen.items():
            value = value.replace(f"{{{name}}}", str(given))
        return value
    if isinstance(value, dict):
        return {_fill(key, chosen): _fill(item, chosen) for key, item in value.items()}
    return [_fill(item, chosen) for item in value] if isinstance(value, list) else value
