"""A run goes on at other degrees of parallelism than it was saved at, and bit for bit at the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from saving import build, load_and_train, steps, train_and_save
from tiny import tiny

from ds_gpt.checkpoint.adapter import WEIGHTS, write_adapter
from ds_gpt.checkpoint.shards import ShardReader, piece_key, snapshot, write_shard
from ds_gpt.engine.state import Columns, Piece
from ds_gpt.model.counts import parameters

# fp32 sums in another order, as in tests/parity.
FP32_TOLERANCE = 1e-5

TENSOR, PIPELINE, SEQUENCE = ("parallel.tensor=2",), ("parallel.pipeline=2",), ("parallel.sequence=2",)
OPTIONS = ("model.ffn=swiglu", "model.qk_norm=true", "model.tied_head=false", "gradient_clipping=0.75")
LORA = ("lora.rank=4", "lora.alpha=8", "lora.targets=[qkv, out, up, down]")

Case = tuple[int, str, tuple[str, ...]]  # ranks, DeepSpeed config, settings


def checkpoint(folder: Path) -> Path:
    return folder / "step_0000004"


def saved_elements(folder: Path) -> int:
    """Elements in all files of a checkpoint, kind by kind added up."""
    total = 0
    for path in checkpoint(folder).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            total += sum(file.get_slice(key).get_shape()[0] for key in file.keys())
    return total


@pytest.mark.parametrize("world_size", [2, 4])
def test_resume_is_exact_at_the_same_degrees(world_size: int, tmp_path: Path) -> None:
    hard = [*TENSOR, *OPTIONS, "gradient_accumulation_steps=2", "model.dropout=0.1"]
    ways = {
        2: [("zero0", ()), ("zero1", ("bf16.enabled=true",)), ("zero1", LORA)],
        4: [("zero1", ()), ("zero2", ()), ("zero0", PIPELINE), ("zero1", PIPELINE)],
    }
    cases = [(name, [*hard, *more], tmp_path / f"{name} {more}") for name, more in ways[world_size]]
    never_stopped = run_ranks(world_size, train_and_save, cases, 4, 7)
    assert never_stopped == run_ranks(world_size, load_and_train, cases, 7)
    whole = 3 * parameters(tiny("zero1", 1, OPTIONS).run.model)  # weights and two moments, each element once
    assert {saved_elements(folder) for _, settings, folder in cases if LORA[0] not in settings} == {whole}


SOURCES: dict[str, Case] = {
    "alone": (1, "zero1", OPTIONS),
    "data 4": (4, "zero2", OPTIONS),
    "tensor 2": (2, "zero0", OPTIONS + TENSOR),
    "tensor 2 x data 2": (4, "zero1", OPTIONS + TENSOR),
    "sequence 2": (2, "zero3", OPTIONS + SEQUENCE),
    "tensor 2 x sequence 2": (4, "zero2", OPTIONS + TENSOR + SEQUENCE),
}
TARGETS: dict[str, tuple[Case, tuple[str, ...]]] = {
    "alone": ((1, "zero0", OPTIONS), ("tensor 2", "sequence 2", "tensor 2 x sequence 2")),
    "data 2": ((2, "zero0", OPTIONS), ("sequence 2",)),
    "data 4": ((4, "zero3", OPTIONS), ("tensor 2 x data 2", "sequence 2")),
    "tensor 2": ((2, "zero2", OPTIONS + TENSOR), ("alone", "tensor 2 x data 2")),
    "tensor 2 x data 2": ((4, "zero2", OPTIONS + TENSOR), ("data 4",)),
    "sequence 2": ((2, "zero1", OPTIONS + SEQUENCE), ("alone", "tensor 2 x sequence 2")),
    "tensor 2 x sequence 2": ((4, "zero1", OPTIONS + TENSOR + SEQUENCE), ("tensor 2", "sequence 2")),
    "tensor 4": ((4, "zero1", (*OPTIONS, "parallel.tensor=4")), ("tensor 2 x data 2",)),
}


def test_resume_at_any_degrees(tmp_path: Path) -> None:
    curves = {}
    for name, (ranks, deepspeed, settings) in SOURCES.items():
        ((curves[name], _),) = run_ranks(ranks, train_and_save, [(deepspeed, [*settings], tmp_path / name)], 4, 7)[0]
    for name, ((ranks, deepspeed, settings), sources) in TARGETS.items():
        cases = [(deepspeed, [*settings], tmp_path / source) for source in sources]
        for source, (curve, _) in zip(sources, run_ranks(ranks, load_and_train, cases, 7)[0], strict=True):
            wanted = torch.tensor(curves[source])
            torch.testing.assert_close(torch.tensor(curve), wanted, rtol=FP32_TOLERANCE, atol=0, msg=f"{source} -> {name}")


def leg(ranks: Any, deepspeed: str, settings: tuple[str, ...], folder: Path, first: int, last: int) -> list[tuple[float, float]]:
    """Go on from step `first`, and save at `last`."""
    from ds_gpt.checkpoint.resume import load, newest_intact
    from ds_gpt.checkpoint.run_state import RunState
    from ds_gpt.checkpoint.saver import Saver
    from ds_gpt.config.run import CheckpointsConfig

    engine, loader = build(ranks, deepspeed, [*settings])
    if first:
        assert load(engine, newest_intact(folder, ranks, lambda text: None)).state.step == first
    curve = steps(engine, loader, first, last)
    saver = Saver(engine, folder, CheckpointsConfig())
    saver.save(RunState(step=last, data_step=last), {})
    saver.close()
    loader.close()
    engine.close()
    return curve


def test_one_run_through_all_degrees(tmp_path: Path) -> None:
    legs: list[Case] = [
        (4, "zero1", OPTIONS + TENSOR),
        (2, "zero1", OPTIONS + PIPELINE),
        (4, "zero3", OPTIONS),
        (4, "zero1", OPTIONS + TENSOR + PIPELINE),
        (1, "zero0", OPTIONS),
    ]
    found = []
    for number, (ranks, deepspeed, settings) in enumerate(legs):
        found += run_ranks(ranks, leg, deepspeed, settings, tmp_path / "run", 2 * number, 2 * number + 2)[0]
    never_stopped = run_ranks(1, leg, "zero0", OPTIONS, tmp_path / "other", 0, 2 * len(legs))[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(never_stopped), rtol=FP32_TOLERANCE, atol=0)


def test_adapters_of_tensor_parallel_ranks_are_whole_in_the_files(tmp_path: Path) -> None:
    # Adam would make much of gradients that are all but zero; a large alpha makes the most of the small steps of SGD.
    sgd = [*LORA, "optimizer.name=sgd", "lora.alpha=400"]
    cases = [("zero1", [*sgd, *degrees], tmp_path / str(ranks)) for ranks, degrees in ((1, ()), (2, TENSOR))]
    for ranks, case in zip((1, 2), cases, strict=True):
        run_ranks(ranks, train_and_save, [case], 4, 4)
        write_adapter(checkpoint(case[2]), tiny(case[0], ranks, case[1]).run, case[2] / "adapter")
    alone, shared = (load_file(folder / "adapter" / WEIGHTS) for _, _, folder in cases)
    assert max(matrix.abs().max() for name, matrix in alone.items() if "lora_B" in name) > 1e-3, "they should have learned"
    torch.testing.assert_close(shared, alone, rtol=1e-5, atol=1e-7)
    ((curve, _),) = run_ranks(1, load_and_train, [(*cases[0][:2], tmp_path / "2")], 7)[0]
    ((wanted, _),) = run_ranks(2, load_and_train, cases[1:], 7)[0]
    # B is small: B A and (x A) B round apart
    torch.testing.assert_close(torch.tensor(curve), torch.tensor(wanted), rtol=1e-4, atol=0)


def cut_pieces(whole: torch.Tensor, counts: list[int], ends: list[int]) -> list[Piece]:
    """A matrix whose columns are shared out by `counts`, each share's elements cut at `ends`."""
    pieces, first = [], 0
    for share in whole.split(counts, dim=1):
        flat, columns = share.flatten(), Columns(first, share.shape[1], whole.shape[1])
        bounds = [0, *(end for end in ends if end < flat.numel()), flat.numel()]
        for start, end in zip(bounds, bounds[1:]):
            pieces.append(Piece("w", start, {"weight": flat[start:end]}, columns=columns))
        first += share.shape[1]
    return pieces


@pytest.mark.parametrize("counts", [[12], [6, 6], [3, 3, 3, 3]], ids=str)
def test_any_elements_are_read_whatever_columns_were_together(counts: list[int], tmp_path: Path) -> None:
    whole = torch.arange(7.0 * 12).view(7, 12)
    for rank, piece in enumerate(cut_pieces(whole, counts, [5, 17, 26])):
        write_shard(tmp_path, rank, snapshot([piece]))
    with ShardReader(tmp_path) as shards:
        assert shards.numel("w") == 7 * 12
        for columns in (None, *(Columns(first, count, 12) for first, count in ((0, 12), (0, 6), (6, 6), (9, 3), (4, 4)))):
            wanted = (whole if columns is None else whole[:, columns.first : columns.first + columns.count]).flatten()
            for start in range(wanted.numel()):
                for numel in (1, 2, 13, wanted.numel() - start):
                    found = shards.read("w", "weight", start, len(wanted[start : start + numel]), columns)
                    torch.testing.assert_close(found, wanted[start : start + numel], rtol=0, atol=0)


def test_missing_columns_and_elements_are_named(tmp_path: Path) -> None:
    pieces = cut_pieces(torch.zeros(4, 6), [2, 2, 2], [])
    write_shard(tmp_path, 0, snapshot([pieces[0], pieces[2]]))
    with ShardReader(tmp_path) as shards, pytest.raises(ValueError, match="weight of 'w' lacks columns: of 6"):
        shards.read("w", "weight", 0, 24)
    short = Piece("w", 0, {"weight": torch.zeros(5)}, columns=pieces[1].columns)
    write_shard(tmp_path, 1, snapshot([short]))
    with ShardReader(tmp_path) as shards, pytest.raises(ValueError, match="weight of 'w' lacks elements 5 to 7"):
        shards.read("w", "weight", 0, 24)


def test_of_copies_one_is_written() -> None:
    for name in ("a", "b", "c", "d"):
        copies = [Piece(name, 0, {"weight": torch.zeros(2)}, copy, 3) for copy in range(3)]
        assert sorted(len(snapshot([piece])) for piece in copies) == [0, 0, 1]


def test_keys_of_whole_parameters_are_as_they_were() -> None:
    assert piece_key("blocks.0.attention.out.weight", "exp_avg", 64) == "exp_avg:64:blocks.0.attention.out.weight"
