"""What others publish, taken in or refused; and a run that goes on from it."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_models import CPU, TOKENIZER, imported, make, save
from forked_ranks import run_ranks
from safetensors.torch import load_file, save_file

from ds_gpt.checkpoint.saved_model import find_saved_model
from ds_gpt.config import ConfigError
from ds_gpt.exchange.foreign_config import _DEFAULTS, read_config
from ds_gpt.exchange.importing import find_foreign_model
from ds_gpt.trainer.imported_run import import_run

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
import launches  # noqa: E402

transformers = pytest.importorskip("transformers")


class Payload:
    """What a pickle can do to who loads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "run")


def rewrite(folder: Path, change: Any) -> None:
    """The folder's tensors, changed."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit(folder: Path, **values: Any) -> None:
    """The folder's config.json with other values."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refused(folder: Path, run: Path) -> str:
    """How an import is refused; it leaves nothing."""
    before = sorted(run.parent.iterdir())
    with pytest.raises(ConfigError) as error:
        imported(folder, run)
    assert sorted(run.parent.iterdir()) == before
    return str(error.value)


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    return save(make("gpt2"), tmp_path / "gpt2")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(make("llama"), tmp_path / "llama")


def test_no_pickle_is_read(gpt2: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    pickle.dumps(Payload(ran))
    (gpt2 / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(ran)))
    imported(gpt2, tmp_path / "run")  # there are safetensors beside it
    (gpt2 / "model.safetensors").unlink()
    message = refused(gpt2, tmp_path / "run-2")
    assert "pytorch_model.bin, which are pickles" in message and "runs whatever code is in it" in message
    (gpt2 / "model.safetensors").write_bytes(pickle.dumps(Payload(ran)))  # under a false name
    assert "cannot be read" in refused(gpt2, tmp_path / "run-2")
    assert not ran.exists()
    pickle.loads(pickle.dumps(Payload(ran)))
    assert ran.read_text() == "run"  # it would have


def test_gpt2_as_it_was_first_published(gpt2: Path, tmp_path: Path) -> None:
    """Without the prefix, with the causal masks among the weights, and a config of few words."""
    weights = load_file(gpt2 / "model.safetensors")

    def as_published(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for i in range(3):
            tensors[f"h.{i}.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()

    rewrite(gpt2, as_published)
    stated = json.loads((gpt2 / "config.json").read_text())
    few = {key: stated[key] for key in ("model_type", "vocab_size", "n_positions", "n_embd", "n_layer", "n_head")}
    (gpt2 / "config.json").write_text(json.dumps(few))
    saved = find_saved_model(imported(gpt2, tmp_path / "run"))
    assert saved.run.model.hidden_width == 128 and saved.run.model.tied_head and saved.run.model.dropout == 0.1
    assert torch.equal(saved.load().head.weight, weights["transformer.wte.weight"])
    rewrite(gpt2, lambda tensors: tensors["lm_head.weight"].add_(1))
    assert "ties the head to the embedding, but lm_head.weight differs" in refused(gpt2, tmp_path / "run-2")


def test_older_configs_mean_what_they_meant(llama: Path, tmp_path: Path) -> None:
    before = find_saved_model(imported(llama, tmp_path / "run")).run.model
    path = llama / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    for gone in ("head_dim", "attention_bias", "mlp_bias", "hidden_act", "tie_word_embeddings"):
        config.pop(gone)
    path.write_text(json.dumps({**config, "rope_theta": rope["rope_theta"], "rope_scaling": None}))
    model = find_saved_model(imported(llama, tmp_path / "run-2")).run.model
    assert model == before and model.rope_theta == 500_000.0 and not model.bias and not model.tied_head


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("gpt2", {"model_type": "bloom"}, "model_type = 'bloom' cannot be imported"),
        ("gpt2", {"activation_function": "relu"}, "activation_function = 'relu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        ("gpt2", {"n_head": 5}, "does not divide"),
        ("gpt2", {"n_layer": "3"}, "layers: Input should be a valid integer"),
        ("gpt2", {"vocab_size": 20}, "the tokenizer .* has 25 ids, the model 20"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}},
            "rope_type = 'llama3'",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None},
            "type = 'linear'",
        ),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "type = 'linear'"),  # beside rope_parameters
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("llama", {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "rope_parameters = {'full_attention'"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config = "),
        ("llama", {"rope_parameters": {"rope_theta": 10**400}}, "int too large"),
        ("llama", {"num_attention_heads": 0}, "division"),
        ("llama", {"num_hidden_layers": 10**9}, "layers = 1000000000"),
        ("gpt2", {"n_embd": 10**10}, "width = 10000000000"),
        ("gpt2", {"model_type": ["gpt2"]}, "model_type = \\['gpt2'\\]"),
        (
            "gpt2",
            {"model_type": "ds_gpt", "model": {"layers": 1, "width": 8, "heads": 2, "context": 4}},
            "vocab_size is 'auto'",
        ),
        ("llama", {"head_dim": 16}, "head_dim = 16"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("llama", {"attention_bias": True}, "mlp_bias = False"),
        ("llama", {"model_type": "mistral", "attention_bias": True}, "attention_bias = True"),
        ("llama", {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 1}, "layer_types"),
    ],
)
def test_what_ours_does_not_compute_is_refused(
    family: str, values: dict[str, Any], message: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(family)
    edit(folder, **values)
    with pytest.raises(ConfigError, match=message):
        imported(folder, tmp_path / "run")


@pytest.mark.parametrize("kind", _DEFAULTS)
def test_what_a_config_leaves_out_is_what_transformers_takes(kind: str) -> None:
    theirs = transformers.AutoConfig.for_model(kind)
    assert {key: getattr(theirs, key) for key in _DEFAULTS[kind] if key != "sliding_window"} == {
        key: value for key, value in _DEFAULTS[kind].items() if key != "sliding_window"
    }
    window = type(theirs)(use_sliding_window=True).sliding_window if "sliding_window" in _DEFAULTS[kind] else None
    assert window == _DEFAULTS[kind].get("sliding_window")


def test_a_config_without_its_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match="it has no 'num_hidden_layers'"):
        read_config({"model_type": "llama", "num_attention_heads": 4, "hidden_size": 8})


def test_all_that_is_wrong_with_the_weights_is_told(llama: Path, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.router.weight"] = torch.zeros(2)
        tensors["lm_head.weight"] = torch.zeros(4, 4)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(48, 32, dtype=torch.int8)

    rewrite(llama, spoil)
    message = refused(llama, tmp_path / "run")
    for told in (
        "1 tensors are missing: model.norm.weight",
        "router.weight",
        "lm_head.weight (4, 4) instead of (28, 32)",
        "up_proj.weight I8",
    ):
        assert told in message


def test_damaged_and_missing_files_are_told(llama: Path, tmp_path: Path) -> None:
    path = llama / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert "cannot be read" in refused(llama, tmp_path / "run")
    path.unlink()
    assert "has no model.safetensors" in refused(llama, tmp_path / "run")
    (llama / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}})
    )
    assert "a file of another folder" in refused(llama, tmp_path / "run")
    deep = "[" * 100_000  # more than Python's parser follows
    (llama / "model.safetensors.index.json").write_text(deep)
    assert "cannot be read" in refused(llama, tmp_path / "run")
    for content in (deep, '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {}, "unk_token": "a"}}'):
        (llama / "tokenizer.json").write_text(content)
        assert "is not a tokenizer" in refused(llama, tmp_path / "run")
    (llama / "tokenizer.json").unlink()
    assert "--tokenizer" in refused(llama, tmp_path / "run")
    for content in ("{", deep):
        (llama / "config.json").write_text(content)
        assert "config.json' cannot be read" in refused(llama, tmp_path / "run")
    assert "is not a folder" in refused(llama / "nowhere", tmp_path / "run")
    TOKENIZER.save(tmp_path / "own.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        find_foreign_model(llama, tmp_path / "own.json")


def test_the_whole_file_goes_before_an_index(llama: Path, tmp_path: Path) -> None:
    """Where an older save left both, transformers reads the one file."""
    index = {"weight_map": {"lm_head.weight": "gone.safetensors"}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    assert transformers.AutoModelForCausalLM.from_pretrained(llama) is not None
    assert find_saved_model(imported(llama, tmp_path / "run")).state["step"] == 0


def test_a_run_is_never_overwritten(gpt2: Path, tmp_path: Path) -> None:
    run = imported(gpt2, tmp_path / "run")
    found = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert "exists" in refused(gpt2, run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == found


def test_a_folder_names_its_run(gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert import_run(find_foreign_model(gpt2.rename(tmp_path / "_my model")), None, CPU) == Path("runs/my-model")


def test_a_run_folder_that_was_chosen_names_its_run(gpt2: Path, tmp_path: Path) -> None:
    run = imported(gpt2, tmp_path / "my run")
    assert find_saved_model(run).run.name == "my-run"


def trained_on(folder: Path) -> dict[str, Any]:
    """An imported run goes on in its folder, and in a branch; at a learning rate of all but nothing it stays what it was."""
    from ds_gpt.trainer.quality import measure, validation_data

    run = imported(folder, Path("imported"))
    before = find_saved_model(run)
    text = "data.corpus=letters.txt"
    Path("letters.txt").write_text("the ape's bread, a moth\nand its lamp. " * 60)
    told: dict[str, Any] = {"launches": []}
    told["quality"] = measure(before, validation_data(before, "letters.txt"), torch.device("cpu"), 8)
    for path, settings in (
        (run, ["training.steps=2"]),
        (run / "checkpoints" / "step_0000000", ["training.steps=4", "optimizer.lr=1e-3"]),
    ):
        overrides = [
            text,
            "data.cache_dir=cache",
            "optimizer.lr=1e-12",
            "schedule.min_lr=0.0",
            "evaluation.every=2",
            "evaluation.sequences=8",
            "sample.tokens=2",
        ]
        arguments = ["--resume", str(path)] + (["--run-dir", "branch"] if path != run else [])
        for setting in [*overrides, *settings, "model.dropout=0.0", "schedule.warmup_steps=0", "logging.every=1"]:
            arguments += ["--set", setting]
        told["launches"].append(launches.launch_as_given(arguments))
    told["metrics"] = {
        name: [json.loads(line) for line in (Path(name) / "metrics.jsonl").read_text().splitlines()]
        for name in ("imported", "branch")
    }
    told["saved"] = find_saved_model("imported").state["step"]
    told["after"] = [found.load().head.weight.tolist() for found in (find_saved_model("imported"), before)]
    return told


def in_folder(ranks: Any, working: Path, folder: Path) -> dict[str, Any]:
    return launches.in_folder(ranks, working, lambda: trained_on(folder))


def test_an_imported_model_is_trained_on(llama: Path, tmp_path: Path) -> None:
    told = run_ranks(1, in_folder, tmp_path / "work", llama)[0]
    for launched in told["launches"]:
        assert launched.error == "" and "step_0000000 has no exp_avg: it starts at zero" in launched.out
    first, branch = told["metrics"]["imported"], told["metrics"]["branch"]
    assert [line["step"] for line in first] == [1, 2] and told["saved"] == 2
    assert first[-1]["val_loss"] == pytest.approx(
        told["quality"].loss, rel=1e-6
    )  # the weights arrived; and eval measures what training does
    torch.testing.assert_close(*map(torch.tensor, told["after"]), rtol=0, atol=1e-9)
    assert branch[-1]["val_loss"] < first[-1]["val_loss"] - 0.02
