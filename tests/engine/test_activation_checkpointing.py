"""Activation checkpointing changes memory and time, and nothing else."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from test_defects import whole_weights
from tiny import VOCABULARY, tiny, tiny_loader
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_gpt.config import Composed
from ds_gpt.engine import activation_checkpointing
from ds_gpt.engine.activation_checkpointing import apply_checkpointing
from ds_gpt.model.gpt import GPT

OFF = "null"
POLICIES = ("{policy: full}", "{policy: selective}")
DEEPSPEEDS_OWN = (
    "{partition_activations: true}",
    "{partition_activations: true, cpu_checkpointing: true}",
    "{partition_activations: true, contiguous_memory_optimization: true, number_checkpoints: 2}",
)


# ---- The same numbers, bit for bit ------------------------------------------------------------------------------------


def trained(ranks: Any, cases: list[Composed]) -> list[Any]:
    """Results of some steps, an evaluation and the weights at the end, of each case."""
    from ds_gpt.engine.engine import Engine

    found = []
    for composed in cases:
        engine = Engine(composed, ranks)
        loader = tiny_loader(composed, ranks.rank, ranks.world_size)
        steps = [engine.step(step, loader.load(step), 0.02) for step in range(4)]
        loss = engine.evaluate(loader.load(9))
        weights = [weight.flatten().tolist() for weight in whole_weights(engine.model)]
        loader.close()
        engine.close()
        found.append((steps, loss, weights))
    return found


@pytest.mark.parametrize(
    ("file", "settings", "policies"),
    [
        ("zero0", [], POLICIES + DEEPSPEEDS_OWN[:1]),
        ("zero2", ["gradient_accumulation_steps=2"], POLICIES + DEEPSPEEDS_OWN),
        ("zero3", [], POLICIES + DEEPSPEEDS_OWN[:1]),
        ("zero1", ["bf16.enabled=true"], POLICIES + DEEPSPEEDS_OWN[:1]),
        ("zero2_offload", [], POLICIES),
    ],
)
def test_every_policy_trains_alike_under_dropout(file: str, settings: list[str], policies: tuple[str, ...]) -> None:
    cases = [tiny(file, 2, ["model.dropout=0.1", *settings, f"activation_checkpointing={policy}"]) for policy in (OFF, *policies)]
    off, *checkpointed = run_ranks(2, trained, cases)[0]
    assert off[0][0].loss != off[1], "training and evaluation should differ by dropout"
    for policy, (steps, loss, weights) in zip(policies, checkpointed, strict=True):
        assert (steps, loss) == off[:2], policy
        assert weights == off[2], policy


# ---- Less memory --------------------------------------------------------------------------------------------------------


def id_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Made(TorchDispatchMode):
    """The storages of all tensors made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id_of(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id_of(tensor) not in given:  # else a view
                storage = tensor.untyped_storage()
                self._storages[id_of(tensor)] = (StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def alive_bytes(self) -> int:
        return sum(size for storage, size in self._storages.values() if not storage.expired())


def checkpointed(policy: str, layers: int, dropout: float) -> tuple[GPT, Tensor]:
    composed = tiny("zero1", 1, [f"activation_checkpointing={policy}", f"model.layers={layers}", f"model.dropout={dropout}"])
    torch.manual_seed(1)
    model = GPT(composed.run.model)
    apply_checkpointing(model, composed)
    return model, torch.randint(VOCABULARY, (3, 16))


def bytes_a_layer(policy: str, dropout: float) -> int:
    """What one more block adds to the memory between forward and backward pass."""
    kept = []
    for layers in (2, 3):
        model, tokens_BT = checkpointed(policy, layers, dropout)
        with Made() as made:
            loss = model(tokens_BT).sum()
        kept.append(made.alive_bytes)
        del loss
    return kept[1] - kept[0]


B, T, D, H = 3, 16, 32, 4
STREAM = 4 * B * T * D  # bytes of one residual stream


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_full_keeps_the_input_of_a_block_and_no_more(dropout: float) -> None:
    assert bytes_a_layer("{policy: full}", dropout) == STREAM


def test_selective_keeps_the_results_of_matrix_multiplications_and_attention() -> None:
    # The input; queries, keys and values, 3; what attention returns; `out`; `up`, 4; `down`.
    matrices = STREAM * (1 + 3 + 1 + 4 + 1)
    mixture_and_log_sum_exp = STREAM + 4 * B * T * H
    assert bytes_a_layer("{policy: selective}", 0.0) == matrices + mixture_and_log_sum_exp
    assert bytes_a_layer("{policy: selective}", 0.1) == matrices


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_off_keeps_most(dropout: float) -> None:
    assert bytes_a_layer(OFF, dropout) > 1.4 * bytes_a_layer("{policy: selective}", dropout)


# ---- What is computed again ---------------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """How often each operation is called."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


LAYERS = 2


def calls(policy: str, dropout: float) -> tuple[Counter[str], Counter[str]]:
    """Operations of the forward and of the backward pass."""
    model, tokens_BT = checkpointed(policy, LAYERS, dropout)
    with Calls() as forward:
        loss = model(tokens_BT).sum()
    with Calls() as backward:
        loss.backward()
    return forward.count, backward.count


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def test_selective_computes_norms_and_gelu_again_and_no_matrix_multiplication() -> None:
    forward, off = calls(OFF, 0.0)
    _, selective = calls("{policy: selective}", 0.0)
    _, full = calls("{policy: full}", 0.0)
    assert forward["addmm"] == 4 * LAYERS and forward[ATTENTION] == LAYERS, "the model calls other operations than this test counts"
    assert off["addmm"] == off[ATTENTION] == off["gelu"] == 0
    assert selective["addmm"] == selective[ATTENTION] == 0 and selective["mm"] == off["mm"]
    assert selective["gelu"] == LAYERS and selective["native_layer_norm"] == 2 * LAYERS
    assert full[ATTENTION] == full["gelu"] == LAYERS and 3 * LAYERS <= full["addmm"] <= 4 * LAYERS


def test_attention_with_dropout_is_computed_again() -> None:
    forward, _ = calls("{policy: selective}", 0.1)
    _, off = calls(OFF, 0.1)
    _, selective = calls("{policy: selective}", 0.1)
    # On a CPU it is then unfused: two products, a softmax and a dropout of the attention map.
    assert forward["bmm"] == 2 * LAYERS and forward[ATTENTION] == 0
    assert selective["_safe_softmax"] == LAYERS and selective["bmm"] == off["bmm"] + 2 * LAYERS
    assert selective["addmm"] == 0 and selective["mm"] == off["mm"]


@pytest.mark.parametrize("op", activation_checkpointing._ATTENTION_DROPOUT_ARGUMENT, ids=str)
def test_a_fused_attention_kernel_is_kept_without_dropout_only(op: Any) -> None:
    """GPU kernels too: their signatures are known on every machine."""
    position = activation_checkpointing._ATTENTION_DROPOUT_ARGUMENT[op]
    assert op._schema.arguments[position].name == "dropout_p"
    for dropout, kept in ((0.0, True), (0.1, False)):
        before = [None] * position
        for args, kwargs in (((*before, dropout), {}), (tuple(before), {"dropout_p": dropout})):
            assert (activation_checkpointing._keep(None, op, *args, **kwargs).name == "MUST_SAVE") is kept
    assert activation_checkpointing._keep(None, op, *[None] * position).name == "MUST_SAVE"  # the default is no dropout


def test_off_leaves_the_models_own_call() -> None:
    from ds_gpt.model import gpt

    model, _ = checkpointed(OFF, 1, 0.0)
    assert model.run_block is gpt.run_block
