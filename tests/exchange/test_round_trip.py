"""In from transformers and out again: the same logits, loss and gradients, and in the end the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from foreign_models import CONTEXT, MODELS, VOCABULARY, imported, make, save
from safetensors.torch import load_file

from ds_gpt.checkpoint.saved_model import SavedModel, find_saved_model
from ds_gpt.config import ModelConfig
from ds_gpt.exchange.exporting import export
from ds_gpt.exchange.families import family_of
from ds_gpt.model.gpt import GPT

transformers = pytest.importorskip("transformers")


def loss_and_gradients(
    logits: torch.Tensor, targets: torch.Tensor, model: torch.nn.Module
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    names, parameters = zip(*model.named_parameters(), strict=True)
    return loss, dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def assert_same_function(ours: GPT, theirs: Any) -> None:
    """Logits, loss, and the gradient of every weight, brought into their layout as the weights are on export."""
    tokens = torch.randint(VOCABULARY, (2, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits, reference = ours.requires_grad_()(inputs), theirs(inputs).logits
    torch.testing.assert_close(logits, reference, rtol=1e-5, atol=1e-5)
    (loss, gradients), (their_loss, their_gradients) = (
        loss_and_gradients(logits, targets, ours),
        loss_and_gradients(reference, targets, theirs),
    )
    torch.testing.assert_close(loss, their_loss, rtol=1e-6, atol=1e-6)
    compared = set()
    for rule in family_of(ours.config).layout(ours.config).rules:
        for name, gradient in zip(rule.theirs, rule.outward(gradients[rule.ours]), strict=True):
            torch.testing.assert_close(
                gradient, their_gradients[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
            compared.add(name)
    assert compared == their_gradients.keys()


def exported(run: Path | SavedModel, folder: Path, **options: Any) -> Path:
    saved = run if isinstance(run, SavedModel) else find_saved_model(run)
    export(saved, folder, options.pop("format", "hf"), **options)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("case", MODELS)
def test_import_and_export_change_nothing(case: str, tmp_path: Path) -> None:
    theirs = make(case)
    run = imported(save(theirs, tmp_path / "theirs"), tmp_path / "run")
    assert_same_function(find_saved_model(run).load(), theirs)
    folder = exported(run, tmp_path / "exported")
    before, after = tensors_of(tmp_path / "theirs"), tensors_of(folder)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(again) is type(theirs) and again.dtype == torch.float32
    assert_same_function(find_saved_model(run).load(), again)


def test_files_in_shards_are_read_and_written(tmp_path: Path) -> None:
    theirs = make("llama")
    folder = save(theirs, tmp_path / "theirs", max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    run = imported(folder, tmp_path / "run")
    out = exported(run, tmp_path / "exported", max_shard_bytes=20_000)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert (
        len(files) > 3
        and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
        and (out / "model.safetensors.index.json").is_file()
    )
    assert all(path.stat().st_size < 25_000 for path in out.glob("*.safetensors"))
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    weights = theirs.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.state_dict().items())


def test_a_gpt2_without_biases_has_zeros_for_them(tmp_path: Path) -> None:
    theirs = make("gpt2")
    saved = find_saved_model(imported(save(theirs, tmp_path / "theirs"), tmp_path / "run"))
    model = saved.load()
    plain = saved.run.model_copy(update={"model": ModelConfig(**{**saved.run.model.model_dump(), "bias": False})})
    without = SavedModel(saved.checkpoint, plain, saved.tokenizer, saved.state)
    again = transformers.AutoModelForCausalLM.from_pretrained(exported(without, tmp_path / "exported"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
        tokens = torch.randint(VOCABULARY, (2, CONTEXT))
        torch.testing.assert_close(without.load()(tokens), model(tokens), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(again(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_own_formats_come_back(case: str, tmp_path: Path) -> None:
    run = imported(save(make(case), tmp_path / "theirs"), tmp_path / "run")
    weights = find_saved_model(run).load().state_dict()
    again = imported(exported(run, tmp_path / "own", format="safetensors"), tmp_path / "again")
    assert (again / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    for found in (
        find_saved_model(again).load().state_dict(),
        torch.load(exported(run, tmp_path / "pt", format="torch") / "model.pt", weights_only=True),
    ):
        assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
    tied = case == "gpt2"
    assert ("head.weight" in tensors_of(tmp_path / "own")) != tied  # the file holds it once
    numbers = sum(tensor.numel() for name, tensor in weights.items() if not (tied and name == "head.weight"))
    assert (tmp_path / "pt" / "model.pt").stat().st_size < numbers * 4 + 20_000


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision(dtype: str, tmp_path: Path) -> None:
    theirs = make("llama")
    out = exported(imported(save(theirs, tmp_path / "theirs"), tmp_path / "run"), tmp_path / "exported", dtype=dtype)
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert again.dtype == half
    weights = theirs.to(half).state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.state_dict().items())
    # And in again, where the masters are fp32.
    run = imported(save(theirs, tmp_path / "half"), tmp_path / "again")
    assert find_saved_model(run).load().head.weight.dtype == torch.float32
    assert torch.equal(find_saved_model(run).load().head.weight, weights["lm_head.weight"].float())
