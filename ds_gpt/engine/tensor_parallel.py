"""Tensor parallelism: the matrices of every block, shared out among ranks (Shoeybi et al. 2019, section 3).

What maps into heads and hidden units is cut by its outputs, what maps out of them by its inputs: a rank computes whole
heads and hidden units, and a part of the sum that leaves them. So each half of a block needs one all-reduce in the
forward pass, of its output, and one in the backward pass, of the gradient of its input. Everything else is whole, and
computed alike, on every rank: embedding, head, norms, and the biases that are added to sums.

The layers are DeepSpeed's (AutoTP), put in place of the model's linear maps, which knows nothing of it.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_gpt.engine.grid import Grid
from ds_gpt.model.attention import Attend
from ds_gpt.model.feed_forward import FeedForward
from ds_gpt.model.gpt import GPT, Block
from ds_gpt.model.lora import Adapted

_INTO, _OUT_OF = ("qkv", "gate", "up"), ("out", "down")


@dataclass(frozen=True)
class Cut:
    """Which share of a parameter a rank holds.

    Attributes:
        dimension: that is cut: 0, the outputs, or 1, the inputs.
        index: of the share, 0 to `count` - 1.
        count: number of shares, all equally large.
    """

    dimension: int
    index: int
    count: int


Cuts = dict[Tensor, Cut]  # of the parameters that are cut


def model_parallel_unit(grid: Grid) -> Any:
    """What DeepSpeed asks for its groups of ranks; every rank must call it."""
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid

    with contextlib.redirect_stdout(io.StringIO()):  # it prints the topology
        return PipelineParallelGrid(grid.topology())


def cut(model: GPT, group: torch.distributed.ProcessGroup, compiled: bool) -> Cuts:
    """Keep this rank's share of a whole model, the same on every rank of `group`; every one must call it."""
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, set_autotp_mode

    if compiled:
        _end_graphs_for_dropout()
    set_autotp_mode(training=True)
    for block in (module for module in model.blocks if isinstance(module, Block)):  # not another stage's
        for half in (block.attention, block.feed_forward):
            for name, module in list(half.named_children()):
                if name in _INTO + _OUT_OF:
                    setattr(half, name, _cut(module, LinearLayer if name in _INTO else LinearAllreduce, group))
        _enter_once(block.feed_forward, group)
        block.attention.attend = partial(_attend_apart, block.attention.attend, torch.distributed.get_rank(group))
        for norm in (block.attention.q_norm, block.attention.k_norm):
            if norm is not None and norm.weight.requires_grad:  # whole, but what it normalizes is this rank's heads
                norm.weight.register_hook(partial(_summed, group=group))
    return {
        parameter: Cut(int(isinstance(layer, LinearAllreduce)), layer.tp_index, layer.tp_world_size)
        for layer in model.modules()
        if isinstance(layer, (LinearLayer, LinearAllreduce))
        for name, parameter in layer.named_parameters(recurse=False)
        if isinstance(layer, LinearLayer) or name == "weight"
    }


def _cut(module: nn.Module, layer: type[nn.Module], group: torch.distributed.ProcessGroup) -> nn.Module:
    """The layer in place of a linear map. Of an adapter, the factor is cut whose dimension is the map's that is cut."""
    if not isinstance(module, Adapted):
        return layer(module, group)
    into = layer.__name__ == "LinearLayer"
    module.base = layer(module.base, group)
    factor = "lora_B" if into else "lora_A"
    setattr(module, factor, layer(getattr(module, factor), group))
    if not into:  # what it reads is this rank's
        module.dropout = _DropoutApart(module.dropout.p, torch.distributed.get_rank(group))
    return module


def _enter_once(feed_forward: FeedForward, group: torch.distributed.ProcessGroup) -> None:
    """Add up the gradient of what both maps of SwiGLU read at once: DeepSpeed's layers add up each one's part."""
    from deepspeed.module_inject.layers import ColumnParallel, LinearLayer

    maps = (feed_forward.gate, feed_forward.up)
    if all(isinstance(layer, LinearLayer) for layer in maps):  # an adapter's gradient is whole on every rank
        for layer in maps:
            layer.mp_group = None
        feed_forward.register_forward_pre_hook(lambda module, inputs: (ColumnParallel.apply(group, *inputs),))


class _DropoutApart(nn.Dropout):
    """Dropout of what is cut: each rank's own."""

    def __init__(self, p: float, index: int) -> None:
        super().__init__(p)
        self._index = index

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        return _drawn_apart(super().forward, self._index, x)


def _attend_apart(
    attend: Attend, index: int, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, dropout: float, **apart: Tensor
) -> Tensor:
    """`attend`, whose dropout is each rank's own: the heads are."""
    if not dropout:
        return attend(q_BHTK, k_BGTK, v_BGTK, dropout, **apart)
    return _drawn_apart(attend, index, q_BHTK, k_BGTK, v_BGTK, dropout, **apart)


def _drawn_apart(function: Callable[..., Tensor], index: int, x: Tensor, *more: Any, **apart: Tensor) -> Tensor:
    """`function` of `x` and what follows, its random numbers each rank's own."""
    with _own_randomness(index, x.device):
        return function(x, *more, **apart)


def _end_graphs_for_dropout() -> None:
    """torch.compile cannot take a change of the random state into a graph. Told so, it ends one before it and begins another.

    Otherwise it finds out, tries the rest of each frame on the stack, and prints 30 lines of warnings a rank. Told where
    the function is defined, every run would load PyTorch's compiler.
    """
    global _drawn_apart
    _drawn_apart = torch.compiler.disable(_drawn_apart)


@contextlib.contextmanager
def _own_randomness(index: int, device: torch.device) -> Iterator[None]:
    """Random numbers in here differ among the ranks of a group, who draw the same before and after."""
    seed = int(torch.randint(2**62, ())) + index
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield


def _summed(gradient: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    gradient = gradient.clone()
    torch.distributed.all_reduce(gradient, group=group)
    return gradient


def forget_groups() -> None:
    """Let engines of other degrees follow in this process: DeepSpeed keeps the last one's groups."""
    from deepspeed.module_inject.layers import set_autotp_mode
    from deepspeed.utils import groups

    set_autotp_mode(training=False)
    groups.mpu = None
