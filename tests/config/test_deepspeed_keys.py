"""Our table of DeepSpeed keys against what the installed DeepSpeed reads.

DeepSpeed publishes no list. Its top level is read key by key, so a dictionary that records what is looked up in it
finds the keys; its sections are pydantic models, which list their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
from config_bench import A100, CPU, DEEPSPEED

from ds_gpt.config import Hardware, load
from ds_gpt.config.deepspeed_keys import _NOT_DRIVEN, _REMOVED, _WITHOUT_EFFECT, KNOWN_KEYS, OPTIMIZER_PARAMS

SHIPPED = Path(__file__).resolve().parents[2] / "ds_configs"

# Known to our table, not seen when DeepSpeed reads a config, on purpose:
NOT_RECORDED: Mapping[str, frozenset[str]] = {
    # Read by `keys()` or a pydantic model's own constructor, or (bfloat16) only where bf16 is absent; the second test
    # below finds each of these names in DeepSpeed's source instead.
    "": frozenset({"aio", "autotuning", "bfloat16", "flops_profiler"}),
    # How much of a block to keep is ds_gpt's own word; it is taken out before DeepSpeed gets the dictionary.
    "activation_checkpointing": frozenset({"policy"}),
    # Looked up through `keys()`.
    "optimizer": frozenset({"legacy_fusion"}),
}


class Recorder(dict[str, Any]):
    """A dictionary that notes which keys are looked up in it, and in the dictionaries inside it."""

    def __init__(self, values: Mapping[str, Any], seen: dict[str, set[str]], path: str = "") -> None:
        inner = {k: Recorder(v, seen, f"{path}.{k}".strip(".")) if isinstance(v, Mapping) else v for k, v in values.items()}
        super().__init__(inner)
        self.seen = seen.setdefault(path, set())

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def keys(self) -> Any:
        """A view that records `name in section.keys()`."""
        recorder = self

        class View:
            def __contains__(self, key: object) -> bool:
                return key in recorder

            def __iter__(self) -> Iterator[str]:
                return iter(recorder)

        return View()

    def __copy__(self) -> Recorder:
        return self

    def __deepcopy__(self, memo: object) -> Recorder:
        return self


def read_by_deepspeed(values: dict[str, Any]) -> tuple[Any, dict[str, set[str]]]:
    from deepspeed.runtime.config import DeepSpeedConfig

    seen: dict[str, set[str]] = {}
    return DeepSpeedConfig(Recorder(values, seen)), seen


@pytest.fixture(scope="module")
def recorded() -> dict[str, set[str]]:
    """Keys that DeepSpeed looks up, by section. Every section that it reads key by key is present, so that it looks inside."""
    sections: dict[str, Any] = {"activation_checkpointing": {}, "data_types": {}, "torch_autocast": {}, "optimizer": {"type": "AdamW", "params": {}}}
    return read_by_deepspeed({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, **sections})[1]


@pytest.mark.parametrize("section", ["", "activation_checkpointing", "data_types", "torch_autocast", "optimizer"])
def test_sections_read_key_by_key(recorded: dict[str, set[str]], section: str) -> None:
    known, exceptions = KNOWN_KEYS[section], NOT_RECORDED.get(section, frozenset())
    assert len(recorded[section]) >= 2, "the recorder saw nothing: DeepSpeed reads its config another way now"
    assert recorded[section] - known == set(), "DeepSpeed reads these; our table calls them unknown"
    assert known - recorded[section] - exceptions == set(), "our table accepts these; DeepSpeed never looks at them"


def test_the_exceptions_are_words_that_deepspeed_knows() -> None:
    from deepspeed.autotuning.constants import AUTOTUNING
    from deepspeed.profiling.constants import FLOPS_PROFILER
    from deepspeed.runtime.constants import LEGACY_FUSION
    from deepspeed.runtime.precision_config import BFLOAT16_OLD
    from deepspeed.runtime.swap_tensor.constants import AIO

    assert {AIO, AUTOTUNING, BFLOAT16_OLD, FLOPS_PROFILER} == NOT_RECORDED[""]
    assert {LEGACY_FUSION} == NOT_RECORDED["optimizer"]


def models() -> dict[str, tuple[Any, frozenset[str]]]:
    """Sections that are pydantic models, with keys that DeepSpeed reads around the model."""
    from deepspeed.compile.config import CompileConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

    # MiCS and ZeRO++ LoCo are looked up in the raw section, see read_around_the_model below.
    around = frozenset({"mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"})
    return {
        "zero_optimization": (DeepSpeedZeroConfig, around),
        "zero_optimization.offload_optimizer": (DeepSpeedZeroOffloadOptimizerConfig, frozenset()),
        "zero_optimization.offload_param": (DeepSpeedZeroOffloadParamConfig, frozenset()),
        "bf16": (DeepSpeedBF16Config, frozenset()),
        "fp16": (DeepSpeedFP16Config, frozenset()),
        "compile": (CompileConfig, frozenset({"enabled"})),  # ds_gpt's own; it is taken out before DeepSpeed gets the dictionary
    }


@pytest.mark.parametrize("section", ["zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param", "bf16", "fp16", "compile"])
def test_sections_that_are_models(section: str) -> None:
    model, around = models()[section]
    # The alias is the name that users write (stage3_prefetch_bucket_size); DeepSpeed accepts the bare name too, undocumented.
    written = {field.alias or name for name, field in model.model_fields.items()}
    assert KNOWN_KEYS[section] == written | around


def test_keys_read_around_the_model(recorded: dict[str, set[str]]) -> None:
    assert models()["zero_optimization"][1] <= recorded["zero_optimization"]


def test_every_section_of_the_table_is_compared_here() -> None:
    compared = {"", "activation_checkpointing", "data_types", "torch_autocast", "optimizer", *models()}
    assert set(KNOWN_KEYS) == compared


def test_deepspeed_still_ignores_a_misspelt_key_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    """Fails on the day DeepSpeed refuses or warns: our own check may then say less."""
    config, _ = read_by_deepspeed({"train_micro_batch_size_per_gpu": 1, "gradient_cliping": 0.3})
    assert config.gradient_clipping == 1.0
    said = capfd.readouterr()
    assert "gradient_cliping" not in said.out + said.err


def test_clipping_that_nobody_states_is_deepspeeds_default_and_said_aloud(bench) -> None:
    composed = bench.load()
    config, _ = read_by_deepspeed({"train_micro_batch_size_per_gpu": 1})
    assert composed.deepspeed["gradient_clipping"] == config.gradient_clipping
    assert "gradient_clipping is not stated: DeepSpeed clips at 1.0 (0 for none)" in composed.notes
    assert bench.load("gradient_clipping=0").deepspeed["gradient_clipping"] == 0


@pytest.mark.parametrize("on", [CPU, A100], ids=["cpu", "a100"])
@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda p: p.stem)
def test_deepspeed_accepts_what_we_compose(path: Path, on: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    """The golden dictionaries are not only stable: DeepSpeed reads them, with the numbers we mean."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.config import dist

    # The config is for another machine, with ranks and fp16; DeepSpeed asks this one.
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: on.world_size)
    composed = load(SHIPPED / "runs" / "gpt_1b.yaml", path, on)
    config, _ = read_by_deepspeed(composed.deepspeed)
    assert config.zero_optimization_stage == composed.zero_stage
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (
        64,
        composed.micro_batch_size,
        composed.accumulation_steps,
    )
    assert {"fp16": config.float16_config.enabled, "bf16": config.bfloat16_config.enabled}.get(composed.precision, True)
    assert config.gradient_clipping == 1.0 and config.optimizer_params["lr"] == 4e-4


@pytest.mark.parametrize("key", sorted(_NOT_DRIVEN))
def test_sections_that_the_loop_does_not_drive_are_refused(bench, key: str) -> None:
    assert f"'{key}'" in bench.problem(f"{key}={{enabled: true}}").what
    bench.load(f"{key}={{enabled: false, other: 1}}")
    bench.load(f"{key}=null")


def test_what_deepspeed_has_removed_is_refused_whatever_it_says(bench) -> None:
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS

    theirs = [*_REMOVED_TOP_LEVEL_CONFIG_KEYS, *(f"zero_optimization.{key}" for key in _REMOVED_ZERO_CONFIG_KEYS)]
    assert sorted(theirs) == sorted(_REMOVED)
    for key in theirs:
        problem = bench.problem(f"{key}={{enabled: false}}")
        assert problem.what == f"'{key}' (--set) has been removed from DeepSpeed" and problem.fix
        bench.load(f"{key}=null")


@pytest.mark.parametrize("key", sorted(_WITHOUT_EFFECT))
def test_what_would_be_ignored_is_refused(bench, key: str) -> None:
    problem = bench.problem(f"{key}={{enabled: true}}")
    assert problem.what == f"'{key}' (--set) has no effect under ds_gpt" and problem.fix.startswith("remove it")
    bench.load(f"{key}=false")


def test_parameters_of_an_optimizer_are_those_of_its_implementations(bench) -> None:
    import inspect

    import torch
    from deepspeed.ops.adam import FusedAdam

    theirs = {name for kind in (torch.optim.AdamW, torch.optim.SGD, FusedAdam) for name in inspect.signature(kind).parameters}
    assert theirs - {"params"} | {"torch_adam"} == OPTIMIZER_PARAMS
    problem = bench.problem("optimizer.params.fussed=true")
    assert "unknown key 'optimizer.params.fussed'" in problem.what and problem.fix == "did you mean 'fused'?"


def test_the_old_name_of_bf16_is_refused(bench, merged) -> None:
    """DeepSpeed obeys `bfloat16` where `bf16` is absent; we would have called such a run fp32."""
    bench.deepspeed({"zero_optimization": {"stage": 1}, "bfloat16": {"enabled": True}})
    assert bench.problem().fix == "use bf16, its newer name"
    config, _ = read_by_deepspeed({"train_micro_batch_size_per_gpu": 1, "bfloat16": {"enabled": True}})
    assert config.bfloat16_config.enabled


@pytest.mark.parametrize("section", [s for s in KNOWN_KEYS if s])
def test_a_section_must_be_a_section(bench, section: str) -> None:
    bench.deepspeed({**DEEPSPEED, **nested(section, 3)})
    assert any(p.what.startswith(f"{section} = 3") and "is not a section" in p.what for p in bench.problems())


def nested(key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}


def test_the_composed_dictionary_is_json(bench) -> None:
    """It goes into the run folder; DeepSpeed takes a file as well as a dictionary."""
    assert json.loads(json.dumps(bench.load(on=A100).deepspeed)) == bench.load(on=A100).deepspeed


def test_the_recorder_records() -> None:
    seen: dict[str, set[str]] = {}
    values = Recorder({"a": {"b": 1}}, seen)
    assert "x" not in values and "y" not in values.keys() and values.get("z") is None and values["a"]["b"] == 1
    assert seen == {"": {"x", "y", "z", "a"}, "a": {"b"}}


def test_keys_are_checked_without_deepspeed() -> None:
    code = "import ds_gpt.config.deepspeed_keys, sys; sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
