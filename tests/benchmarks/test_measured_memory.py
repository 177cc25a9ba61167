"""Bytes by kind are what ZeRO's arithmetic says, and the clock tells the truth: on real ranks."""

from __future__ import annotations

import functools
import time
from argparse import Namespace
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from tiny import tiny, tiny_loader

from benchmarks.bench import Bench
from benchmarks.breakdown import common, length, memory_by_kind, profiled, seen, time_by_phase, union
from benchmarks.collectives import Collectives
from benchmarks.ledger import Ledger
from ds_gpt.engine.grid import Grid
from ds_gpt.model.counts import block_parameters, parameters

RANKS = 2
# Wide enough that 512 bytes, to which every storage is rounded up, are little against a tensor.
WIDE = ["model.layers=4", "model.width=384", "batch.global_batch_size=4", "batch.micro_batch_size=1"]
WIDE += ["zero_optimization.reduce_bucket_size=200000", "zero_optimization.stage3_prefetch_bucket_size=200000"]
WIDE += ["zero_optimization.stage3_max_live_parameters=400000", "zero_optimization.stage3_max_reuse_distance=400000", "activation_checkpointing=null"]
DELAY_S = 0.05


def bench(ranks: Any, composed: Any, trainer: str = "ds_gpt") -> tuple[Bench, Collectives]:
    from benchmarks.trainers import make

    collectives = Collectives()
    collectives.install()
    grid = Grid(composed.run.parallel, composed.data_ranks, ranks.rank)
    made = Bench(composed, ranks, make(trainer, composed, ranks), tiny_loader(composed, grid.data_rank, grid.data_ranks))
    made.step()
    return made, collectives


def memory_of(ranks: Any, composed: Any) -> dict[str, Any]:
    made, collectives = bench(ranks, composed)
    found: dict[str, Any] = {}
    made.run([(2, memory_by_kind(made, collectives, found))])
    kept_whole = sum(p.ds_numel for p in made.trainee.model.parameters() if getattr(p, "ds_persist", False))
    largest = max(getattr(p, "ds_numel", p.numel()) for p in made.trainee.model.parameters())
    made.close()
    return {**found, "kept_whole": kept_whole, "largest": largest}


@functools.cache
def memory(stage: int, bf16: bool = False) -> tuple[dict[str, Any], int]:
    composed = tiny(f"zero{stage}", RANKS, [*WIDE, *(["bf16.enabled=true"] if bf16 else [])])
    return run_ranks(RANKS, memory_of, composed)[0], parameters(composed.run.model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_by_kind_are_zeros_arithmetic(stage: int) -> None:
    found, count = memory(stage)
    complete, share = found["complete_bytes"], count / RANKS
    # fp32: ZeRO-0 steps the weights themselves; from stage 1 on there are masters beside them. Two moments always.
    assert complete["weights"] == pytest.approx(4 * count if stage < 3 else 4 * (share + found["kept_whole"]), rel=0.01)
    assert complete["optimizer"] == pytest.approx(8 * count if stage == 0 else 12 * share, rel=0.01)
    gradients = 4 * count if stage == 0 else 4 * share
    # In stages 1 and 2 the cut between ranks goes through a parameter, whose gradient both keep whole.
    beside = 4 * found["largest"] if stage in (1, 2) else 0
    assert gradients * 0.99 <= complete["gradients"] <= (gradients + beside) * 1.01


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bytes_by_kind_in_bf16(stage: int) -> None:
    found, count = memory(stage, bf16=True)
    complete, share = found["complete_bytes"], count / RANKS
    assert complete["weights"] == pytest.approx(2 * count if stage < 3 else 2 * (share + found["kept_whole"]), rel=0.01)
    assert complete["optimizer"] == pytest.approx(12 * share, rel=0.01)


def test_each_stage_needs_less_than_the_one_before() -> None:
    peaks = [max(sum(memory(stage)[0]["peak_by_phase_bytes"][phase].values()) for phase in ("forward", "backward")) for stage in range(4)]
    assert peaks[0] > peaks[1] > peaks[2] > peaks[3], peaks


def test_the_ledger_counts_a_storage_once_and_forgets_it_when_it_is_freed() -> None:
    weight = torch.zeros(256, 4)
    ledger = Ledger()
    ledger.add(weight, "weights")
    ledger.phase = "forward"
    with ledger:
        doubled = weight * 2
        doubled.view(4, 256).add_(1)
        assert ledger.held() | {"weights": 4096, "activations": 4096} == ledger.held()
        del doubled
        small = torch.ones(3)
    assert (ledger.held()["activations"], ledger.held()["weights"]) == (512, 4096)  # rounded up
    assert ledger.at_peaks()["forward"]["activations"] == 4096
    del small


def times_of(ranks: Any, composed: Any, trainer: str) -> dict[str, Any]:
    made, collectives = bench(ranks, composed, trainer)
    take, load = made.trainee.step, made.loader.load

    def slow_step(*args: Any) -> tuple[float, float]:
        time.sleep(DELAY_S)
        return take(*args)

    def slow_load(step: int) -> Any:
        time.sleep(2 * DELAY_S)
        return load(step)

    made.trainee.step, made.loader.load = slow_step, slow_load
    seen = [made.step() for _ in range(3)]
    breakdown: dict[str, Any] = {}
    made.run([(3, time_by_phase(made, collectives, breakdown))])
    made.close()
    updates = made.trainee.engine.deepspeed.global_steps if trainer == "ds_gpt" else len(made.steps_s)
    return {"seen": seen, "breakdown": breakdown, "losses": made.losses, "norms": made.grad_norms, "updates": updates, "steps": len(made.steps_s)}


@pytest.mark.parametrize("trainer", ["ds_gpt", "ddp", "fsdp2"])
def test_known_delays_are_reported_and_every_trainer_draws_one_curve(trainer: str) -> None:
    composed = tiny("zero2", RANKS, ["batch.micro_batch_size=4"])
    found = run_ranks(RANKS, times_of, composed, trainer)
    for rank in found:
        for whole, waited in rank["seen"]:
            assert 2 * DELAY_S <= waited < whole - DELAY_S
        assert rank["breakdown"]["step_s"] >= 3 * DELAY_S <= sum(rank["breakdown"]["phases_s"].values()) + rank["breakdown"]["data_wait_s"] + DELAY_S
        assert rank["updates"] == rank["steps"], "accumulation is one step"
    counts = found[0]["breakdown"]["communication"]
    if trainer == "ddp":
        assert counts["all_reduce"]["calls"] == 1, "of the loss; ranks that meet between steps are not counted"
    if trainer != "ddp":  # whose collectives are made in C++
        reduced = sum(count["bytes"] for name, count in counts.items() if "reduce" in name)
        assert reduced >= 4 * parameters(composed.run.model), counts
    assert found[0]["losses"] == pytest.approx(_reference().losses, rel=1e-5)
    assert found[0]["norms"] == pytest.approx(_reference().grad_norms, rel=1e-4)


@pytest.mark.parametrize("degree", ["tensor", "sequence", "pipeline"])
def test_ranks_that_share_a_model_draw_the_same_curve(degree: str) -> None:
    composed = tiny("zero1", RANKS, ["batch.micro_batch_size=4", f"parallel.{degree}=2"])
    for rank in run_ranks(RANKS, times_of, composed, "ds_gpt"):
        assert rank["losses"] == pytest.approx(_reference().losses, rel=1e-5)
        assert rank["norms"] == pytest.approx(_reference().grad_norms, rel=1e-4)
        assert rank["updates"] == rank["steps"]


@pytest.mark.parametrize("degree", ["tensor", "sequence", "pipeline"])
def test_bytes_by_kind_of_ranks_that_share_a_model(degree: str) -> None:
    composed = tiny("zero1", RANKS, [*WIDE, f"parallel.{degree}=2"])
    by_rank = [found["complete_bytes"] for found in run_ranks(RANKS, memory_of, composed)]
    held = [found["weights"] + found["optimizer"] for found in by_rank]
    model, count = composed.run.model, parameters(composed.run.model)
    blocks = model.layers * block_parameters(model)
    # fp32 weights, masters and moments: 4 + 12 bytes a parameter; the twice 12 bytes are shared where the weights are not.
    alone, tied = count - blocks, model.vocabulary * model.width
    expected = {"sequence": RANKS * 4 * count + 12 * count, "tensor": RANKS * 16 * (alone + blocks / 2), "pipeline": 16 * (count + tied)}[degree]
    assert sum(held) == pytest.approx(expected, rel=0.01), (by_rank, expected)


def test_the_clock_stops_when_the_device_is_done() -> None:
    """What a step has only enqueued is in its time, and what the next part of the run does first is not."""

    class Trainee:
        on_phase = staticmethod(lambda name: None)

        def step(self, *args: Any) -> tuple[float, float]:
            return 1.0, 1.0

    class Loader:
        def load(self, step: int) -> list[Any]:
            return []

    class Alone:
        world_size, device = 1, torch.device("cpu")

        def barrier(self) -> None:
            time.sleep(DELAY_S)

    made = Bench(tiny("zero0", 1), Alone(), Trainee(), Loader())
    made.synchronize = lambda: time.sleep(2 * DELAY_S)  # type: ignore[method-assign]
    made.run([(2, nullcontext())])
    assert all(2 * DELAY_S <= seconds < 3 * DELAY_S for seconds in made.steps_s), made.steps_s


def test_spans_are_joined_and_met() -> None:
    assert union([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
    assert common([(0, 4), (5, 7)], [(1, 2), (3, 6), (6.5, 9)]) == [(1, 2), (3, 4), (5, 6), (6.5, 7)]
    assert length(common(union([(0, 10)]), union([]))) == 0


class Kernel:
    """An event of a profile, as a GPU makes it; times in microseconds."""

    def __init__(self, name: str, start: float, end: float, device: str = "DeviceType.CUDA", note: bool = False) -> None:
        self.name, self.device_type, self.is_user_annotation = name, device, note
        self.time_range = Namespace(start=start, end=end)


def test_a_gpus_profile_tells_communication_from_computation() -> None:
    events = [
        Kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, 100),
        Kernel("nccl:all_reduce", 0, 100, note=True),  # the same again, as an annotation
        Kernel("nvjet_tst_128x128", 40, 60),
        Kernel("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>(pytorch_flash::Flash_fwd_params)", 80, 130),
        Kernel("Memcpy HtoD (Pinned -> Device)", 0, 30),
        Kernel("aten::_scaled_dot_product_flash_attention", 0, 5, "DeviceType.CPU"),
        Kernel("aten::_scaled_dot_product_flash_attention_backward", 5, 9, "DeviceType.CPU"),
        Kernel("aten::mm", 0, 90, "DeviceType.CPU"),  # the host's time says nothing of the device's
    ]
    found = seen(events, steps=2)
    assert (found["communication_s"], found["hidden_s"]) == (pytest.approx(50e-6), pytest.approx(20e-6))
    assert found["attention"] == ["_scaled_dot_product_flash_attention"]
    assert len(found["attention_kernels"]) == 1 and "flash_fwd_kernel" in found["attention_kernels"][0]


def overlaps_of(ranks: Any) -> list[tuple[float, float]]:
    """Communication and its hidden part: waited for at once, and with work done meanwhile."""
    big_N, a_DD = torch.ones(8_000_000), torch.randn(512, 512)

    class Trainee:
        on_phase = staticmethod(lambda name: None)

    class Stepping(Bench):
        work_meanwhile = False

        def step(self) -> tuple[float, float]:
            pending = torch.distributed.all_reduce(big_N, async_op=True)
            for _ in range(40 if self.work_meanwhile else 0):
                a_DD @ a_DD
            pending.wait()
            self.stopped(time.perf_counter(), time.process_time(), 0.0)
            return 0.0, 0.0

    made = Stepping(tiny("zero0", RANKS), ranks, Trainee(), loader=None)
    results = []
    for made.work_meanwhile in (False, True):
        found: dict[str, Any] = {}
        made.run([(2, profiled(made, found))])
        results.append((found["communication_s"], found["hidden_s"]))
    return results


def test_communication_that_computation_hides_is_told_from_communication_that_is_waited_for() -> None:
    for (waited, waited_hidden), (worked, worked_hidden) in run_ranks(RANKS, overlaps_of):
        assert 0 < waited and waited_hidden < 0.1 * waited
        assert worked_hidden > 0.3 * worked


class _Reference:
    """The same steps by a bare loop, written here."""

    def __init__(self) -> None:
        from tiny import whole_batch

        from ds_gpt.learning.schedule import schedule
        from ds_gpt.model.gpt import GPT

        composed = tiny("zero0", 1)
        torch.manual_seed(composed.run.seed)
        model = GPT(composed.run.model)
        groups = [{"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
        self.losses, self.grad_norms = [], []
        for step in range(7):
            for group in optimizer.param_groups:
                group["lr"] = schedule(composed.run, 1)(step)
            inputs_BT, targets_BT = whole_batch(composed, step)
            loss = torch.nn.functional.cross_entropy(model(inputs_BT).flatten(0, 1), targets_BT.flatten())
            optimizer.zero_grad()
            loss.backward()
            self.grad_norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            self.losses.append(loss.item())


_reference = functools.cache(_Reference)
