"""What the planner needs to know of a composed run, as plain numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ds_gpt.config import Composed, ConfigError, ModelConfig, Problem
from ds_gpt.planner.trainers import DS_GPT, Trainer

# DeepSpeed's own numbers where the JSON says nothing.
_DEFAULTS = {
    "reduce_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_param_persistence_threshold": 1e5,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model.

    Attributes:
        name: where it stands within its block, or in the model.
        elements: how many numbers it holds.
        offset: elements before it in its optimizer group (matrices, or biases and norms).
        matrix: which of the two groups.
    """

    name: str
    elements: int
    offset: int
    matrix: bool


@dataclass(frozen=True)
class Shapes:
    """A run on one rank, as numbers.

    Attributes:
        model: the GPT.
        stage: ZeRO stage.
        ranks: data-parallel ranks. Devices are `tensor` x `pipeline` x `sequence` times as many.
        micro_batch: sequences a rank takes at a time.
        accumulation: micro-steps per optimizer step.
        policy: activation checkpointing: None, "full" or "selective".
        precision: what the model computes in.
        element: bytes of a weight or an activation.
        accumulates_fp32: whether gradients are summed in fp32 at ZeRO 1 and above.
        moments: fp32 numbers that the optimizer keeps for each weight.
        buckets: bucket sizes in elements, by DeepSpeed's key.
        overlap: whether ZeRO keeps two reduce buckets.
        fused: whether the optimizer steps in one kernel; otherwise PyTorch's Adam makes two temporaries as large as what it steps.
        offload_optimizer: whether masters and moments are in host memory.
        offload_weights: whether the weights' shards are, too.
        tensor: ranks that share each matrix of a block.
        pipeline: ranks that share the blocks, one after the other.
        sequence: ranks that share each sequence (Ulysses): tokens everywhere but in attention, heads there.
        trainer: the software.
    """

    model: ModelConfig
    stage: int
    ranks: int
    micro_batch: int
    accumulation: int
    policy: str | None
    precision: str
    element: int
    accumulates_fp32: bool
    moments: int
    buckets: dict[str, int]
    overlap: bool
    fused: bool
    offload_optimizer: bool
    offload_weights: bool
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    trainer: Trainer = DS_GPT

    @classmethod
    def of(cls, composed: Composed) -> Shapes:
        """Read them off a composed run.

        Raises:
            ConfigError: what the planner has no figures for.
        """
        values = composed.deepspeed
        zero = values["zero_optimization"]
        if values.get("torch_autocast", {}).get("enabled"):
            raise ConfigError(
                Problem("torch_autocast is enabled", "the planner knows bf16, fp16 and fp32 weights only", 'use "bf16": {"enabled": true}')
            )
        if composed.run.model.vocab_size == "auto":
            raise ConfigError(
                Problem(
                    "model.vocab_size is \"auto\"",
                    "the logits are V wide, and only the tokenizer knows V",
                    "--set model.vocab_size=N: about 100 for a character tokenizer, 50304 for GPT-2's",
                )
            )
        stage, precision = composed.zero_stage, composed.precision
        overlap = zero.get("overlap_comm")
        return cls(
            composed.run.model,
            stage,
            composed.hardware.world_size,
            composed.micro_batch_size,
            composed.accumulation_steps,
            composed.checkpoint_policy,
            precision,
            4 if precision == "fp32" else 2,
            precision == "fp32" or values.get("data_types", {}).get("grad_accum_dtype") == "fp32",
            2 if composed.run.optimizer.name == "adamw" else 0,
            {key: int(zero.get(key, default)) for key, default in _DEFAULTS.items()},
            stage == 3 if overlap is None else bool(overlap),
            bool(values["optimizer"]["params"].get("fused")),
            _offloads(zero, "offload_optimizer"),
            _offloads(zero, "offload_param"),
        )

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank."""
        return self.micro_batch * self.model.context // self.sequence

    @property
    def devices(self) -> int:
        """All ranks."""
        return self.ranks * self.tensor * self.pipeline * self.sequence

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO shards: they hold the same weights."""
        return self.ranks * self.sequence

    def shard(self, elements: int) -> int:
        """Elements that one rank keeps of so many."""
        return -(-elements // self.shards)

    def parameters(self, first: bool = True, last: bool = True) -> tuple[Parameter, ...]:
        """What one pipeline stage has before ZeRO shards it, in the model's order; `first` and `last`: which stage."""
        blocks = -(-self.model.layers // self.pipeline)
        return _parameters(self.model, blocks, self.tensor, self.tensor if self.trainer.vocabulary_parallel else 1, first, last)


def _offloads(zero: dict[str, Any], section: str) -> bool:
    return (zero.get(section) or {}).get("device", "none") != "none"


@lru_cache(maxsize=256)
def _parameters(model: ModelConfig, blocks: int, tensor: int, vocabulary: int, first: bool, last: bool) -> tuple[Parameter, ...]:
    offsets = {True: 0, False: 0}
    result = []
    for name, elements, matrix in _sizes(model, blocks, tensor, vocabulary, first, last):
        result.append(Parameter(name, elements, offsets[matrix], matrix))
        offsets[matrix] += elements
    return tuple(result)


def _sizes(model: ModelConfig, blocks: int, tensor: int, vocabulary: int, first: bool, last: bool) -> Iterator[tuple[str, int, bool]]:
    """Tensor parallelism cuts what maps into heads and hidden units, and out of them; not the norms, nor the biases of what comes out."""
    width, hidden = model.width, model.hidden_width
    if first:
        yield "tokens", model.vocabulary * width // vocabulary, True
        yield "positions", model.context * width, True
    for _ in range(blocks):
        yield from (("norm", width, False), ("norm", width, False))
        yield from (("qkv", 3 * width * width // tensor, True), ("qkv bias", 3 * width // tensor, False))
        yield from (("out", width * width // tensor, True), ("out bias", width, False))
        yield from (("norm", width, False), ("norm", width, False))
        yield from (("up", width * hidden // tensor, True), ("up bias", hidden // tensor, False))
        yield from (("down", hidden * width // tensor, True), ("down bias", width, False))
    if last:
        yield from (("norm", width, False), ("norm", width, False))
    if last and not first:  # the tied matrix once more
        yield "tokens", model.vocabulary * width // vocabulary, True


BLOCK_PARAMETERS = 12
