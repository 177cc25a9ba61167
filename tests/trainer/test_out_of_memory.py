"""Out of memory: one text that says what was asked for, what there is, and settings that need less and that compose."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import CONFIGS, VOCABULARY, tiny

from ds_gpt.config import Composed, ConfigError, Hardware, load
from ds_gpt.model.counts import block_parameters, parameters, trained_parameters
from ds_gpt.trainer.out_of_memory import OutOfMemory, Remedy, check_host_memory, explained, explanation, needs, remedies

sys.path.append(str(Path(__file__).parents[1] / "commands"))
from jobs import DEEPSPEED, PLAIN, TRAIN, Ended, ran  # noqa: E402

GIB = 1 << 30
# torch 2.13's own words.
CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.19 GiB is free. Including non-PyTorch memory, "
    "this process has 77.90 GiB memory in use. Of the allocated memory 76.40 GiB is allocated by PyTorch, and 612.00 MiB is reserved by PyTorch but unallocated."
)


def gpt_1b(deepspeed: str, overrides: Iterable[str] = (), ranks: int = 8, kind: str = "cuda") -> Composed:
    name = "NVIDIA A100-SXM4-80GB" if kind == "cuda" else "CPU"
    hardware = Hardware(kind, name, ranks, bf16=kind == "cuda")  # type: ignore[arg-type]
    return load(CONFIGS / "runs" / "gpt_1b.yaml", CONFIGS / f"{deepspeed}.json", hardware, ["model.vocab_size=50257", *overrides])


def settings(found: Iterable[Remedy]) -> list[tuple[str, ...]]:
    return [remedy.settings for remedy in found]


@pytest.mark.parametrize(
    ("deepspeed", "weights", "gradients", "optimizer"),
    [("zero0", 2, 2, 12), ("zero1", 2, 4, 12 / 8), ("zero2", 2, 4 / 8, 12 / 8), ("zero3", 2 / 8, 4 / 8, 12 / 8), ("zero2_offload", 2, 4 / 8, 0), ("zero3_offload", 0, 4 / 8, 0)],
)
def test_bytes_a_parameter_on_eight_gpus_in_bf16(deepspeed: str, weights: float, gradients: float, optimizer: float) -> None:
    """Rajbhandari et al. 2020, section 3.1: 2 + 2 + 12, split as far as the stage does; gradients are accumulated in fp32 where DeepSpeed can."""
    composed = gpt_1b(deepspeed)
    found, count = needs(composed), parameters(composed.run.model)
    assert (found.weights / count, found.gradients / count, found.optimizer / count) == pytest.approx((weights, gradients, optimizer))


@pytest.mark.parametrize(
    ("degrees", "split"),
    [(["parallel.pipeline=4"], 2), (["parallel.tensor=2"], 4), (["parallel.sequence=2"], 8), (["parallel.tensor=2", "parallel.pipeline=2"], 2)],
)
def test_ranks_that_share_the_model_need_their_part(degrees: list[str], split: int) -> None:
    composed = gpt_1b("zero1", degrees)
    run, found = composed.run, needs(composed)
    blocks = run.model.layers * block_parameters(run.model)  # what tensor parallelism shares out
    count = (parameters(run.model) - blocks * (1 - 1 / run.parallel.tensor)) / run.parallel.pipeline
    assert (found.weights / count, found.gradients / count, found.optimizer / count) == pytest.approx((2, 4, 12 / split))
    for remedy in remedies(composed):
        assert needs(gpt_1b("zero1", [*degrees, *remedy.settings])) == remedy.needs


def test_the_first_stage_of_a_pipeline_keeps_as_many_micro_batches_as_there_are_stages() -> None:
    def activations(*settings: str) -> float:
        return needs(gpt_1b("zero1", ["batch.global_batch_size=128", "batch.micro_batch_size=1", "activation_checkpointing=null", *settings])).activations

    assert activations("parallel.pipeline=4") == pytest.approx(activations()), "four micro-batches of a quarter of the layers"
    one = activations("parallel.pipeline=4", "batch.global_batch_size=2")
    assert one < 0.5 * activations()


@pytest.mark.parametrize("ffn", ["gelu", "swiglu"])
def test_tensor_parallel_ranks_keep_their_share_of_heads_and_hidden_values(ffn: str) -> None:
    alone, shared = (gpt_1b("zero1", [f"parallel.tensor={degree}", f"model.ffn={ffn}", "activation_checkpointing=null", "batch.micro_batch_size=2"]) for degree in (1, 2))
    model = alone.run.model
    values = 2 * model.width + 2 * model.key_heads * model.head_width + (4 if ffn == "swiglu" else 2) * model.hidden_width
    assert needs(alone).activations - needs(shared).activations == pytest.approx(2 * 2 * model.context * model.layers * values / 2)


def kept_bytes(composed: Composed) -> int:
    """Bytes of the storages that autograd keeps of a forward pass and its loss, parameters left out."""
    from ds_gpt.engine.activation_checkpointing import apply_checkpointing
    from ds_gpt.learning.loss import cross_entropy_sum
    from ds_gpt.model.gpt import GPT

    model, kept = GPT(composed.run.model), {}
    apply_checkpointing(model, composed)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor too, lest its address is used again
        return tensor

    tokens_BT = torch.zeros(composed.micro_batch_size, composed.run.model.context, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, _ = cross_entropy_sum(model(tokens_BT), tokens_BT)
    return sum(size for size, _ in kept.values()) + int(0 * loss)


@pytest.mark.parametrize("options", [[], ["model.ffn=swiglu", "model.positions=rotary", "model.kv_heads=2"]], ids=["gpt2", "modern"])
@pytest.mark.parametrize("policy", [None, "full"])
def test_activations_are_what_autograd_keeps(policy: str | None, options: list[str]) -> None:
    """The transient part, a recomputed block and two gradients of the size of the logits, is arithmetic alone."""
    overrides = ["model.layers=6", "model.width=64", "model.context=64", "model.vocab_size=64", *options]
    composed = tiny("zero0", 1, [*overrides, *([f"activation_checkpointing.policy={policy}"] if policy else [])])
    model, tokens = composed.run.model, composed.micro_batch_size * 64
    block = 6 * model.width + 2 * model.key_heads * model.head_width + (4 if options else 2) * model.hidden_width
    transient = tokens * 2 * 4 * model.vocabulary + (tokens * 4 * block if policy else 0)
    assert needs(composed).activations - transient == pytest.approx(kept_bytes(composed), rel=0.02)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_weights_have_no_gradients_and_no_state(stage: int) -> None:
    every, adapters = (needs(tiny(f"zero{stage}", 2, settings)) for settings in ((), ("lora.rank=4",)))
    share = trained_parameters(tiny("zero0", 1, ["lora.rank=4"]).run) / parameters(tiny("zero0", 1).run.model)
    assert 0 < share < 0.2 and adapters.weights == every.weights
    assert adapters.gradients == pytest.approx(share * every.gradients)
    assert adapters.optimizer == pytest.approx(share * every.optimizer)
    assert needs(tiny(f"zero{stage}", 2, ["stage=dpo"])).activations > 1.9 * every.activations, "a pair is two sequences"


def test_every_remedy_composes_and_saves_what_it_says() -> None:
    for deepspeed in ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"):
        for kind in ("cuda", "cpu"):
            composed = gpt_1b(deepspeed, kind=kind)
            found = remedies(composed)
            assert len(found) >= 2, deepspeed
            for remedy in found:
                changed = gpt_1b(deepspeed, remedy.settings, kind=kind)
                assert changed.run.batch.global_batch_size == composed.run.batch.global_batch_size
                assert needs(changed) == remedy.needs
                assert remedy.needs.total < needs(composed).total


def test_what_applies_and_in_which_order() -> None:
    flat = [setting for remedy in settings(remedies(gpt_1b("zero1", ["batch.micro_batch_size=8"]))) for setting in remedy]
    assert flat[:4] == ["batch.micro_batch_size=4", "batch.micro_batch_size=2", "batch.micro_batch_size=1", "activation_checkpointing.policy=selective"]
    assert flat[4:7] == ["activation_checkpointing.policy=full", "zero_optimization.stage=2", "zero_optimization.stage=3"]
    assert flat[-1] == "zero_optimization.offload_param.device=cpu"
    full = [setting for remedy in settings(remedies(gpt_1b("zero3_offload", ["batch.micro_batch_size=1"]))) for setting in remedy]
    assert full == [], "nothing is left to set"
    alone = [setting for remedy in settings(remedies(gpt_1b("zero1", ["batch.micro_batch_size=1"], ranks=1, kind="cpu"))) for setting in remedy]
    assert not any("zero_optimization" in setting for setting in alone), "one rank splits nothing, and a CPU offloads to itself"


def test_numbers_that_the_json_states_are_set_there() -> None:
    stated = ["train_micro_batch_size_per_gpu=8", "gradient_accumulation_steps=1", "batch.global_batch_size=64"]
    composed = gpt_1b("zero2", stated)
    first = remedies(composed)[0].settings
    assert first == ("train_micro_batch_size_per_gpu=4", "batch.micro_batch_size=4", "gradient_accumulation_steps=2"), "the YAML of gpt_1b states it too"
    assert gpt_1b("zero2", [*stated, *first]).micro_batch_size == 4


def test_a_global_batch_that_the_json_states_too_is_in_the_way_of_no_remedy() -> None:
    degrees = ["parallel.sequence=2"]  # DeepSpeed is given twice as many sequences, of half the length
    composed = gpt_1b("zero1", degrees)
    stated = gpt_1b("zero1", [*degrees, f"train_batch_size={composed.run.batch.global_batch_size}"])
    assert len(remedies(composed)) > 2 and remedies(stated) == remedies(composed)


def test_what_is_said_on_a_gpu() -> None:
    composed = gpt_1b("zero1", ["batch.micro_batch_size=16", "batch.global_batch_size=128"])
    with pytest.raises(OutOfMemory) as caught, explained(composed, rank=3):
        raise torch.OutOfMemoryError(CUDA)
    text = str(caught.value)
    assert "out of memory on rank 3 of 8 while asking for 2.50 GiB; of 79.10 GiB, 1.19 GiB were free" in text
    assert "in: " in text and "raise torch.OutOfMemoryError" in text
    for kind in ("weights", "gradients", "optimizer", "activations", "together"):
        assert re.search(rf"  {kind} +[\d.]+ GiB", text), kind
    assert text.count("<- the first that should fit") == 1
    (line,) = [line for line in text.splitlines() if "should fit" in line]
    fitting = re.search(r"--set (\S+)", line)
    assert fitting and needs(gpt_1b("zero1", ["batch.micro_batch_size=16", "batch.global_batch_size=128", fitting[1]])).total < 0.92 * 79.10 * GIB


def test_where_nothing_fits_it_is_said() -> None:
    composed = gpt_1b("zero3_offload", ["batch.micro_batch_size=1"])
    assert "nothing that ds_gpt can set would need less" in explanation(composed, 0, torch.OutOfMemoryError(CUDA), peak=70 * GIB)
    large = gpt_1b("zero0", ["model.width=16384", "batch.micro_batch_size=8"])
    assert "none of them alone fits into 79.10 GiB" in explanation(large, 0, torch.OutOfMemoryError(CUDA), peak=70 * GIB)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_other_words_for_it(error: Exception) -> None:
    with pytest.raises(OutOfMemory), explained(tiny("zero1", 1), 0):
        raise error


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"), explained(tiny("zero1", 1), 0):
        raise RuntimeError("the shapes do not match")
    assert VOCABULARY == tiny("zero1", 1).run.model.vocabulary


# For real, on the CPU: a process that may have 4 GB of address space, of which torch and DeepSpeed take two

LIMIT = ("bash", "-c", 'ulimit -v 4000000; exec "$@"', "limited")
SMALL = (
    "model.layers=4", "model.width=256", "model.heads=2", "model.context=512", "training.steps=2", "evaluation.every=2", "evaluation.sequences=8",
    "data.corpus=synthetic", "data.synthetic.tokens=20000", "sample.tokens=0", "logging.tensorboard=false",
)  # fmt: skip


def out_of_memory(folder: Path, launcher: Iterable[object], *overrides: str) -> Ended:
    words = [word for setting in (*SMALL, *overrides) for word in ("--set", setting)]
    ended = ran(folder, *LIMIT, *launcher, TRAIN, *words, "--run-dir", folder / "run", deadline_s=90)
    assert ended.status == 1 and "Traceback" not in ended.err and ended.err.count("out of memory") == 1, ended.err
    return ended


def test_a_batch_that_is_too_large(tmp_path: Path) -> None:
    ended = out_of_memory(tmp_path, PLAIN, "batch.global_batch_size=256")
    assert "ds_gpt/model/" in ended.err and "while asking for" in ended.err
    assert "--set batch.micro_batch_size=128" in ended.err and "--set activation_checkpointing.policy=full" in ended.err


def test_a_model_that_is_too_large(tmp_path: Path) -> None:
    ended = out_of_memory(tmp_path, PLAIN, "model.width=2048", "model.layers=11", "model.context=16")  # 10 GiB of state: a machine holds it
    assert "554," in ended.err and "__init__" in ended.err, "while it was built"


def test_it_is_said_once_under_the_launcher(tmp_path: Path) -> None:
    ended = out_of_memory(tmp_path, (*DEEPSPEED, "--num_gpus", 2), "model.width=64", "batch.global_batch_size=4096")
    assert "on rank 0 of 2" in ended.err and "rank 1:" not in ended.err


def test_a_model_that_a_cpu_machine_cannot_hold_is_refused() -> None:
    composed = replace(tiny("zero2", 8), hardware=Hardware("cpu", "CPU", 8, bf16=False))
    check_host_memory(composed, 8, 24 << 30)
    state_bytes = 8 * parameters(composed.run.model) * (4 + (4 + 4 + 8) / 8)
    check_host_memory(composed, 8, int(state_bytes) + 1)
    with pytest.raises(ConfigError, match="8 ranks of this model need"):
        check_host_memory(composed, 8, int(state_bytes) - 1)
    check_host_memory(replace(composed, hardware=Hardware("cuda", "NVIDIA A100", 8, bf16=True)), 8, 1)
