"""Adapters exported for transformers: on the exported base, ``peft`` gives the logits that we give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from forked_ranks import run_ranks
from tuned_runs import ADAPTERS, SHORT, run
from variants import LLAMA

from ds_gpt.checkpoint.saved_model import find_saved_model
from ds_gpt.config import ConfigError
from ds_gpt.exchange.adapters import export_adapter
from ds_gpt.exchange.exporting import export
from ds_gpt.model.lora import adapter_weight

SHAPES = {
    "gpt2": ([], "lora.targets=[qkv, out, up, down]"),
    "gpt2 without biases": (["model.bias=false"], "lora.targets=[qkv, 'blocks.1.*.down']"),
    "llama": ([*LLAMA], "lora.targets=[qkv, out, gate, up, down]"),
}
TOKENS = torch.arange(32).view(2, 16)


def train(ranks: Any, folder: Path) -> None:
    for name, (shape, targets) in SHAPES.items():
        run(ranks, "zero1", [*SHORT, *shape], folder / name / "base", None)
        settings = [*ADAPTERS, *shape, targets, "lora.alpha=6"]
        run(ranks, "zero1", settings, folder / name / "adapters", folder / name / "base")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    run_ranks(1, train, made)
    return made


def loaded(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", SHAPES)
def test_peft_on_the_exported_base_is_our_model(name: str, folder: Path, tmp_path: Path) -> None:
    saved = find_saved_model(folder / name / "adapters")
    expected = saved.load()(TOKENS)
    export(find_saved_model(folder / name / "base"), tmp_path / "base", "hf")
    export_adapter(saved, tmp_path / "adapter")
    base = loaded(tmp_path / "base")
    assert (base(TOKENS).logits - expected).abs().max() > 0.05, "the adapters should have learned something"
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(adapted(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(adapted.merge_and_unload()(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
    held = peft.load_peft_weights(str(tmp_path / "adapter"))
    assert all(".lora_" in key for key in held) and len(held) >= 6


def test_peft_finds_a_base_that_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = find_saved_model(folder / "gpt2" / "adapters")
    export(find_saved_model(folder / "gpt2" / "base"), tmp_path / "base", "hf")
    monkeypatch.chdir(tmp_path)
    export_adapter(saved, tmp_path / "adapter", base="base")
    monkeypatch.chdir("/")
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32).eval()
    torch.testing.assert_close(adapted(TOKENS).logits, saved.load()(TOKENS), rtol=1e-4, atol=1e-5)
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert f"It loads {tmp_path / 'base'}" in card and "AutoPeftModelForCausalLM" in card


@pytest.mark.parametrize("base", ["no/such/folder", "./none", "/none", "folder"])
def test_a_base_that_nobody_could_load_is_refused(base: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"--base '{base}' is (a folder without|neither)"):
        export_adapter(find_saved_model(folder / "gpt2" / "adapters"), tmp_path / "out", base=base)
    assert not (tmp_path / "out").exists()


def test_exported_whole_a_run_of_adapters_is_merged(folder: Path, tmp_path: Path) -> None:
    for name in ("gpt2", "llama"):
        saved = find_saved_model(folder / name / "adapters")
        export(saved, tmp_path / name, "hf")
        torch.testing.assert_close(loaded(tmp_path / name)(TOKENS).logits, saved.load()(TOKENS), rtol=1e-4, atol=1e-5)


def test_keys_and_queries_of_llama_share_a(folder: Path, tmp_path: Path) -> None:
    saved = find_saved_model(folder / "llama" / "adapters")
    export_adapter(saved, tmp_path / "adapter")
    held = peft.load_peft_weights(str(tmp_path / "adapter"))
    at = "base_model.model.model.layers.1.self_attn.{}_proj.lora_{}.weight"
    a, b = zip(*((held[at.format(kind, "A")], held[at.format(kind, "B")]) for kind in "qkv"), strict=True)
    assert all(torch.equal(other, a[0]) for other in a) and [len(rows) for rows in b] == [32, 16, 16]
    ours, base = (
        find_saved_model(folder / "llama" / name).load().blocks[1].attention.qkv for name in ("adapters", "base")
    )
    change = adapter_weight(a[0], torch.cat(b), 6 / 2)
    # Sums of squares do not mind the order of the rows, which is what the logits hold.
    torch.testing.assert_close(change.square().sum(), (ours.weight - base.weight).square().sum(), rtol=1e-4, atol=0)


def test_the_command_says_what_it_wrote_and_refuses_what_has_no_adapters(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ds_gpt.commands.export import main

    adapters = str(folder / "gpt2" / "adapters")
    main([adapters, "--format", "peft", "--dtype", "bf16", "--base", "org/model-1.5b", "--output", str(tmp_path / "out")])
    assert "as peft, bf16" in capsys.readouterr().out
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/model-1.5b"
    assert (config["r"], config["lora_alpha"], config["fan_in_fan_out"]) == (2, 6.0, True)
    assert "transformer.h.0.attn.c_attn" in config["target_modules"]
    assert {tensor.dtype for tensor in peft.load_peft_weights(str(tmp_path / "out")).values()} == {torch.bfloat16}
    with pytest.raises(ConfigError, match="has no adapters(.|\n)*--format hf"):
        export_adapter(find_saved_model(folder / "gpt2" / "base"), tmp_path / "none")
