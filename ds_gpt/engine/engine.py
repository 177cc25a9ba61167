"""The GPT inside the DeepSpeed engine: build it, take optimizer steps, evaluate."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_gpt.config import Composed, ConfigError, Problem
from ds_gpt.engine.activation_checkpointing import apply_checkpointing
from ds_gpt.engine.defects import (
    allow_fp16_on_cpu,
    guard_plain_optimizer,
    hear_every_tensor_rank,
    hide_gathering,
    keep_one_bucket,
    mark_cut_gradients,
    restore_linear,
    silence_bf16_optimizer,
    skip_reduction_of_one,
    undo_dummy_step,
    update_loss_scale_last,
)
from ds_gpt.engine.deepspeed_import import import_deepspeed
from ds_gpt.engine.forward_timer import ForwardTimer
from ds_gpt.engine.grid import Grid
from ds_gpt.engine.pipeline import Pipeline
from ds_gpt.engine.ranks import Ranks
from ds_gpt.engine.sequence_parallel import SequenceParallel
from ds_gpt.engine.state import (
    Piece,
    ReadState,
    load_loss_scaler_state,
    load_pieces,
    loss_scaler_state,
    optimizer_steps,
    pieces,
)
from ds_gpt.engine.tensor_parallel import Cuts, cut, forget_groups, model_parallel_unit
from ds_gpt.learning.objectives import Forward, Measured, Objective, log_probs_of, means, objective_of
from ds_gpt.learning.parameter_groups import parameter_groups
from ds_gpt.model.gpt import GPT, Loss
from ds_gpt.model.lora import apply_lora

ReadWeight = Callable[[str, int], Tensor]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, the same on every rank.

    Attributes:
        loss: token-weighted mean over micro-steps and ranks, nats a token; under dpo and reward nats a pair.
        grad_norm: 2-norm of the whole gradient before clipping; not finite where the step was skipped.
        applied: whether the weights changed. False where a gradient was not finite.
        loss_scale: dynamic loss scale, under fp16 only.
        interrupted: whether any rank was asked to stop.
        metrics: what else the objective measures, a mean over what it counts.
    """

    loss: float
    grad_norm: float
    applied: bool
    loss_scale: float | None
    interrupted: bool
    metrics: dict[str, float] = field(default_factory=dict)


def check_deepspeed_config(composed: Composed) -> None:
    """Let DeepSpeed's own validation see the configuration before any process group exists.

    Raises:
        ConfigError: with DeepSpeed's words.
    """
    import_deepspeed(composed.hardware.kind)
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    # Without a process group DeepSpeed takes the world size for 1; the batch arithmetic is settled already.
    alone = {**composed.deepspeed, "train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    try:
        DeepSpeedConfig(alone)
    except (AssertionError, ValueError, TypeError, KeyError, AttributeError, DeepSpeedConfigError) as error:
        raise ConfigError(
            Problem(f"DeepSpeed refuses the configuration: {error}", fix="correct that key in the DeepSpeed config")
        ) from None


class Engine:
    """A GPT wrapped by DeepSpeed. Every rank must make the same calls in the same order.

    Args:
        composed: the settled configuration, its vocabulary included.
        ranks: this process among the others; connected.
        initial: weights to start from, by name and number of elements, flat; None: they are drawn.
    """

    def __init__(self, composed: Composed, ranks: Ranks, initial: ReadWeight | None = None) -> None:
        import deepspeed

        self.composed = composed
        self.ranks = ranks
        self.grid = Grid(composed.run.parallel, composed.data_ranks, ranks.rank)
        self._forward_timer = ForwardTimer(ranks.device)
        self._objective = objective_of(composed.run)
        if composed.precision == "fp16":
            allow_fp16_on_cpu()
        silence_bf16_optimizer()
        torch.manual_seed(composed.run.seed)  # the same on every rank: they start from the same weights
        with self._partitioned_at_birth():
            self.model = GPT(composed.run.model)
            if initial is not None:
                self._start_from(initial)
            apply_lora(self.model, composed.run.lora)
            if composed.run.stage == "reward":
                self.model.score()
        staged = composed.run.parallel.pipeline > 1
        self._pipeline = Pipeline(self.model, self.grid, ranks.device) if staged else None
        unit, self._cuts = self._share_out()
        self._sequence = SequenceParallel(self.grid, self.model)
        apply_checkpointing(self.model, composed)
        self.deepspeed = deepspeed.initialize(
            model=self._pipeline.module if self._pipeline else self.model,
            model_parameters=parameter_groups(self.model, composed.run.optimizer.weight_decay),
            config=composed.deepspeed,
            dist_init_required=False,
            mpu=None if self._pipeline else unit,  # a pipeline has its own, the same
        )[0]
        if composed.compiled:
            self.deepspeed.compile()
        undo_dummy_step(self.deepspeed)
        guard_plain_optimizer(self.deepspeed)
        update_loss_scale_last(self.deepspeed)
        skip_reduction_of_one(self.deepspeed)
        keep_one_bucket(self.deepspeed)
        if self._cuts:
            mark_cut_gradients(self.deepspeed)
            hear_every_tensor_rank(self.deepspeed)
        if composed.zero_stage == 3 and composed.checkpoint_policy == "selective":
            hide_gathering(self.deepspeed)

    def _partitioned_at_birth(self) -> contextlib.AbstractContextManager[Any]:
        """Under ZeRO-3 a parameter is split among the ranks as it is made, so no rank ever holds the whole model."""
        import deepspeed

        if self.composed.zero_stage < 3:
            return contextlib.nullcontext()
        return deepspeed.zero.Init(config_dict_or_path=self.composed.deepspeed)

    def _share_out(self) -> tuple[Any, Cuts]:
        """Cut the model, whole until now, where ranks share it; DeepSpeed's model-parallel unit, and what was cut."""
        if self.grid.parallel.tensor == 1:
            return None, {}
        unit = self._pipeline.module.mpu() if self._pipeline else model_parallel_unit(self.grid)
        return unit, cut(self.model, unit.get_slice_parallel_group(), self.composed.compiled)

    def _start_from(self, read: ReadWeight) -> None:
        """Replace the weights that were drawn, one parameter at a time."""
        import deepspeed

        for name, parameter in self.model.named_parameters():
            whole = self.composed.zero_stage < 3
            with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0, enabled=not whole), torch.no_grad():
                if whole or self.ranks.is_first:
                    parameter.copy_(read(name, parameter.numel()).view(parameter.shape))

    def step(
        self, step: int, micro_batches: Sequence[tuple[Tensor, ...]], lr: float, interrupted: bool = False
    ) -> StepResult:
        """One optimizer step.

        Args:
            step: optimizer steps completed before this one; with the seed and the rank it settles all dropout.
            micro_batches: one a micro-step, each what the objective of the run takes (`ds_gpt.learning.objectives`).
            lr: learning rate of this step.
            interrupted: whether this rank was asked to stop; told to all ranks along with the loss.
        """
        assert len(micro_batches) == self.composed.accumulation_steps
        _seed(self.composed.run.seed, step, self.grid.randomness)
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = lr
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        counted = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        measured: list[dict[str, Tensor]] = []
        for found in self._micro_steps(micro_batches):
            loss_sum += found.loss_sum.detach()
            counted += found.counted
            measured.append(found.metrics)
        names, sums = _summed(measured)
        sums = [value * self.grid.counts for value in (loss_sum, counted, *sums)]
        asked, total, tokens, *others = self.ranks.sum(torch.stack([counted.new_tensor(float(interrupted)), *sums]))
        loss, metrics = means(self.composed.run, total, tokens, names, others)
        applied = self.deepspeed.was_step_applied()
        return StepResult(loss, self._grad_norm(), applied, self._loss_scale(), asked > 0, metrics)

    def _micro_steps(self, micro_batches: Sequence[tuple[Tensor, ...]]) -> Iterable[Measured]:
        if self._pipeline:
            return self._pipeline.train(self.deepspeed, micro_batches, self._loss)
        return map(self._micro_step, micro_batches)

    def _micro_step(self, batch: tuple[Tensor, ...]) -> Measured:
        found = self._loss(batch)
        # DeepSpeed averages over micro-steps and ranks; where all have an equal share of what is counted, or are
        # divided by what their share would be, that is the mean over all that is counted.
        self.deepspeed.backward(found.loss_sum / found.share)
        self.deepspeed.step()
        return found

    def _loss(self, batch: tuple[Tensor, ...]) -> Measured:
        # The model's flag: DeepSpeed's own flag of training stays on.
        return self._objective(self._forward, self.model.training, *self._sequence.cut(batch))

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._forward_timer:
            return self._placed(self._pipeline.own_layers if self._pipeline else self.deepspeed, *args, **kwargs)

    def _placed(self, forward: Forward, tokens_BT: Tensor, positions: Tensor | None = None, **kwargs: Any) -> Any:
        """`forward` of this rank's tokens, told where they stand."""
        if positions is None:
            positions = self._sequence.positions(tokens_BT)
        return forward(tokens_BT, positions, **kwargs)

    def slowest_rank(self) -> tuple[int, float] | None:
        """The rank that spent most in forward passes since the last call, and how many times the others' median.

        None where it cannot be told: where no other rank has the same to do, and where a forward pass waits for others:
        under ZeRO-3, and where they share matrices or sequences. Every rank must call it.
        """
        seconds = self._forward_timer.read()
        stages = self.grid.parallel.pipeline
        waits = self.composed.zero_stage == 3 or self.grid.parallel.used - {"pipeline"}
        if waits or self.ranks.world_size == stages:
            return None
        by_rank = self.ranks.gather(seconds)
        found = []
        for first in range(0, len(by_rank), len(by_rank) // stages):  # other stages have other work
            peers = range(first, first + len(by_rank) // stages)
            slowest = max(peers, key=lambda rank: by_rank[rank])
            others = statistics.median(by_rank[rank] for rank in peers if rank != slowest)
            found.append((slowest, by_rank[slowest] / others))
        return max(found, key=lambda entry: entry[1])

    def _grad_norm(self) -> float:
        norm = self.deepspeed.get_global_grad_norm()
        return math.nan if norm is None else float(norm)

    def _loss_scale(self) -> float | None:
        return float(self.deepspeed.optimizer.loss_scale) if self.composed.precision == "fp16" else None

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode, without gradients."""
        self.deepspeed.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.deepspeed.train()

    def logits(self, tokens_BT: Tensor, positions: Tensor | None = None, loss: Loss | None = None) -> Tensor:
        """Logits of a forward pass, BTV, or what `loss` makes instead. Under ZeRO-3 every rank must call it equally often.

        Not compiled: decoding calls it with another length, and another part of the cache, each time.
        """
        eager = torch.compiler.set_stance("force_eager") if self.composed.compiled else contextlib.nullcontext()
        with eager, self._sequence.alone():
            return self._everywhere(tokens_BT, positions, loss=loss)

    def _everywhere(self, *args: Any, **kwargs: Any) -> Tensor:
        return (self._pipeline.everywhere if self._pipeline else self.deepspeed)(*args, **kwargs)

    def evaluate(self, batches: Iterable[tuple[Tensor, ...]]) -> float:
        """Token-weighted mean loss over all ranks' batches, nats a token; every rank gives equally many batches."""
        return self.measure(batches)[0]

    def measure(
        self, batches: Iterable[tuple[Tensor, ...]], objective: Objective | None = None
    ) -> tuple[float, dict[str, float]]:
        """The same, and what else the objective measures; by default that of the run."""
        objective = objective or self._objective
        forward = partial(self._placed, self._pipeline.at_the_end) if self._pipeline else self._forward
        sums = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)
        measured: list[dict[str, Tensor]] = []
        with self.evaluating():
            for batch in batches:
                found = objective(forward, False, *self._sequence.cut(batch))
                sums += torch.stack([found.loss_sum, found.counted])
                measured.append(found.metrics)
        names, others = _summed(measured)
        total, tokens, *totals = self.ranks.sum(torch.stack([*sums, *others]) * self.grid.counts)
        return means(self.composed.run, total, tokens, names, totals)

    def log_probs(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Log-probability of each sequence's targets, B, in evaluation mode; every rank must call it equally often."""
        with self.evaluating(), self._sequence.alone():
            return self._everywhere(inputs_BT, loss=log_probs_of(self.composed.run, targets_BT))

    def pieces(self) -> Iterator[Piece]:
        """What this rank keeps of the training state."""
        return pieces(self.deepspeed, self.model, self.grid, self._cuts)

    def state_facts(self) -> dict[str, Any]:
        """The training state's few numbers that belong to no parameter."""
        scaler = loss_scaler_state(self.deepspeed) if self.composed.precision == "fp16" else {}
        return {"optimizer_steps": optimizer_steps(self.deepspeed), "loss_scaler": scaler}

    def load(self, read: ReadState, facts: dict[str, Any]) -> list[str]:
        """Take over a saved training state, whatever ZeRO stage and world size it is from; every rank must call it.

        Args:
            read: gives the elements of a parameter's master or moment.
            facts: what `state_facts` gave.

        Returns:
            Kinds of optimizer state that were not saved and start at zero.
        """
        absent = load_pieces(self.deepspeed, self.pieces(), read, facts["optimizer_steps"])
        if self.composed.precision == "fp16":
            load_loss_scaler_state(self.deepspeed, facts["loss_scaler"])
        return absent

    def close(self) -> None:
        """Remove what DeepSpeed hooked into the model and into PyTorch, so that another engine can be built in this process."""
        self.deepspeed.destroy()
        self._sequence.close()
        restore_linear()
        forget_groups()


def _summed(measured: Sequence[dict[str, Tensor]]) -> tuple[list[str], list[Tensor]]:
    """Names of metrics, and the sum of each, fp64."""
    names = list(measured[0]) if measured else []
    return names, [torch.stack([found[name] for found in measured]).detach().sum(dtype=torch.float64) for name in names]


def _seed(seed: int, step: int, rank: int) -> None:
    """Make dropout a function of (seed, step, rank), so that a resumed run draws what an uninterrupted one would."""
    mixed = int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])
    # torch.manual_seed, without a device, formats a stack trace for the GPU that may be initialised later: 0.4 ms a step.
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed)
