"""Training state in a form that no ZeRO stage, world size or precision has a say in: parameter by parameter.

Of every parameter there is an fp32 master and, under AdamW, two moments (``exp_avg``, ``exp_avg_sq``). Each stage
keeps them differently: whole on every rank, or flat pieces that ignore where parameters begin. Here a rank names the
pieces that it keeps as (parameter, first element, elements), and any other arrangement can be filled from those. Of a
matrix whose columns tensor parallelism has shared out, the elements are those of the rank's columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ds_gpt.engine.grid import Grid
from ds_gpt.engine.tensor_parallel import Cut, Cuts

WEIGHT = "weight"


@dataclass(frozen=True, order=True)
class Columns:
    """Consecutive columns of a matrix.

    Attributes:
        first: index of the first one.
        count: how many.
        of: columns of the whole matrix.
    """

    first: int
    count: int
    of: int


# (parameter, kind, first element, elements, columns) to these elements, flat, in any floating type; None: never saved.
# Elements are counted in the flattened parameter, or in the flattened matrix of these of its columns.
ReadState = Callable[[str, str, int, int, Columns | None], Tensor | None]


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of one flattened parameter whose master and moments this rank keeps.

    Attributes:
        parameter: the parameter's name in the model.
        start: index of the first element in the flattened parameter, or in its `columns`, flattened.
        tensors: fp32 views, all equally long, by kind: ``weight`` and the optimizer's (``exp_avg``, ...).
        copy: which of the `copies` this is.
        copies: how many ranks keep the same piece.
        columns: that the elements are counted in; None: in the whole parameter.
        second: whether it is of a tied weight's second copy, on another stage of a pipeline, and not to be saved.
    """

    parameter: str
    start: int
    tensors: dict[str, Tensor]
    copy: int = 0
    copies: int = 1
    columns: Columns | None = None
    second: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.tensors[WEIGHT].numel()


def pieces(deepspeed_engine: Any, model: nn.Module, grid: Grid, cuts: Cuts) -> Iterator[Piece]:
    """What this rank keeps, under any ZeRO stage. The optimizer's state is allocated where it was not yet.

    Args:
        deepspeed_engine: the engine.
        model: what it wraps, whose parameters have the names that pieces go by.
        grid: where this rank stands among those that keep the same.
        cuts: the parameters of which it has a share.
    """
    optimizer, base = deepspeed_engine.optimizer, deepspeed_engine.basic_optimizer
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    match type(optimizer).__name__:
        case "DeepSpeedZeroOptimizer_Stage3":
            found = _stage3(optimizer, parameters)
        case "DeepSpeedZeroOptimizer":
            found = _flat_partitions(optimizer.single_partition_of_fp32_groups, parameters)
        case "BF16_Optimizer":
            found = _flat_partitions(optimizer.fp32_groups_flat_partition, parameters)
        case "FP16_UnfusedOptimizer":
            found = _unsharded(_unfused_masters(optimizer), parameters)
        case _:
            assert optimizer is base, f"unknown optimizer {type(optimizer).__name__}"
            found = _unsharded({p: p for _, p in parameters}, parameters)
    by_name = dict(parameters)
    for name, start, owner, offset, numel, replicated in found:
        views = {WEIGHT: owner.detach().reshape(-1)[offset : offset + numel]}
        for kind, value in _state_of(base, owner).items():
            if torch.is_tensor(value) and value.shape == owner.shape:
                views[kind] = value.reshape(-1)[offset : offset + numel]
        start, columns = _place(by_name[name].shape, cuts.get(by_name[name]), start)
        copies = grid.copies(over_data=replicated, over_tensor=by_name[name] not in cuts)
        second = getattr(by_name[name], "ds_pipe_replicated", False)  # DeepSpeed's mark
        yield Piece(name, start, views, *copies, columns, second)


def _place(shape: torch.Size, cut: Cut | None, start: int) -> tuple[int, Columns | None]:
    """Where an element of a rank's share, of this shape, is in the whole parameter."""
    if cut is None:
        return start, None
    if cut.dimension == 0:  # consecutive rows are consecutive elements
        return start + cut.index * prod(shape), None
    return start, Columns(cut.index * shape[1], shape[1], cut.count * shape[1])


# (parameter, first element in it, tensor that the base optimizer steps, offset there, elements, whether data-parallel
# ranks keep the same)
_Found = Iterator[tuple[str, int, Tensor, int, int, bool]]


def _unsharded(masters: dict[Tensor, Tensor], parameters: list[tuple[str, Tensor]]) -> _Found:
    for name, parameter in parameters:
        yield name, 0, masters[parameter], 0, parameter.numel(), True


def _unfused_masters(optimizer: Any) -> dict[Tensor, Tensor]:
    groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return {half: master for halves, masters in groups for half, master in zip(halves, masters, strict=True)}


def _flat_partitions(partitions: list[Tensor], parameters: list[tuple[str, Tensor]]) -> _Found:
    """ZeRO 1 and 2: each optimizer group is one flat tensor, cut evenly among the ranks wherever the cuts fall."""
    for name, parameter in parameters:
        mapping = parameter._hp_mapping
        if mapping is not None:  # None: no element of it fell to this rank
            in_parameter, in_partition = mapping.lp_fragment_address, mapping.hp_fragment_address
            owner = partitions[mapping.param_group_index]
            yield name, in_parameter.start, owner, in_partition.start, in_partition.numel, False


def _stage3(optimizer: Any, parameters: list[tuple[str, Tensor]]) -> _Found:
    """ZeRO 3: each parameter is cut evenly among the ranks, the last piece padded."""
    rank = torch.distributed.get_rank(optimizer.dp_process_group)
    for name, parameter in parameters:
        group, offset, padded = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = rank * padded
        numel = min(padded, parameter.ds_numel - start)
        if numel > 0:
            yield name, start, optimizer.fp32_partitioned_groups_flat[group], offset, numel, False


def _state_of(base: torch.optim.Optimizer, owner: Tensor) -> dict[str, Any]:
    """The base optimizer's state of a tensor that it steps, allocated as its first step would."""
    if isinstance(base, torch.optim.SGD):
        return base.state.get(owner, {})
    state = base.state[owner]
    if "exp_avg" not in state:
        fused = base.param_groups[0].get("fused")
        count = torch.zeros((), dtype=torch.float32, device=owner.device if fused else "cpu")
        state["step"] = count if isinstance(base, torch.optim.AdamW) else 0  # DeepSpeedCPUAdam counts in an int
        state["exp_avg"] = torch.zeros_like(owner, requires_grad=False)
        state["exp_avg_sq"] = torch.zeros_like(owner, requires_grad=False)
    return state


def optimizer_steps(deepspeed_engine: Any) -> int:
    """Updates that the optimizer has applied: skipped steps do not count."""
    for state in deepspeed_engine.basic_optimizer.state.values():
        if "step" in state:
            return int(state["step"])
    return 0


def load_pieces(deepspeed_engine: Any, kept: Iterable[Piece], read: ReadState, steps: int) -> list[str]:
    """Fill every piece that this rank keeps, then bring the model's own weights in line; every rank must call it.

    Args:
        deepspeed_engine: the engine to fill.
        kept: its pieces.
        read: gives the elements of a piece.
        steps: updates that the optimizer had applied.

    Returns:
        Kinds of optimizer state that were not saved and start at zero.
    """
    absent: set[str] = set()
    for piece in kept:
        for kind, view in piece.tensors.items():
            value = read(piece.parameter, kind, piece.start, piece.numel, piece.columns)
            if value is None:
                absent.add(kind)
                view.zero_()
            else:
                view.copy_(value)
    for state in deepspeed_engine.basic_optimizer.state.values():
        if "step" in state:
            state["step"] = torch.full_like(state["step"], steps) if torch.is_tensor(state["step"]) else steps
    _refresh_model(deepspeed_engine.optimizer)
    return sorted(absent)


def _refresh_model(optimizer: Any) -> None:
    """Copy the masters into the weights that the model computes with."""
    match type(optimizer).__name__:
        case "DeepSpeedZeroOptimizer_Stage3":
            for half, master in zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True):
                if half is not master:
                    half.data.copy_(master.data)
            if optimizer.persistent_parameters:  # small ones are kept whole on every rank
                optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
                optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
        case "DeepSpeedZeroOptimizer" | "BF16_Optimizer":
            optimizer.update_lp_params()
        case "FP16_UnfusedOptimizer":
            for half, master in _unfused_masters(optimizer).items():
                half.data.copy_(master.data)


_LOSS_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def loss_scaler_state(deepspeed_engine: Any) -> dict[str, float]:
    """What the dynamic loss scaler of fp16 remembers."""
    scaler = deepspeed_engine.optimizer.loss_scaler
    return {key: getattr(scaler, key) for key in _LOSS_SCALER if hasattr(scaler, key)}


def load_loss_scaler_state(deepspeed_engine: Any, saved: dict[str, float]) -> None:
    """Give the loss scaler of fp16 back what it remembered."""
    for key, value in saved.items():
        setattr(deepspeed_engine.optimizer.loss_scaler, key, value)
