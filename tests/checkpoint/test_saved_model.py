"""A model for use, out of a run: the weights that were trained, whatever wrote them, and a clear word where there are none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked_ranks import run_ranks
from made import ALONE
from running import train_run
from tiny import VOCABULARY

from ds_gpt.checkpoint.folder import commit, prepare_partial
from ds_gpt.checkpoint.saved_model import find_saved_model
from ds_gpt.checkpoint.shards import write_shard
from ds_gpt.config import ConfigError
from ds_gpt.config.run import ModelConfig
from ds_gpt.data import CharTokenizer
from ds_gpt.generation.decoding import generate
from ds_gpt.generation.options import Sampling
from ds_gpt.model.gpt import GPT

MIB = 1 << 20

RUN = ["training.steps=4", "evaluation.every=4", "checkpoints.every=2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank with checkpoints of step 2 and step 4."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    run_ranks(1, train_run, str(folder), "zero1", RUN, None, False)
    return folder


@pytest.mark.parametrize(
    ("deepspeed", "world_size", "options"),
    [
        ("zero0", 1, []),
        (
            "zero2",
            2,
            [
                "model.positions=rotary",
                "model.kv_heads=2",
                "model.norm=rmsnorm",
                "model.ffn=swiglu",
                "model.bias=false",
            ],
        ),
        ("zero3", 2, ["model.tied_head=false", "model.sliding_window=5", "activation_checkpointing.policy=full"]),
    ],
)
def test_the_weights_are_those_that_were_trained(
    deepspeed: str, world_size: int, options: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    ranks = run_ranks(world_size, train_run, str(folder), deepspeed, [*RUN, "sample.tokens=40", *options], None, True)
    saved = find_saved_model(folder)
    assert saved.checkpoint.name == "step_0000004" and saved.state["step"] == 4
    assert saved.run.model.vocab_size == saved.tokenizer.vocab_size == VOCABULARY
    model = saved.load()
    parameters, seen = dict(model.named_parameters()), set()
    for (name, kind, start), values in (item for rank in ranks for item in rank["weights"].items()):
        if kind == "weight":
            assert parameters[name].flatten()[start : start + len(values)].tolist() == values
            seen |= {(name, element) for element in range(start, start + len(values))}
    assert len(seen) == sum(parameter.numel() for parameter in parameters.values())
    assert not model.training and not any(parameter.requires_grad for parameter in parameters.values())
    assert (model.head.weight is model.embedding.tokens.weight) == model.config.tied_head
    # All ranks of the engine together wrote at the end of the run what this model writes; it goes past the context.
    first, *sample = saved.tokenizer.encode((folder / "sample.txt").read_text()).tolist()
    sampling = Sampling(saved.run.sample.temperature, saved.run.sample.top_k)
    assert len(sample) == 40 and generate(model, [[first]], 40, sampling, saved.run.seed) == [sample]
    assert find_saved_model(saved.checkpoint).load(dtype=torch.bfloat16).head.weight.dtype == torch.bfloat16


def test_the_newest_intact_checkpoint_is_used_and_a_damaged_one_named(run: Path, tmp_path: Path) -> None:
    folder, warnings = shutil.copytree(run, tmp_path / "run"), []
    shard = next((folder / "checkpoints" / "step_0000004").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    saved = find_saved_model(folder, warnings.append)
    assert (
        saved.state["step"] == 2 and len(warnings) == 1 and "step_0000004" in warnings[0] and "checksum" in warnings[0]
    )
    with pytest.raises(ConfigError, match="damaged: .*checksum"):
        find_saved_model(shard.parent)
    shutil.rmtree(saved.checkpoint)
    with pytest.raises(ConfigError, match=r"no intact checkpoint: .*step_0000004"):
        find_saved_model(folder)


def test_a_checkpoint_is_found_by_a_relative_path(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run / "checkpoints" / "step_0000002")
    assert find_saved_model(".").state["step"] == 2


def test_what_is_no_run_is_told(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"'{tmp_path}/nowhere' does not exist"):
        find_saved_model(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=rf"neither the folder of a run nor a checkpoint[\s\S]*'{run}'"):
        find_saved_model(run.parent)
    with pytest.raises(ConfigError, match=rf"does not exist[\s\S]*did you mean '{run}'"):
        find_saved_model(run.with_name("rnu"))
    young = tmp_path / "young"
    young.mkdir()
    (young / "run.yaml").touch()
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        find_saved_model(young)


def test_another_tokenizer_is_refused(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    CharTokenizer("abc").save(folder / "tokenizer.json")
    with pytest.raises(ConfigError, match="not the tokenizer"):
        find_saved_model(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="not a tokenizer that can be read"):
        find_saved_model(folder)


@pytest.mark.parametrize("lost", ["other name", "half"])
def test_missing_weights_are_told(lost: str, run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    state = json.loads((folder / "checkpoints" / "step_0000004" / "run_state.json").read_text())
    partial = prepare_partial(folder / "checkpoints", 5)
    tensors = {"weight:0:embedding.tokens.weight" if lost == "half" else "weight:0:w": torch.zeros(8)}
    commit(partial, 5, state, [write_shard(partial, ALONE.rank, tensors)])
    with pytest.raises(
        ConfigError,
        match="lacks elements 8 to" if lost == "half" else "there is no parameter 'embedding.tokens.weight'",
    ):
        find_saved_model(folder).load()


def test_a_run_of_an_unknown_version_is_told(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    state = json.loads((folder / "checkpoints" / "step_0000004" / "run_state.json").read_text())
    state["facts"]["model"]["experts"] = 8
    partial = prepare_partial(folder / "checkpoints", 5)
    commit(partial, 5, state, [])
    with pytest.raises(ConfigError, match=r"model\.experts"):
        find_saved_model(folder)


def test_it_needs_neither_deepspeed_nor_more_memory_than_the_weights(run: Path, tmp_path: Path) -> None:
    """120 MiB of weights, saved with two moments: what the process has of its own grows by little more than the weights.

    Pages of the mapped files do not count: the kernel takes them back when it needs them.
    """
    folder = shutil.copytree(run, tmp_path / "run")
    state = json.loads((folder / "checkpoints" / "step_0000004" / "run_state.json").read_text())
    state["facts"]["model"] |= {"width": 512, "layers": 10, "ffn_width": 2048}
    model = GPT(ModelConfig.model_validate(state["facts"]["model"]))
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    tensors = {
        f"{kind}:0:{name}": p.detach().flatten().clone() for name, p in model.named_parameters() for kind in kinds
    }
    partial = prepare_partial(folder / "checkpoints", 5)
    commit(partial, 5, state, [write_shard(partial, 0, tensors)])
    weights = sum(parameter.numel() for parameter in model.parameters()) * 4
    code = f"""
import sys
from ds_gpt.checkpoint import initial, saved_model
def own(): return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1])
class Watched(initial.ShardReader):
    def read(self, *arguments):
        result = super().read(*arguments)
        seen.append(own())
        return result
initial.ShardReader, seen = Watched, []
saved_model.find_saved_model({str(run)!r}).load()
before = own()
model = saved_model.find_saved_model({str(folder)!r}).load()
print(max(seen + [own()]) - before, bool({{"deepspeed", "torch._dynamo"}} & set(sys.modules)))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert result.returncode == 0, result.stderr
    grown, heavy = result.stdout.split()
    assert weights > 120 * MIB and heavy == "False"
    assert 0.9 * weights < int(grown) < 1.2 * weights
