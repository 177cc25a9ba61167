"""What is measured: ds_gpt's engine, or the same model in PyTorch alone. One interface, a step, whose phases are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.ledger import deepspeeds_tensors, model_weights
from ds_gpt.config import Composed
from ds_gpt.engine.activation_checkpointing import apply_checkpointing
from ds_gpt.engine.engine import Engine
from ds_gpt.engine.ranks import Ranks
from ds_gpt.learning.parameter_groups import parameter_groups
from ds_gpt.model.gpt import GPT

Batches = Sequence[tuple[Tensor, Tensor]]
PHASES = ("forward", "backward", "optimizer", "bookkeeping")


class Trainee(Protocol):
    """What can be benchmarked. `on_phase` is called with the name of each phase as it begins."""

    model: torch.nn.Module
    on_phase: Callable[[str], None]

    def step(self, step: int, batches: Batches, lr: float) -> tuple[float, float]:
        """One optimizer step; its loss and gradient norm, read on the host, so that the device is done."""

    def tensors(self) -> Iterator[tuple[Tensor, str]]:
        """The tensors that it keeps between phases, with their kinds."""


class DsGpt:
    """The real thing: `Engine.step`, as ``Trainer.train`` calls it."""

    def __init__(self, composed: Composed, ranks: Ranks) -> None:
        self.engine = Engine(composed, ranks)
        self.model = self.engine.model
        self.on_phase: Callable[[str], None] = lambda phase: None
        self.deepspeed = self.engine.deepspeed
        watch_deepspeed(self)

    def step(self, step: int, batches: Batches, lr: float) -> tuple[float, float]:
        """See Trainee."""
        self.micro_steps_left = len(batches)
        self.on_phase("forward")
        result = self.engine.step(step, batches, lr)
        return result.loss, result.grad_norm

    def tensors(self) -> Iterator[tuple[Tensor, str]]:
        """See Trainee."""
        return deepspeeds_tensors(self.deepspeed, self.engine.pieces())


class DeepSpeedTrainee(Protocol):
    """A trainee around a DeepSpeed engine, which counts the micro-steps that are left of a step."""

    deepspeed: Any
    micro_steps_left: int
    on_phase: Callable[[str], None]


def watch_deepspeed(trainee: DeepSpeedTrainee) -> None:
    """Have the engine tell the trainee of its phases, after the first ``forward`` of a step."""
    engine = trainee.deepspeed
    if hasattr(engine, "_INSTRUCTION_MAP"):
        _watch_schedule(trainee)
        return
    backward, step = engine.backward, engine.step

    def watched_backward(*args: Any, **kwargs: Any) -> Any:
        trainee.on_phase("backward")
        result = backward(*args, **kwargs)
        trainee.micro_steps_left -= 1
        trainee.on_phase("forward" if trainee.micro_steps_left else "optimizer")
        return result

    def watched_step(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if not trainee.micro_steps_left:
            trainee.on_phase("bookkeeping")
        return result

    engine.backward, engine.step = watched_backward, watched_step


_OF_SCHEDULE = {
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "ReduceTiedGrads": "optimizer",
    "ReduceGrads": "optimizer",
    "OptimizerStep": "optimizer",
}


def _watch_schedule(trainee: DeepSpeedTrainee) -> None:
    """The same of a pipeline, whose engine looks up what each instruction of its schedule does."""

    def watched(execute: Callable[..., None], phase: str) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            trainee.on_phase(phase)
            execute(*args, **kwargs)

        return call

    engine = trainee.deepspeed
    known = engine._INSTRUCTION_MAP.items()
    engine._INSTRUCTION_MAP = {
        instruction: watched(execute, phase) if (phase := _OF_SCHEDULE.get(instruction.__name__)) else execute for instruction, execute in known
    }


class PlainPyTorch:
    """The baseline: fp32 weights, autocast for bf16, AdamW, clipping; DistributedDataParallel or FSDP2 over several ranks."""

    def __init__(self, composed: Composed, ranks: Ranks, sharded: bool) -> None:
        self.composed, self.ranks, self.sharded = composed, ranks, sharded
        self.on_phase: Callable[[str], None] = lambda phase: None
        run = composed.run
        torch.manual_seed(run.seed)
        self.model = GPT(run.model).to(ranks.device)
        apply_checkpointing(self.model, composed)
        bf16 = composed.precision == "bf16"
        self.autocast = torch.autocast(ranks.device.type, torch.bfloat16) if bf16 and not sharded else nullcontext()
        forward: torch.nn.Module = self.model
        if sharded:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
            mesh = torch.distributed.init_device_mesh(ranks.device.type, (ranks.world_size,))
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(self.model, mesh=mesh, mp_policy=policy)
        elif ranks.world_size > 1:
            forward = DistributedDataParallel(self.model, device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None)
        self.forward = torch.compile(forward) if composed.compiled else forward
        optimizer = run.optimizer
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, optimizer.weight_decay), lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, fused=ranks.device.type == "cuda"
        )

    def step(self, step: int, batches: Batches, lr: float) -> tuple[float, float]:
        """See Trainee."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for micro_step, (inputs_BT, targets_BT) in enumerate(batches):
            self.on_phase("forward")
            last = micro_step == len(batches) - 1
            with self._reducing(last):
                with self.autocast:
                    loss = F.cross_entropy(self.forward(inputs_BT).float().flatten(0, 1), targets_BT.flatten())
                self.on_phase("backward")
                (loss / len(batches)).backward()
            loss_sum += loss.detach()
        self.on_phase("optimizer")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.composed.deepspeed["gradient_clipping"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.on_phase("bookkeeping")
        if self.sharded:
            norm = norm.full_tensor()
        (total,) = self.ranks.sum(loss_sum.reshape(1))
        return total / len(batches) / self.ranks.world_size, float(norm)

    def _reducing(self, last: bool) -> object:
        """Average gradients over the ranks in the last micro-step only."""
        if self.sharded:
            self.model.set_requires_gradient_sync(last)
        elif self.ranks.world_size > 1 and not last:
            return self.forward.no_sync()
        return nullcontext()

    def tensors(self) -> Iterator[tuple[Tensor, str]]:
        """See Trainee."""
        for state in self.optimizer.state.values():
            for value in state.values():
                if torch.is_tensor(value):
                    yield _local(value), "optimizer"
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                yield _local(parameter.grad), "gradients"
        if self.sharded:
            yield from ((_local(parameter.data), "weights") for parameter in self.model.parameters())
        else:
            yield from model_weights(self.model)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def make(trainer: str, composed: Composed, ranks: Ranks) -> Trainee:
    """The trainee of a case."""
    if trainer == "ds_gpt":
        return DsGpt(composed, ranks)
    return PlainPyTorch(composed, ranks, trainer == "fsdp2")
