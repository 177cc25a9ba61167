"""What the planner needs to know of a composed run, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ds_gpt.config import Composed, ConfigError, ModelConfig, Problem
from ds_gpt.model.counts import linear_maps, training_flops_per_token
from ds_gpt.model.stages import check_trained, stage_blocks
from ds_gpt.planner.task import PRETRAINING, Task
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
        offset: elements before it in its optimizer group (matrices, or biases and norms); of a trained one.
        matrix: which of the two groups.
        trained: whether it has a gradient and optimizer state.
    """

    name: str
    elements: int
    offset: int
    matrix: bool
    trained: bool = True


@dataclass(frozen=True)
class Shapes:
    """A run on one rank, as numbers.

    Attributes:
        model: the GPT.
        stage: ZeRO stage.
        ranks: data-parallel ranks. Devices are `tensor` x `pipeline` x `sequence` times as many.
        micro_batch: sequences a rank takes at a time; pairs of them where the task is about pairs.
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
        task: what is learned.
        length: tokens of a sequence, where the data has none that fills the model's context; None: the context.
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
    buckets: dict[str, int] = field(hash=False)
    overlap: bool
    fused: bool
    offload_optimizer: bool
    offload_weights: bool
    chunk: int | None = None
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    trainer: Trainer = DS_GPT
    task: Task = PRETRAINING
    length: int | None = None

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
            task=Task.of(composed.run),
            length=composed.item_tokens and composed.item_tokens // composed.run.sequences,
            **composed.run.parallel.model_dump(),
        )

    @property
    def rows(self) -> int:
        """Sequences of one micro-batch."""
        return self.micro_batch * self.task.sequences

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank."""
        return self.rows * self.context // self.sequence

    @property
    def context(self) -> int:
        """Tokens of a sequence."""
        return self.length or self.model.context

    @property
    def masked(self) -> bool:
        """Whether attention reads a mask: not all tokens before are seen, or not they alone."""
        window = self.model.sliding_window
        return self.task.masked or (window is not None and window < self.context)

    @property
    def vocabulary(self) -> int:
        """Rows of the head's matrix on this rank: tokens to tell apart, or the one number of a reward model."""
        if self.task.loss == "reward":
            return 1
        return self.model.vocabulary // (self.tensor if self.trainer.vocabulary_parallel else 1)

    @property
    def flops_per_token(self) -> int:
        """What the model needs to train on a token."""
        return training_flops_per_token(self.model, self.task.lora, self.task.loss == "reward", self.context)

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

    def blocks(self, stage: int) -> range:
        """Which blocks a pipeline stage has: as the engine cuts them, or as many each (Megatron)."""
        layers, stages = self.model.layers, self.pipeline
        cuts = stage_blocks(self.model, stages) if self.trainer == DS_GPT else [layers * place // stages for place in range(stages + 1)]
        return range(cuts[stage], cuts[stage + 1])

    def kinds_of_stages(self) -> list[int]:
        """One stage of each kind, the first of it, which keeps the most micro-batches.

        Raises:
            ConfigError: adapters are trained, and a stage has none.
        """
        found: dict[tuple[Any, ...], int] = {}
        for stage in range(self.pipeline):
            blocks = self.blocks(stage)
            ranks = {block: tuple(self.task.rank(block, name) for name in linear_maps(self.model)) for block in blocks if self.task.adapts}
            if self.task.adapts and self.pipeline > 1:
                check_trained(stage, self.pipeline, blocks, lambda block, ranks=ranks: any(ranks[block]))
            found.setdefault((stage == 0, stage == self.pipeline - 1, len(blocks), *ranks.values()), stage)
        return list(found.values())

    def parameters(self, stage: int = 0) -> tuple[Parameter, ...]:
        """What one pipeline stage has before ZeRO shards it, in the model's order."""
        vocabulary = self.tensor if self.trainer.vocabulary_parallel else 1
        return _parameters(self.model, self.task, self.blocks(stage), self.tensor, vocabulary, stage == 0, stage == self.pipeline - 1)


def _offloads(zero: dict[str, Any], section: str) -> bool:
    return (zero.get(section) or {}).get("device", "none") != "none"


# A module's name, of each of its parameters how many elements it has and whether it is a matrix, and whether it is trained.
Module = tuple[str, list[tuple[int, bool]], bool]


@lru_cache(maxsize=256)
def _parameters(
    model: ModelConfig, task: Task, blocks: range, tensor: int, vocabulary: int, first: bool, last: bool
) -> tuple[Parameter, ...]:
    modules = _embedding(model, vocabulary, not task.adapts) if first else []
    for block in blocks:
        modules += block_modules(model, tensor, task, block)
    modules += _tail(model, task, vocabulary, own_head=not (model.tied_head and first)) if last else []
    offsets = {True: 0, False: 0}
    result = []
    for name, sizes, trained in modules:
        for elements, matrix in sizes:
            result.append(Parameter(name, elements, offsets[matrix], matrix, trained))
            offsets[matrix] += elements if trained else 0
    return tuple(result)


def _embedding(model: ModelConfig, vocabulary: int, trained: bool) -> list[Module]:
    tokens: Module = ("tokens", [(model.vocabulary * model.width // vocabulary, True)], trained)
    positions: Module = ("positions", [(model.context * model.width, True)], trained)
    return [tokens, positions] if model.positions == "learned" else [tokens]


def block_modules(model: ModelConfig, tensor: int, task: Task, block: int) -> list[Module]:
    """The modules of a block that have parameters, in the model's order; those of an adapter follow their map.

    Tensor parallelism cuts what maps into heads and hidden units, and out of them; not the norms, nor the biases of what comes out.
    """
    trained, head = not task.adapts, model.head_width

    def linear(name: str) -> list[Module]:
        inputs, outputs = linear_maps(model)[name]
        into = name.rpartition(".")[2] in ("qkv", "gate", "up")
        bias = [(outputs // tensor if into else outputs, False)] if model.bias else []
        found: list[Module] = [(name.rpartition(".")[2], [(inputs * outputs // tensor, True), *bias], trained)]
        if (rank := task.rank(block, name)) is not None:
            a, b = rank * inputs // (1 if into else tensor), rank * outputs // (tensor if into else 1)
            found += [(f"{found[0][0]}.A", [(a, True)], True), (f"{found[0][0]}.B", [(b, True)], True)]
        return found

    attention, feed_forward = (
        [module for name in linear_maps(model) if name.startswith(part) for module in linear(name)] for part in ("attention", "feed_forward")
    )
    at_out = next(place for place, module in enumerate(attention) if module[0] == "out")
    norms: list[Module] = [("q_norm", [(head, False)], trained), ("k_norm", [(head, False)], trained)] if model.qk_norm else []
    return [
        ("attention_norm", _norm(model), trained),
        *attention[:at_out], *norms, *attention[at_out:],
        ("feed_forward_norm", _norm(model), trained),
        *feed_forward,
    ]  # fmt: skip


@lru_cache(maxsize=64)
def block_places(model: ModelConfig, tensor: int, task: Task, blocks: range) -> tuple[dict[str, range], ...]:
    """Of each block: which of its parameters a module has, counted from the block's first."""
    result = []
    for block in blocks:
        places, count = {}, 0
        for name, sizes, _ in block_modules(model, tensor, task, block):
            places[name] = range(count, count + len(sizes))
            count += len(sizes)
        result.append(places)
    return tuple(result)


def _tail(model: ModelConfig, task: Task, vocabulary: int, own_head: bool) -> list[Module]:
    """The head's matrix is one of its own where it is not tied, or where the stage that it is tied to is another."""
    norm: Module = ("norm", _norm(model), not task.adapts)
    if task.loss == "reward":
        return [norm, ("head", [(model.width, True)], True)]
    return [norm, *([("head", [(model.vocabulary * model.width // vocabulary, True)], not task.adapts)] if own_head else [])]


def _norm(model: ModelConfig) -> list[tuple[int, bool]]:
    return [(model.width, False)] * (2 if model.norm == "layernorm" and model.bias else 1)
