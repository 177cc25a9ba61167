"""The planner against runs that others published, and against the plain PyTorch that one of them was."""

from __future__ import annotations

import csv
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from benchmarks.planner import FIRST_STEP_GIB, GOALS, REFERENCE, SCALING_GOAL, held_out, left_out, median_and_p90, memory_held_out, published, scaling
from benchmarks.planner_report import report
from ds_gpt.config import ModelConfig
from ds_gpt.engine.allocations import Allocations
from ds_gpt.planner.devices import GIB
from ds_gpt.planner.memory import memory_of
from ds_gpt.planner.search import CACHED, judge
from ds_gpt.planner.speed import RANGE, speed_of

RUNS = published()
THE_1B = next(run for run in RUNS if run.family == "plain ddp")


def test_every_row_of_the_collection_is_used_or_left_out_with_a_reason() -> None:
    assert len(RUNS) + len(left_out()) == 202 + 1 + 66 + 49  # and the 1.011B run; and runs on one GPU and on more, with what came with them
    assert all(row["reason"] for row in left_out())
    with (REFERENCE / "published_runs.csv").open(newline="") as file:
        assert all(row["source"] for row in csv.DictReader(file))


def test_every_run_that_ran_fits() -> None:
    assert [run.name for run in RUNS if not judge("", (), run.shapes, run.device).fits] == []


def test_memory_is_met_by_a_constant_that_the_rows_have_not_shaped() -> None:
    found, shares = memory_held_out()
    # What PyTorch 1.6 to 1.8 kept on cards of 16 GB is no constant share: there the goal is missed, and the report says so.
    median, p90 = median_and_p90(error for run, error in found if not run.on_v100)
    assert len(found) > 40 and median < GOALS["memory"][0] and p90 < GOALS["memory"][1]
    alone = [abs(error) for run, error in found if run.family == "megatron 2021" and run.shapes.tensor == 1]
    assert len(alone) == 7 and max(alone) < 0.12  # but for tensor parallelism of that time, and DeepSpeed 0.3
    assert shares == pytest.approx([CACHED, CACHED], abs=0.02)
    exact = [error for run, error in found if run.measured.startswith("allocated")]  # nothing is fitted to these at all
    assert len(exact) > 5 and max(map(abs, exact)) < 0.05


def test_throughput_is_met_by_constants_that_the_rows_have_not_shaped() -> None:
    held, _ = held_out()
    median, p90 = median_and_p90(error for _, error in held)
    assert len(held) > 130 and median < GOALS["throughput"][0] and p90 < GOALS["throughput"][1]
    within = sum(RANGE[0] <= 1 + error <= RANGE[1] for _, error in held)
    assert within / len(held) > 0.9  # what the stated range says of itself


def test_the_1b_run() -> None:
    assert THE_1B.peak_bytes
    peak = THE_1B.memory().peak
    assert peak.bytes == pytest.approx(THE_1B.peak_bytes, rel=0.05)
    assert (peak.bytes - peak.kinds["moments"]) / GIB == pytest.approx(FIRST_STEP_GIB, rel=0.05)
    assert speed_of(THE_1B.shapes, THE_1B.device).step_s == pytest.approx(2.249, rel=0.10)


def test_scaling_from_1_to_8_gpus_is_met_by_most_pairs() -> None:
    pairs = [pair for pair in scaling(RUNS) if pair.reach == "from 1 to 8 GPUs"]
    assert len(pairs) == 11 and median_and_p90(pair.miss for pair in pairs)[0] < 0.01
    missed = [(pair.few.family, pair.few.shapes.stage) for pair in pairs if pair.miss > SCALING_GOAL]
    assert missed == [("megatron fp32", 0), ("deepspeed 2020", 2)]
    in_a_node = [pair for pair in scaling(RUNS) if pair.reach == "otherwise in a node"]
    assert len(in_a_node) == 6 and all(pair.miss < SCALING_GOAL for pair in in_a_node)


class Cast(nn.Linear):
    """A linear map as CUDA's autocast runs it: both sides in bf16; `casts` is its cache of weights, kept while its context is open."""

    casts: dict[Tensor, Tensor]

    def forward(self, x_BTD: Tensor) -> Tensor:
        cast = [self.casts.setdefault(each, each.to(torch.bfloat16)) for each in (self.weight, self.bias)]
        return F.linear(x_BTD.to(torch.bfloat16), *cast)


def dropout(x: Tensor, p: float = 0.1) -> Tensor:
    return torch.native_dropout(x, p, True)[0]  # a mask of one byte an element, as on CUDA


class PlainBlock(nn.Module):
    """The block of the published run, attention written out; softmax in fp32, as autocast has it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.hidden_width
        self.heads = config.heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out, self.up, self.down = Cast(width, 3 * width), Cast(width, width), Cast(width, hidden), Cast(hidden, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = self.qkv(self.norms[0](x_BTD)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        future_TT = torch.ones(x_BTD.shape[1], x_BTD.shape[1], dtype=torch.bool).triu(1)
        a_BHTT = q_BHTK @ k_BHTK.transpose(-2, -1) / math.sqrt(q_BHTK.shape[-1])  # scores, and under one name what is made of them:
        a_BHTT = a_BHTT.masked_fill(future_TT, -torch.inf)  # a second name would keep them for the length of the block
        a_BHTT = dropout(a_BHTT.float().softmax(-1))
        y_BTD = (a_BHTT.to(torch.bfloat16) @ v_BHTK).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + dropout(self.out(y_BTD))
        return x_BTD + dropout(self.down(F.gelu(self.up(self.norms[1](x_BTD)))))


def traced_peak(config: ModelConfig, micro_batch: int) -> int:
    """Bytes at the peak of plain DistributedDataParallel's first backward pass, before there is an optimizer: nothing of ds_gpt runs."""
    with FakeTensorMode():
        allocations = Allocations()
        Cast.casts = {}
        with allocations:
            blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.layers))
            tokens, positions = nn.Embedding(config.vocabulary, config.width), nn.Embedding(config.context, config.width)
            modules = nn.ModuleList([blocks, tokens, positions, norm := nn.LayerNorm(config.width)])
            buckets = torch.empty(sum(parameter.numel() for parameter in modules.parameters()))
            ids_BT = torch.zeros(micro_batch, config.context, dtype=torch.int64)
            x_BTD = dropout(tokens(ids_BT) + positions(torch.arange(config.context)))
            for block in blocks:
                x_BTD = checkpoint(block, x_BTD, use_reentrant=False)
            logits_BTV = F.linear(norm(x_BTD).to(torch.bfloat16), tokens.weight.to(torch.bfloat16))
            F.cross_entropy(logits_BTV.float().flatten(end_dim=1), ids_BT.flatten()).backward()
            allocations.mark("step")
        assert buckets.numel()
        return next(allocations.phases())[0].peak_bytes


@pytest.mark.parametrize(
    ("config", "micro_batch"),
    [
        (ModelConfig(layers=20, width=2048, heads=16, context=2048, vocab_size=65, dropout=0.1), 8),
        (ModelConfig(layers=8, width=1024, heads=16, context=1024, vocab_size=65, dropout=0.1), 8),
    ],
)
def test_its_formula_is_what_plain_pytorch_allocates(config: ModelConfig, micro_batch: int) -> None:
    planned = memory_of(replace(THE_1B.shapes, model=config, micro_batch=micro_batch)).peak
    assert planned.bytes - planned.kinds["moments"] == pytest.approx(traced_peak(config, micro_batch), rel=0.02)


def test_the_report_says_all_of_it() -> None:
    text = "\n".join(report(rows=True))
    for said in ("goal 6%", "goal 10%", "217 of 217 are predicted to fit", "published 2,249 ms", "Left out: 101 rows", "11 pairs, 9 within 3 points", "mixture of experts: GPT-1.3B+MoE-128"):
        assert said in text
    assert all(run.name in text for run in RUNS)
