"""Runs that start from another run's weights, with adapters or without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from running import tiny_dataset
from tiny import tiny
from tuned_runs import ADAPTERS, SHORT, run

from ds_gpt.checkpoint.initial import find_initial, initial_at, started_from
from ds_gpt.config import ConfigError
from ds_gpt.model.gpt import GPT

def chain(ranks: Any, folder: Path) -> dict[str, float]:
    """A run, adapters on it, and runs that start from those, under ZeRO 1 to 3, and where ranks share matrices."""
    run(ranks, "zero1", [*SHORT, "parallel.tensor=2"], folder / "base", None)
    run(ranks, "zero1", ADAPTERS, folder / "adapters", folder / "base")
    return {
        "adapters": run(ranks, "zero3", ADAPTERS, folder / "adapters3", folder / "base"),
        "full": run(ranks, "zero3", SHORT, folder / "full", folder / "adapters"),
        "again": run(ranks, "zero2", ADAPTERS, folder / "again", folder / "adapters"),
        "shared": run(ranks, "zero2", [*ADAPTERS, "parallel.tensor=2"], folder / "shared", folder / "adapters"),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    folder = tmp_path_factory.mktemp("chain")
    first, other = run_ranks(2, chain, folder)
    assert first == other
    return folder, first


def model_of(folder: Path) -> GPT:
    """The model that a run ended with, its adapters merged by hand."""
    initial = initial_at(folder)
    model = GPT(initial.model).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial.read(name, parameter.numel()).view(parameter.shape))
    return model


def loss_of(model: GPT) -> float:
    dataset = tiny_dataset()
    windows = torch.from_numpy(dataset.val.read(dataset.val.evaluation_windows(16, 8), 17))
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()).item()


def test_a_run_starts_where_the_other_ended(runs: tuple[Path, dict[str, float]]) -> None:
    folder, losses = runs
    base, tuned = loss_of(model_of(folder / "base")), loss_of(model_of(folder / "adapters"))
    assert losses["adapters"] == pytest.approx(base, rel=1e-5)
    assert losses["full"] == losses["again"] == pytest.approx(tuned, rel=1e-5)
    assert losses["shared"] == pytest.approx(tuned, rel=1e-5)
    weights = [model_of(folder / name).blocks[1].attention.qkv.weight for name in ("adapters", "base")]
    assert (weights[0] - weights[1]).abs().max() > 0.05, "the adapters should have learned something"


def test_the_adapter_gives_peft_the_same_logits(runs: tuple[Path, dict[str, float]]) -> None:
    from peft import PeftModel

    folder, tokens_BT = runs[0], torch.arange(32).view(2, 16)
    expected = model_of(folder / "adapters")(tokens_BT)
    base = model_of(folder / "base")
    assert not torch.allclose(base(tokens_BT), expected, atol=1e-2)
    loaded = PeftModel.from_pretrained(base, str(folder / "adapters" / "adapter"))
    torch.testing.assert_close(loaded(tokens_BT), expected, rtol=1e-5, atol=1e-5)


def test_the_checkpoint_that_is_started_from_is_pinned(runs: tuple[Path, dict[str, float]]) -> None:
    folder = runs[0]
    text = (folder / "adapters" / "run.yaml").read_text()
    assert f"init_from: {folder / 'base' / 'checkpoints' / 'step_0000004'}" in text
    assert f"tokenizer: {folder / 'base' / 'tokenizer.json'}" in text
    sizes = {
        name: sum(
            path.stat().st_size for path in (folder / name / "checkpoints" / "step_0000004").glob("*.safetensors")
        )
        for name in ("base", "adapters")
    }
    assert sizes["adapters"] < sizes["base"] / 5, "the frozen weights are not saved again"


def test_what_cannot_be_started_from_is_refused(runs: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    other = tiny("zero1", 1, ["model.layers=3", "model.kv_heads=2", f"init_from={runs[0] / 'base'}"]).run
    with pytest.raises(ConfigError, match="model.layers = 3, but(.|\n)*has 2(.|\n)*model.key_heads = 2"):
        started_from(other, initial_at(runs[0] / "base"))
    with pytest.raises(ConfigError, match="neither a checkpoint nor the folder of a run"):
        initial_at(tmp_path)
    with pytest.raises(ConfigError, match="lora.rank = 4 without init_from"):
        find_initial(tiny("zero1", 1, ["lora.rank=4"]).run)
