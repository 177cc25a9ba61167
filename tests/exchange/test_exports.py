"""Exports of trained runs: loaded by transformers, the same text, little memory, and nothing half written."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked_ranks import run_ranks
from tiny import VOCABULARY
from variants import LLAMA

from ds_gpt.checkpoint.folder import commit, prepare_partial
from ds_gpt.checkpoint.saved_model import SavedModel, find_saved_model
from ds_gpt.checkpoint.shards import write_shard
from ds_gpt.config import ConfigError, ModelConfig
from ds_gpt.data import CharTokenizer
from ds_gpt.data.byte_pairs import BpeTokenizer
from ds_gpt.exchange.exporting import export
from ds_gpt.exchange.families import family_of
from ds_gpt.exchange.tensor_files import parse_bytes
from ds_gpt.generation.decoding import generate
from ds_gpt.generation.options import Sampling
from ds_gpt.model.gpt import GPT

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
from running import train_run  # noqa: E402

transformers = pytest.importorskip("transformers")

MIB = 1 << 20
SHAPE = {"layers": 2, "width": 32, "heads": 4, "context": 16, "vocab_size": VOCABULARY}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama-shaped run under ZeRO 3 on two ranks."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    run_ranks(2, train_run, str(folder), "zero3", [*LLAMA, "training.steps=30", "evaluation.every=30"], None, False)
    return folder


@pytest.fixture(scope="module")
def gpt2_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2-shaped run under ZeRO 1 on two ranks."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    run_ranks(2, train_run, str(folder), "zero1", ["training.steps=100", "evaluation.every=100"], None, False)
    return folder


def copy_with(saved: SavedModel, folder: Path, weights: GPT, **options: object) -> SavedModel:
    """A run whose newest checkpoint has other weights, with both moments, and perhaps another shape."""
    shutil.copytree(saved.checkpoint.parent.parent, folder)
    state = json.loads(json.dumps(saved.state))
    state["facts"]["model"] |= options
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    tensors = {
        f"{kind}:0:{name}": p.detach().flatten().clone() for name, p in weights.named_parameters() for kind in kinds
    }
    partial = prepare_partial(folder / "checkpoints", 999)
    commit(partial, 999, state, [write_shard(partial, 0, tensors)])
    return find_saved_model(folder)


@pytest.mark.parametrize("name", ["run", "gpt2_run"])
def test_transformers_continues_a_prompt_as_we_do(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    saved = find_saved_model(request.getfixturevalue(name))
    export(saved, tmp_path / "out", "hf", max_shard_bytes=15_000)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs, ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(), saved.load()
    assert type(theirs).__name__ == {"run": "LlamaForCausalLM", "gpt2_run": "GPT2LMHeadModel"}[name]
    tokens = torch.randint(VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-4, atol=1e-4)
    prompt = "0 5 10 15"
    ids = saved.tokenizer.encode(prompt).tolist()
    assert tokenizer(prompt, return_tensors="pt").input_ids.tolist() == [ids]
    (continued,) = generate(ours, [ids], 12, Sampling(temperature=0))
    text = tokenizer.decode(theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0])
    assert (
        text == saved.tokenizer.decode([*ids, *continued]) and len(set(text.split())) > 8
    )  # trained: it counts in fives


def test_the_card_tells_how_it_was_trained(run: Path, tmp_path: Path) -> None:
    saved = find_saved_model(run)
    export(saved, tmp_path / "out", "hf")
    card = (tmp_path / "out" / "README.md").read_text()
    for told in (
        "library_name: transformers",
        "LlamaForCausalLM",
        "2 x ",
        "fp32, ZeRO stage 3",
        f"{saved.state['val_loss']:.4f} nats",
        "| optimizer steps | 30 |",
        f"| tokenizer | synthetic, {saved.tokenizer.vocab_size} ids |",
    ):
        assert told in card
    assert (
        f"| parameters | {sum(p.numel() for p in saved.load().parameters()):,} |" in card and str(tmp_path) not in card
    )
    export(saved, tmp_path / "pt", "torch")
    code = (
        (tmp_path / "pt" / "README.md")
        .read_text()
        .split("```python\n")[1]
        .split("```")[0]
        .replace("PATH", str(tmp_path / "pt"))
    )
    scope: dict[str, object] = {}
    exec(code, scope)  # what it says about use is true
    assert torch.equal(scope["model"].head.weight, saved.load().head.weight)  # type: ignore[attr-defined]


def test_a_model_that_no_class_computes_is_refused(run: Path, tmp_path: Path) -> None:
    refusals = {
        "LlamaForCausalLM, has no model.norm = 'layernorm'": {"positions": "rotary", "ffn": "swiglu"},
        "GPT2LMHeadModel, has no model.kv_heads = 2": {"kv_heads": 2},
        "GPT2LMHeadModel, has no model.sliding_window = 5": {"sliding_window": 5},
        "LlamaForCausalLM, has no model.sliding_window = 7": {
            "positions": "rotary",
            "norm": "rmsnorm",
            "ffn": "swiglu",
            "sliding_window": 7,
        },
        "Qwen3ForCausalLM, has no model.bias = True": {
            "positions": "rotary",
            "norm": "rmsnorm",
            "ffn": "swiglu",
            "qk_norm": True,
            "sliding_window": 7,
        },
    }
    for message, options in refusals.items():
        with pytest.raises(ConfigError, match=message) as refusal:
            family_of(ModelConfig(**SHAPE, **options))
        assert "--format safetensors" in str(refusal.value)
    saved = find_saved_model(run)
    model = ModelConfig(**SHAPE, kv_heads=2)
    mixed = copy_with(saved, tmp_path / "mixed", GPT(model), **model.model_dump(mode="json"))
    with pytest.raises(ConfigError, match="no class of transformers"):
        export(mixed, tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()
    export(mixed, tmp_path / "out", "safetensors")


def test_what_exists_is_never_overwritten(run: Path, tmp_path: Path) -> None:
    saved = find_saved_model(run)
    for output in (tmp_path / "empty", tmp_path / "link", tmp_path / "file"):
        if output.name == "file":
            output.write_text("mine")
        elif output.name == "link":
            output.symlink_to(tmp_path / "nowhere")
        else:
            output.mkdir()
        before = sorted(tmp_path.iterdir())
        with pytest.raises(ConfigError, match="exists"):
            export(saved, output, "hf")
        assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_text() == "mine" and list((tmp_path / "empty").iterdir()) == []


def test_a_disk_that_is_full_leaves_nothing(run: Path, tmp_path: Path) -> None:
    saved = find_saved_model(run)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for format in ("hf", "torch"):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))  # the kernel refuses to write further
            with pytest.raises(ConfigError, match="cannot be written"):
                export(saved, tmp_path / "out", format)  # type: ignore[arg-type]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert list(tmp_path.iterdir()) == []


def test_fp16_refuses_what_it_cannot_hold(run: Path, tmp_path: Path) -> None:
    saved = find_saved_model(run)
    model = saved.load()
    model.norm.weight[0] = 70_000.0
    large = copy_with(saved, tmp_path / "large", model)
    with pytest.raises(ConfigError, match=r"'norm.weight' has values up to 7e\+04"):
        export(large, tmp_path / "out", "hf", "fp16")
    assert not (tmp_path / "out").exists()
    export(large, tmp_path / "out", "hf", "bf16")


def test_sizes_are_read() -> None:
    assert [parse_bytes(text) for text in ("5GB", "1.5mb", "64 KB")] == [5 * 10**9, 1_500_000, 64_000]
    for text in ("5", "GB", "-1GB", "0GB", "1.2.3MB", "5TB"):
        with pytest.raises(ValueError, match="size such as"):
            parse_bytes(text)


def test_memory_stays_below_the_weights(gpt2_run: Path, tmp_path: Path) -> None:
    """120 MiB of weights, saved with two moments: all resident memory is counted, also pages of mapped files.

    What is written parameter by parameter needs an eighth of the weights, mapped, and a few copies of the largest
    parameter; `torch.save` wants all of them, once.
    """
    saved = find_saved_model(gpt2_run)
    options = {"width": 512, "layers": 10, "ffn_width": 2048}
    model = GPT(ModelConfig.model_validate(saved.run.model.model_dump() | options))
    weights = sum(parameter.numel() for parameter in model.parameters()) * 4
    large = copy_with(saved, tmp_path / "large", model, **options)
    del model
    code = f"""
import sys
from pathlib import Path
from ds_gpt.checkpoint.saved_model import find_saved_model
from ds_gpt.exchange.exporting import export
def resident(key):
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1])
small, large, folder = find_saved_model({str(gpt2_run)!r}), find_saved_model({str(large.checkpoint)!r}), Path({str(tmp_path)!r})
for format in ("hf", "torch"):
    export(small, folder / f"small-{{format}}", format)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak counts from here
    before = resident("VmRSS")
    export(large, folder / f"large-{{format}}", format)
    print(resident("VmHWM") - before)
print("deepspeed" in sys.modules, "transformers" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert result.returncode == 0, result.stderr
    streamed, whole, *imported = result.stdout.split()
    assert weights > 120 * MIB and imported == ["False", "False"]
    assert 0.1 * weights < int(streamed) < 0.5 * weights
    assert 0.9 * weights < int(whole) < 1.35 * weights


def test_a_character_tokenizer_travels(run: Path, tmp_path: Path) -> None:
    saved = find_saved_model(run)
    characters = "\n " + "".join(map(chr, range(ord("a"), ord("a") + VOCABULARY - 3))) + "漢"
    other = SavedModel(saved.checkpoint, saved.run, CharTokenizer("".join(sorted(characters))), saved.state)
    export(other, tmp_path / "out", "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        tokenizer.decode(tokenizer.encode("ab\n 漢")) == "ab\n 漢"
        and tokenizer.encode("ab\n 漢") == other.tokenizer.encode("ab\n 漢").tolist()
    )
    assert tokenizer.model_max_length == 16 and tokenizer.eos_token is None


def test_what_ends_a_text_there_ends_it_here(run: Path, tmp_path: Path) -> None:
    """A tokenizer of others begins texts with one token and ends them with another: the export says which is which."""
    saved = find_saved_model(run)
    words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *map(str, range(VOCABULARY - 3))])}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    added = [{"id": words[word], "content": word, **flags} for word in ("<unk>", "<s>", "</s>")]
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    pieces = {"type": "WhitespaceSplit"}
    fields = {"version": "1.0", "added_tokens": added, "pre_tokenizer": pieces, "model": model}
    tokenizer = BpeTokenizer.from_dict(fields)
    export(SavedModel(saved.checkpoint, saved.run, tokenizer, saved.state), tmp_path / "out", "hf")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.generation_config.eos_token_id == loaded.config.eos_token_id == [1, 2]
    assert loaded.config.bos_token_id == 1
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs.bos_token, theirs.eos_token) == ("<s>", "</s>")
