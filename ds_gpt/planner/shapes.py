"""What the planner needs to know of a composed run, as plain numbers."""

from __future__ import annotations

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
        chunk: tokens whose logits exist at a time; None: all.
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
    chunk: int | None = None
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
        if not composed.run.data.attend_across_documents:
            raise ConfigError(
                Problem(
                    "data.attend_across_documents = false", "the planner has no figures for the masks that keep documents apart, T x T a sequence",
                    "--set data.attend_across_documents=true, and leave room for them",
                )
            )  # fmt: skip
        if composed.run.lora.rank is not None or composed.run.stage != "pretrain" or not composed.run.generates:
            raise ConfigError(
                Problem(
                    f"stage = {composed.run.stage}, objective.name = {composed.run.objective.name}, "
                    f"lora.rank = {composed.run.lora.rank}",
                    "the planner knows the pre-training of every weight on next tokens only",
                    "plan with --set stage=pretrain --set lora.rank=null --set objective.name=next_token (pairs: of twice the micro-batch); "
                    "leave room for masks, T x T a sequence",
                )
            )
        stage, precision = composed.zero_stage, composed.precision
        overlap = zero.get("overlap_comm")
        return cls(
            composed.run.model,
            stage,
            composed.data_ranks,
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
            composed.run.loss_chunk_tokens,
            **composed.run.parallel.model_dump(),
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


# A module's name, and of each of its parameters how many elements it has and whether it is a matrix.
Module = tuple[str, list[tuple[int, bool]]]


@lru_cache(maxsize=256)
def _parameters(model: ModelConfig, blocks: int, tensor: int, vocabulary: int, first: bool, last: bool) -> tuple[Parameter, ...]:
    modules = [*(_embedding(model, vocabulary) if first else []), *(block_modules(model, tensor) * blocks)]
    modules += _tail(model, vocabulary, own_head=not (model.tied_head and first)) if last else []
    offsets = {True: 0, False: 0}
    result = []
    for name, sizes in modules:
        for elements, matrix in sizes:
            result.append(Parameter(name, elements, offsets[matrix], matrix))
            offsets[matrix] += elements
    return tuple(result)


def _embedding(model: ModelConfig, vocabulary: int) -> list[Module]:
    tokens = ("tokens", [(model.vocabulary * model.width // vocabulary, True)])
    return [tokens, ("positions", [(model.context * model.width, True)])] if model.positions == "learned" else [tokens]


def block_modules(model: ModelConfig, tensor: int) -> list[Module]:
    """The modules of one block that have parameters, in the model's order.

    Tensor parallelism cuts what maps into heads and hidden units, and out of them; not the norms, nor the biases of what comes out.
    """
    width, hidden, head = model.width, model.hidden_width, model.head_width
    qk_norms: list[Module] = [("q_norm", [(head, False)]), ("k_norm", [(head, False)])]

    def linear(inputs: int, outputs: int, into: bool) -> list[tuple[int, bool]]:
        return [(inputs * outputs // tensor, True), *([(outputs // tensor if into else outputs, False)] if model.bias else [])]

    return [
        ("attention_norm", _norm(model)),
        ("qkv", linear(width, width + 2 * model.key_heads * head, into=True)),
        *(qk_norms if model.qk_norm else []),
        ("out", linear(width, width, into=False)),
        ("feed_forward_norm", _norm(model)),
        *([("gate", linear(width, hidden, into=True))] if model.ffn == "swiglu" else []),
        ("up", linear(width, hidden, into=True)),
        ("down", linear(hidden, width, into=False)),
    ]


def _tail(model: ModelConfig, vocabulary: int, own_head: bool) -> list[Module]:
    """The head's matrix is one of its own where it is not tied, or where the stage that it is tied to is another."""
    return [("norm", _norm(model)), *([("head", [(model.vocabulary * model.width // vocabulary, True)])] if own_head else [])]


def _norm(model: ModelConfig) -> list[tuple[int, bool]]:
    return [(model.width, False)] * (2 if model.norm == "layernorm" and model.bias else 1)
