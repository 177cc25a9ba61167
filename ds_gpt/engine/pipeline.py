"""Pipeline parallelism: each rank computes a few consecutive layers, a stage, of every micro-batch (Huang et al. 2018).

DeepSpeed's pipeline engine trains: it sends activations on and gradients back in a schedule in which every stage keeps
at most as many micro-batches as there are stages from it on (1F1B; Narayanan et al. 2019), adds up the gradients of a
tied head's two copies, and steps. Evaluation and generation, whose shapes vary, pass through the stages here.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ds_gpt.engine.grid import Grid
from ds_gpt.learning.objectives import Measured
from ds_gpt.model.gpt import GPT
from ds_gpt.model.stages import check_trained, stage_blocks

Batch = tuple[Tensor, ...]
LossOf = Callable[[Batch], Measured]


class Pipeline:
    """The model in stages, of which this rank keeps its own; every rank must make the same calls.

    Args:
        model: the whole GPT, the same on every rank. What other stages compute is taken out of it: then a forward pass
            is that of this stage alone, and the names of parameters are still the whole model's.
        grid: where this rank stands.
        device: of this rank.

    Raises:
        ConfigError: a stage has nothing to train.

    Attributes:
        module: what `deepspeed.initialize` is to wrap. Its grid, `module.mpu()`, has the groups of ranks; between here
            and there modules of the model may still be replaced, as tensor parallelism does.
    """

    def __init__(self, model: GPT, grid: Grid, device: torch.device) -> None:
        self._model, self._grid, self._device = model, grid, device
        self._is_first = grid.pipeline_rank == 0
        tied = model.head.weight is model.embedding.tokens.weight
        cuts = stage_blocks(model.config, grid.parallel.pipeline)
        trained = [any(parameter.requires_grad for parameter in block.parameters()) for block in model.blocks]
        for stage, (start, end) in enumerate(pairwise(cuts)):
            check_trained(stage, grid.parallel.pipeline, range(start, end), trained.__getitem__)
        _keep(model, cuts, grid)
        self._stage = _Stage(model, self._is_first, grid.is_last_stage)
        # DeepSpeed describes the stages, and makes copies of a tied weight equal by what autograd would follow.
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            self.module = _pipeline_module(self._stage, tied, grid)

    def train(self, deepspeed_engine: Any, micro_batches: Sequence[Batch], loss_of: LossOf) -> list[Measured]:
        """One optimizer step.

        Args:
            deepspeed_engine: what `deepspeed.initialize` made of `module`.
            micro_batches: of the data that all ranks of this pipeline share.
            loss_of: calls `own_layers` for a micro-batch, and measures what comes out.

        Returns:
            What was measured, on the last stage; nothing on the others.
        """
        self._stage.begin(micro_batches, loss_of)
        # DeepSpeed asks for the first stage's tokens and the last one's targets; the stages here have both.
        tokens = iter([(inputs_BT, inputs_BT) for inputs_BT, *_ in micro_batches])
        deepspeed_engine.train_batch(data_iter=tokens)
        deepspeed_engine.timers("train_batch").reset()  # it would keep two events of every step, unread
        return self._stage.found

    def own_layers(self, *args: Any, **kwargs: Any) -> Any:
        """`GPT.forward` of this stage in training: what the GPT returns on the last stage.

        On the others: the stream, and nothing counted, in the places of the sum of losses and what it is over.
        """
        found = self._model(*args, **kwargs)
        return found if self._grid.is_last_stage else (found, found.new_zeros(()))

    def everywhere(self, *args: Any, **kwargs: Any) -> Tensor:
        """`GPT.forward` through all stages, without gradients: one tensor, on every rank."""
        return self._told(self._through(*args, **kwargs))

    def at_the_end(self, *args: Any, **kwargs: Any) -> Any:
        """The same, where two sums are found, for the last stage alone: the others get zeros, and are on with the next."""
        found = self._through(*args, **kwargs)
        nothing = torch.zeros((), device=self._device)
        return found if self._grid.is_last_stage else (nothing, nothing)

    def _through(self, tokens_BT: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self._is_first:
            dtype = next(self._model.parameters()).dtype
            x_BTD = torch.empty(*tokens_BT.shape, self._model.config.width, dtype=dtype, device=self._device)
            torch.distributed.recv(x_BTD, self._rank_of(self._grid.pipeline_rank - 1))
            self._model.embedding.stream_BTD = x_BTD
        found = self._model(tokens_BT, *args, **kwargs)
        if not self._grid.is_last_stage:
            torch.distributed.send(found, self._rank_of(self._grid.pipeline_rank + 1))
        return found

    def _told(self, found: Tensor) -> Tensor:
        """The last stage's tensor on every rank of the pipeline."""
        last, group = self._rank_of(self._grid.parallel.pipeline - 1), self.module.mpu().get_pipe_parallel_group()
        box: list[Any] = [found.shape, found.dtype]
        torch.distributed.broadcast_object_list(box, src=last, group=group, device=self._device)
        if not self._grid.is_last_stage:
            found = torch.empty(box[0], dtype=box[1], device=self._device)
        found = found.contiguous()
        torch.distributed.broadcast(found, src=last, group=group)
        return found

    def _rank_of(self, stage: int) -> int:
        return self.module.mpu().stage_to_global(stage)


class _Received(nn.Module):
    """In the embedding's place on a later stage: gives the stream that the stage before sent."""

    def __init__(self, tokens: nn.Embedding | None) -> None:
        super().__init__()
        self.tokens = tokens  # on the last stage with a tied head, which reads the same weight under this name
        self.stream_BTD: Tensor | None = None

    def forward(self, tokens_BT: Tensor, positions: Tensor | None = None) -> Tensor:
        x_BTD, self.stream_BTD = self.stream_BTD, None
        assert x_BTD is not None, "nothing came from the stage before"
        return x_BTD


class _Elsewhere(nn.Module):
    """In the place of another stage's block or head: passes the stream on."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SimpleNamespace(attend=None, save_attention=False, attention_maps=None)  # a cache replaces it

    def forward(self, x_BTD: Tensor, *_: Any) -> Tensor:
        return x_BTD


def _keep(model: GPT, cuts: Sequence[int], grid: Grid) -> None:
    """Take out of the model what this rank's stage does not compute."""
    tied = model.head.weight is model.embedding.tokens.weight
    if grid.pipeline_rank > 0:
        model.embedding = _Received(model.embedding.tokens if tied and grid.is_last_stage else None)  # type: ignore[assignment]
    for index in range(len(model.blocks)):
        if not cuts[grid.pipeline_rank] <= index < cuts[grid.pipeline_rank + 1]:
            model.blocks[index] = _Elsewhere()
    if not grid.is_last_stage:
        model.norm, model.head = nn.Identity(), _Elsewhere()  # type: ignore[assignment]


class _Stage(nn.Module):
    """This rank's layers as DeepSpeed calls them: from the tokens, or the stream, to the stream, or the loss."""

    def __init__(self, model: GPT, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.model = model
        self._is_first, self._is_last = is_first, is_last
        self.found: list[Measured] = []

    def begin(self, micro_batches: Sequence[Batch], loss_of: LossOf) -> None:
        """What the next forward passes are of, in this order, as every stage takes them."""
        self._micro_batches: Iterator[Batch] = iter(micro_batches)
        self._loss_of = loss_of
        self.found = []

    def forward(self, received: Tensor) -> Tensor:
        if not self._is_first:
            self.model.embedding.stream_BTD = received
        found = self._loss_of(next(self._micro_batches))
        if not self._is_last:
            return found.loss_sum  # the stream: see `Pipeline.own_layers`
        self.found.append(replace(found, loss_sum=found.loss_sum.detach()))
        return found.loss_sum / found.share


def _pipeline_module(stage: _Stage, tied: bool, grid: Grid) -> Any:
    """DeepSpeed's module for a pipeline in which each stage is one layer.

    DeepSpeed builds the layers of this rank alone, so `stage` may stand for those of all ranks.
    """
    from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec

    layers: list[Any] = [stage] * grid.parallel.pipeline
    if tied:
        # The module that DeepSpeed knows to be shared must hold nothing else: it would train a second copy of it.
        spec = TiedLayerSpec("tokens", nn.Embedding, forward_fn=lambda _, received: stage(received))
        # It is asked for on the first and the last stage; whoever kept it for the others would hold a matrix that they do not use.
        spec.build = lambda log=False: stage.model.embedding.tokens
        layers[0] = layers[-1] = spec
    module = PipelineModule(layers, topology=grid.topology(), partition_method="uniform")
    module.add_module("stage", stage)
    return module
