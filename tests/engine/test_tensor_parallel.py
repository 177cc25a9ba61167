"""What each tensor-parallel rank holds, and that the ranks of a group act as one."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked_ranks import run_ranks
from measured_ranks import measured
from tiny import tiny, tiny_loader, whole_batch

from ds_gpt.config import Composed
from ds_gpt.engine import tensor_parallel
from ds_gpt.engine.tensor_parallel import _attend_apart, _DropoutApart
from ds_gpt.generation.decoding import generate
from ds_gpt.generation.options import Sampling
from ds_gpt.model.attention import attend
from ds_gpt.model.counts import parameters
from ds_gpt.model.gpt import GPT

TENSOR, PIPELINE = "parallel.tensor=2", "parallel.pipeline=2"
MODERN = ("model.positions=rotary", "model.ffn=swiglu", "model.kv_heads=2", "model.qk_norm=true", "model.sliding_window=7")
LR = 0.01


def drawn(composed: Composed) -> GPT:
    """The model of one process as it starts."""
    torch.manual_seed(composed.run.seed)
    return GPT(composed.run.model)


# ---- What is skipped on one rank is skipped on all -------------------------------------------------------------------

CUT, COPIED = "blocks.0.attention.qkv.weight", "norm.weight"


def poisoned(ranks: Any, cases: list[tuple[Composed, str]]) -> list[tuple[str, list[bool], bool]]:
    """The optimizer's type, which of three steps were applied, and whether the weights stayed finite; the second step
    has NaN in the gradient of one parameter on the last rank."""
    from ds_gpt.engine.engine import Engine

    found = []
    for composed, name in cases:
        engine, armed = Engine(composed, ranks), False
        loader = tiny_loader(composed, engine.grid.data_rank, engine.grid.data_ranks)

        def harm(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * float("nan") if armed and ranks.rank == ranks.world_size - 1 else gradient

        if name in (here := dict(engine.model.named_parameters())):  # not on another stage
            here[name].register_hook(harm)
        applied = []
        for step in range(3):
            armed = step == 1
            applied.append(engine.step(step, loader.load(step), LR).applied)
        finite = all(bool(parameter.isfinite().all()) for parameter in engine.model.parameters())
        found.append((type(engine.deepspeed.optimizer).__name__, applied, finite))
        loader.close()
        engine.close()
    return found


def test_nan_on_one_rank_is_skipped_by_all() -> None:
    settings = [(f"zero{stage}", bf16) for stage in (0, 1, 2) for bf16 in ("false", "true")]
    runs = [tiny(name, 2, [TENSOR, f"bf16.enabled={bf16}"]) for name, bf16 in settings]
    runs += [tiny("zero2_offload", 2, [TENSOR]), tiny("fp16", 2, [TENSOR, "fp16.initial_scale_power=10"])]
    cases = [(run, where) for run in runs for where in (CUT, COPIED)]
    for found in run_ranks(2, poisoned, cases):
        assert {kind for kind, _, _ in found} == {"AdamW", "FP16_UnfusedOptimizer", "BF16_Optimizer", "DeepSpeedZeroOptimizer"}
        for case, (_, applied, finite) in zip(cases, found, strict=True):
            assert applied == [True, False, True] and finite, (case[0].zero_stage, case[0].precision, case[1])


def test_nan_on_one_rank_is_skipped_on_all_stages() -> None:
    cases = [
        (tiny(name, 4, [TENSOR, PIPELINE, f"bf16.enabled={bf16}"]), where)
        for name, bf16 in (("zero0", "false"), ("zero0", "true"), ("zero1", "false"), ("zero1", "true"))
        for where in (CUT.replace("blocks.0", "blocks.1"), COPIED)
    ]
    for found in run_ranks(4, poisoned, cases):
        assert [(applied, finite) for _, applied, finite in found] == [([True, False, True], True)] * len(cases)


# ---- Bytes -----------------------------------------------------------------------------------------------------------

WIDE = ("model.width=256", "model.context=64", "batch.micro_batch_size=4", "batch.global_batch_size=4")


def held(tensor: int, options: tuple[str, ...] = ()) -> Composed:
    return tiny("zero0", tensor, [*WIDE, *options, f"parallel.tensor={tensor}"])


@pytest.mark.parametrize("options", [(), (*MODERN, "model.bias=false", "model.tied_head=false")], ids=["gpt2", "modern"])
def test_bytes_fall_as_the_arithmetic_says(options: tuple[str, ...]) -> None:
    (alone,), shared = (run_ranks(tensor, measured, held(tensor, options)) for tensor in (1, 2))
    model = drawn(held(1, options))
    cut = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if name.startswith("blocks.") and (parameter.ndim == 2 or name.endswith(("qkv.bias", "up.bias")))
    )
    live = [{phase.name: phase.bytes for phase in trace.phases} for trace in (alone, *shared)]  # at each phase's end
    gradients, kept = ([each[phase] - each["between steps"] for each in live] for phase in ("backward", "forward"))
    assert gradients[0] == pytest.approx(4 * parameters(model.config), rel=0.01)
    for rank, trace in enumerate(shared, start=1):
        assert alone.resident["weights"] - trace.resident["weights"] == 4 * cut / 2
        assert alone.resident["moments"] - trace.resident["moments"] == 2 * 4 * cut / 2
        assert gradients[0] - gradients[rank] == 4 * cut / 2
        # Twice a block and pass, the stream; beside it some numbers: norms of the gradient, the loss, gains of qk_norm.
        stream = 4 * 4 * model.config.context * model.config.width
        assert trace.collectives["allreduce"] == pytest.approx(model.config.layers * 2 * 2 * stream, abs=3000)
        if not options:
            # What a block keeps of a token for its backward pass, in fp32: of all heads queries, keys, values, mixtures
            # and the softmax's sums, and what goes into GELU and comes out. The stream and the logits are not cut.
            tokens, heads = 4 * model.config.context, model.config.heads
            in_blocks = model.config.layers * tokens * 4 * (4 * model.config.width + heads + 2 * model.config.hidden_width)
            assert kept[0] - kept[rank] == in_blocks / 2


# ---- Dropout ---------------------------------------------------------------------------------------------------------


def dropped(ranks: Any, cases: list[Composed]) -> dict[str, Any]:
    """Curves; and of the last engine, what attention and an adapter make of equal inputs, and the next random number."""
    from ds_gpt.engine.engine import Engine

    curves = []
    for composed in cases:
        engine = Engine(composed, ranks)
        loader = tiny_loader(composed, engine.grid.data_rank, engine.grid.data_ranks)
        curves.append([(result.loss, result.grad_norm) for result in (engine.step(n, loader.load(n), LR) for n in range(3))])
        loader.close()
        attention, up = engine.model.blocks[0].attention, engine.model.blocks[0].feed_forward.up
        torch.manual_seed(3)
        heads = [torch.randn(2, 2, 16, 8) for _ in range(3)]
        found = {"heads": attention.attend(*heads, 0.5).tolist(), "out": attention.out.dropout(torch.ones(64)).tolist()}
        found |= {"up": up.dropout(torch.ones(64)).tolist(), "stream": torch.rand(()).item()}
        engine.close()
    return {"curves": curves, **found}


def test_what_is_cut_is_dropped_apart_and_the_stream_alike() -> None:
    settings = [TENSOR, "model.dropout=0.3", "lora.rank=4", "lora.dropout=0.5", "lora.targets=[qkv, out, up, down]"]
    policies = ("null", "{policy: full}", "{policy: selective}")
    cases = [tiny("zero1", 2, [*settings, f"activation_checkpointing={policy}"]) for policy in policies]
    first, second = run_ranks(2, dropped, cases)
    assert {name for name in first if first[name] == second[name]} == {"curves", "up", "stream"}
    assert first["curves"][0] == first["curves"][1] == first["curves"][2], "what is computed again drops the same again"


# ---- Evaluation, generation, documents -------------------------------------------------------------------------------

PROMPTS = [[3, 8, 13], [1, 2, 3, 4, 5, 6, 7], [30]]
NEW_TOKENS = 20  # more than the context holds: the window slides


def documents(inputs_BT: torch.Tensor) -> torch.Tensor:
    """Token 0 begins a document."""
    return (inputs_BT == 0).cumsum(dim=1)


def used(ranks: Any, composed: Composed) -> tuple[list[float], list[list[int]]]:
    """Losses of an evaluation, without documents and with, and greedy continuations."""
    from ds_gpt.engine.engine import Engine

    engine = Engine(composed, ranks)
    loader = tiny_loader(composed, engine.grid.data_rank, engine.grid.data_ranks)
    batches = loader.load(0)
    apart = [(inputs_BT, targets_BT, documents(inputs_BT)) for inputs_BT, targets_BT in batches]
    losses = [engine.evaluate(batches), engine.evaluate(apart)]
    with engine.evaluating():
        continued = generate(engine.model, PROMPTS, NEW_TOKENS, Sampling(temperature=0), forward=engine.logits)
    loader.close()
    engine.close()
    return losses, continued


@pytest.mark.parametrize("options", [(), MODERN, (PIPELINE, *MODERN)], ids=["gpt2", "modern", "pipeline"])
def test_evaluation_and_generation_are_those_of_the_whole_model(options: tuple[str, ...]) -> None:
    composed = tiny("zero1", 4, [TENSOR, *options])
    model, (inputs_BT, targets_BT) = drawn(composed).eval(), whole_batch(composed, 0)
    expected = [
        F.cross_entropy(model(inputs_BT, documents_BT=numbers).flatten(0, 1), targets_BT.flatten()).item()
        for numbers in (None, documents(inputs_BT))
    ]
    for losses, continued in run_ranks(4, used, composed):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert continued == generate(model, PROMPTS, NEW_TOKENS, Sampling(temperature=0))


def test_own_dropout_is_no_surprise_to_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is drawn outside of the compiled graphs, the same as without compiler, and no warning is printed for it."""
    drop, q_BHTK = _DropoutApart(0.5, 1), torch.randn(1, 2, 8, 4)
    monkeypatch.setattr(tensor_parallel, "_drawn_apart", tensor_parallel._drawn_apart)  # put back at the end
    tensor_parallel._end_graphs_for_dropout()

    def both(x_BHTK: torch.Tensor) -> torch.Tensor:
        return drop(_attend_apart(attend, 1, x_BHTK, x_BHTK, x_BHTK, 0.5)) + torch.rand(())

    said: list[logging.LogRecord] = []
    compiler = logging.getLogger("torch._dynamo")  # PyTorch lets nothing through to the root
    handler = logging.Handler(logging.WARNING)
    monkeypatch.setattr(handler, "emit", said.append)
    monkeypatch.setattr(compiler, "handlers", [*compiler.handlers, handler])
    results = []
    for function in (both, torch.compile(both, backend="eager")):
        torch.manual_seed(3)
        results.append(function(q_BHTK))
    assert torch.equal(*results) and (results[0] != 0).any()
    assert said == []
