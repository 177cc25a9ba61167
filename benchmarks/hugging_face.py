"""The same model, batches and DeepSpeed JSON through the Trainer of Hugging Face's transformers, which drives itself.

Its loop is its own, so it is watched through its callbacks; nothing of it is left out or added but what every trainer here
is asked for: the loss and the gradient norm of each step. It logs, saves and evaluates nothing while it is timed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.bench import Bench, Part
from benchmarks.ledger import deepspeeds_tensors
from benchmarks.trainers import watch_deepspeed
from ds_gpt.config import Composed
from ds_gpt.data.sampler import Sampler
from ds_gpt.data.split import Split
from ds_gpt.engine.activation_checkpointing import apply_checkpointing
from ds_gpt.engine.grid import Grid
from ds_gpt.engine.ranks import Ranks
from ds_gpt.engine.state import pieces
from ds_gpt.learning.schedule import schedule
from ds_gpt.model.gpt import GPT

# Filled from the run in our files, and by Hugging Face from its arguments: "auto" in the JSON as it is shipped.
_AUTO = ("optimizer", "scheduler")


class WithLoss(nn.Module):
    """The GPT as Hugging Face wants a model: its inputs by name, its loss beside the logits."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Token ids and targets, BT each, to the mean loss and logits_BTV."""
        logits_BTV = self.gpt(input_ids)
        return {"loss": F.cross_entropy(logits_BTV.float().flatten(0, 1), labels.flatten()), "logits": logits_BTV}


class Windows(Dataset[dict[str, Tensor]]):
    """The run's windows one after another, so that reading them in order gives every step its batch."""

    def __init__(self, split: Split, sampler: Sampler, steps: int) -> None:
        self._split, self._sampler, self._steps = split, sampler, steps
        self._ahead: tuple[int, np.ndarray] = (-1, np.empty(0))

    def __len__(self) -> int:
        return self._steps * self._sampler.global_batch_size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        step, place = divmod(index, self._sampler.global_batch_size)
        if self._ahead[0] != step:
            self._ahead = step, self._sampler.windows(step)
        window = torch.from_numpy(self._split.read(self._ahead[1][place : place + 1], self._sampler.context + 1)[0])
        return {"input_ids": window[:-1], "labels": window[1:]}


class Watched(Trainer):
    """Hugging Face's Trainer with this run's order of windows and learning rate."""

    def __init__(self, composed: Composed, ranks: Ranks, **given: Any) -> None:
        super().__init__(**given)
        self._rate = schedule(composed.run, ranks.world_size)
        self.seen: list[Tensor] = []  # the loss of every micro-step

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LambdaLR:
        """The run's schedule, as a multiple of the learning rate that the optimizer was given."""
        if self.lr_scheduler is None:
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: self._rate(step) / self.args.learning_rate)
        return self.lr_scheduler

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Hugging Face's, remembered."""
        loss = super().compute_loss(*args, **kwargs)
        self.seen.append((loss[0] if isinstance(loss, tuple) else loss).detach())
        return loss


class HuggingFaceTrainee:
    """See ``benchmarks.trainers.Trainee``; it steps itself."""

    def __init__(self, composed: Composed) -> None:
        self.composed = composed
        torch.manual_seed(composed.run.seed)
        self.model: nn.Module = GPT(composed.run.model)
        apply_checkpointing(self.model, composed)
        self.deepspeed: Any = None  # the engine, once Hugging Face has built it
        self.micro_steps = composed.accumulation_steps
        self.on_phase = lambda phase: None

    def tensors(self) -> Iterator[tuple[Tensor, str]]:
        """See Trainee."""
        alone = Grid(self.composed.run.parallel, self.composed.data_ranks, rank=0)  # no ranks share the model
        return deepspeeds_tensors(self.deepspeed, pieces(self.deepspeed, self.deepspeed.module, alone, {}))


class HuggingFaceBench(Bench):
    """A bench that Hugging Face's loop drives.

    Args:
        composed: the configuration, its vocabulary included.
        ranks: this process among the others; connected.
        split: what is trained on.
        sampler: the run's windows.
    """

    trainee: HuggingFaceTrainee

    def __init__(self, composed: Composed, ranks: Ranks, split: Split, sampler: Sampler) -> None:
        self._split, self._sampler = split, sampler
        super().__init__(composed, ranks, HuggingFaceTrainee(composed), loader=None)

    def run(self, parts: Sequence[Part]) -> None:
        """See Bench."""
        steps = sum(steps for steps, _ in parts)
        with tempfile.TemporaryDirectory() as folder:
            trainer = Watched(
                self.composed,
                self.ranks,
                model=WithLoss(self.trainee.model),
                args=arguments(self.composed, self.ranks, steps, folder),
                train_dataset=Windows(self._split, self._sampler, steps),
            )
            trainer.add_callback(_Clock(self, trainer, parts))
            trainer.train()
        losses = torch.stack(trainer.seen).double().reshape(steps, -1).mean(dim=1)
        self.losses = [total / self.ranks.world_size for total in self.ranks.sum(losses)]

    def close(self) -> None:
        """Nothing runs beside it."""


class _Clock(TrainerCallback):
    """Stops the bench's clock at the end of each step, and enters and leaves the parts between steps."""

    def __init__(self, bench: HuggingFaceBench, trainer: Watched, parts: Sequence[Part]) -> None:
        self._bench, self._trainer, self._parts = bench, trainer, iter(parts)
        self._stack, self._left = ExitStack(), 0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """The engine is built: watch it."""
        bench = self._bench
        bench.trainee.deepspeed = self._trainer.deepspeed
        watch_deepspeed(bench.trainee)
        bench.ranks.barrier()
        bench.ready_at = time.time()
        self._next_part()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """The batch is there."""
        self._waited = time.perf_counter() - self._start
        trainee = self._bench.trainee
        trainee.micro_steps_left = trainee.micro_steps
        trainee.on_phase("forward")

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """The weights have changed."""
        bench = self._bench
        norm = bench.trainee.deepspeed.get_global_grad_norm()
        bench.grad_norms.append(float("nan") if norm is None else float(norm))
        bench.stopped(self._start, self._cpu_start, self._waited)
        self._left -= 1
        self._next_part()

    def _next_part(self) -> None:
        while self._left == 0:
            self._stack.close()
            part = next(self._parts, None)
            if part is None:
                break
            self._left, around = part
            self._stack.enter_context(around)
        self._start, self._cpu_start = time.perf_counter(), time.process_time()


def arguments(composed: Composed, ranks: Ranks, steps: int, folder: str) -> TrainingArguments:
    """Hugging Face's arguments for this run: the DeepSpeed JSON that ds_gpt would use, and the run's numbers where it says "auto"."""
    optimizer = composed.run.optimizer
    return TrainingArguments(
        output_dir=folder,
        deepspeed={key: value for key, value in composed.deepspeed.items() if key not in _AUTO},
        per_device_train_batch_size=composed.micro_batch_size,
        gradient_accumulation_steps=composed.accumulation_steps,
        max_steps=steps,
        learning_rate=optimizer.lr,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=composed.deepspeed["gradient_clipping"],
        bf16=composed.precision == "bf16",
        fp16=composed.precision == "fp16",
        optim="adamw_torch_fused" if ranks.device.type == "cuda" else "adamw_torch",
        use_cpu=ranks.device.type == "cpu",
        seed=composed.run.seed,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
