"""Out of memory: what was asked for, what the memory holds, and which settings need less, by stated arithmetic.

Predictions are of one rank and of the peak of a training step: its share of the training state, and the activations
that are kept for backward. Buffers, fragments and the CUDA context come on top; what was measured shows how much.
"""

from __future__ import annotations

import re
import resource
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ds_gpt.config import Composed, ConfigError, Problem
from ds_gpt.config.compose import compose
from ds_gpt.config.deepspeed_keys import KNOWN_KEYS
from ds_gpt.config.files import ConfigFile, apply_overrides
from ds_gpt.model.counts import block_parameters, parameters, trained_parameters

_OTHER_WORDS = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_WORTH = 0.01  # of the need; what saves less is not worth a line
_MARGIN = 0.92  # of a GPU's memory is what buffers, fragments and the context usually leave for the rest


class OutOfMemory(Exception):
    """The error as a person can use it; its text needs no traceback."""


@dataclass(frozen=True)
class Needs:
    """Bytes of one rank at the peak of a step, by kind."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations


def needs(composed: Composed) -> Needs:
    """What a step needs on the device by arithmetic; what is offloaded is in the host's memory and not counted.

    Pipeline stages are taken to have equal parts of the model; tensor-parallel ranks share the blocks.
    """
    run, zero, ranks = composed.run, composed.deepspeed["zero_optimization"], _sharding_ranks(composed)
    stage, half = composed.zero_stage, composed.precision != "fp32"
    blocks = run.model.layers * block_parameters(run.model)
    count = (parameters(run.model) - blocks + blocks / run.parallel.tensor) / run.parallel.pipeline
    trained = count * trained_parameters(run) / parameters(run.model)
    weight = 2 if half else 4
    gradient = 4 if composed.deepspeed.get("data_types", {}).get("grad_accum_dtype") == "fp32" else weight
    master = 4 if half or stage in (1, 2) else 0  # in fp32, stages 1 and 2 keep their share of the weights once more
    moments = 8 if run.optimizer.name == "adamw" else 0
    on_device = {key: (zero.get(key) or {}).get("device", "none") == "none" or composed.hardware.kind == "cpu" for key in ("offload_optimizer", "offload_param")}
    return Needs(
        weights=count * weight / (ranks if stage == 3 else 1) * on_device["offload_param"],
        gradients=trained * gradient / (ranks if stage >= 2 else 1),
        optimizer=trained * (master + moments) / (ranks if stage >= 1 else 1) * on_device["offload_optimizer"],
        activations=_activations(composed, weight),
    )


def _sharding_ranks(composed: Composed) -> int:
    """Over how many ranks ZeRO splits: DeepSpeed takes those that share sequences for data-parallel ones."""
    return composed.data_ranks * composed.run.parallel.sequence


def _activations(composed: Composed, value_bytes: int) -> float:
    """Kept for backward by one micro-batch; in a pipeline's first stage, by as many as there are stages.

    A block without checkpointing keeps 6 D + 2 GK + 2 F values a token: its input, two norms' results, queries, keys
    and values, attention's result, the residual stream, and the feed-forward's hidden values before and after the
    GELU; SwiGLU has 4 F. Selective keeps the block's input and the results of multiplications and attention; full the
    input, D, and one block whole while it is recomputed. The last norm keeps its input and result, 2 D. The loss keeps
    log-probabilities, their gradient and the logits', fp32, of as many tokens as go at a time, and where it takes
    several times, the gradients of its input and of its matrix. Masks of dropout, a byte for two or four of its values,
    are not counted. Of tensor-parallel ranks, each has its share of heads and hidden values; the other 4 D are whole.
    """
    model, run = composed.run.model, composed.run
    width, hidden, tokens = model.width, model.hidden_width, composed.micro_batch_size * run.sequences * model.context // run.parallel.sequence
    layers = model.layers / run.parallel.pipeline * min(run.parallel.pipeline, composed.accumulation_steps)
    heads = (2 * width + 2 * model.key_heads * model.head_width) / run.parallel.tensor
    hidden *= (2 if model.ffn == "swiglu" else 1) / run.parallel.tensor
    whole = 4 * width + heads + 2 * hidden
    kept = {None: layers * whole, "selective": layers * (3 * width + heads + hidden) + whole, "full": layers * width + whole}
    chunk = min(tokens, run.loss_chunk_tokens)
    loss = chunk * model.vocabulary * 3 * 4
    if chunk < tokens:
        loss += tokens * width * value_bytes + model.vocabulary * width * 4
    return tokens * (kept[composed.checkpoint_policy] + 2 * width) * value_bytes + loss


def check_host_memory(composed: Composed, local_ranks: int, memory_bytes: int) -> None:
    """Refuse a model whose training state alone is more than a CPU machine has: the kernel would end processes at will.

    Args:
        composed: the run.
        local_ranks: ranks on this machine.
        memory_bytes: the machine's memory.

    Raises:
        ConfigError: the state does not fit.
    """
    if composed.hardware.kind != "cpu":
        return
    one = needs(composed)
    state_bytes = local_ranks * (one.weights + one.gradients + one.optimizer)
    if state_bytes > memory_bytes:
        raise ConfigError(
            Problem(
                f"{local_ranks} ranks of this model need {state_bytes / 2**30:.1f} GiB for weights, gradients and optimizer; "
                f"this machine has {memory_bytes / 2**30:.1f} GiB, and no GPU was found",
                f"{parameters(composed.run.model):,} parameters at ZeRO stage {composed.zero_stage} in {composed.precision}",
                "run it on GPUs; or here with fewer ranks, a higher zero_optimization.stage, or a smaller model (--set model.layers=2)",
            )
        )


@dataclass(frozen=True)
class Remedy:
    """Settings that need less memory.

    Attributes:
        settings: for ``--set`` each.
        text: what they change, and what that costs.
        needs: what a step then needs.
    """

    settings: tuple[str, ...]
    text: str
    needs: Needs


def remedies(composed: Composed) -> list[Remedy]:
    """What needs less, the cheapest first, each by itself; only what can be composed and saves something."""
    now, found = needs(composed).total, []
    for settings, text in _candidates(composed):
        try:
            changed = _recomposed(composed, settings)
        except ConfigError:
            continue
        if (then := needs(changed)).total < (1 - _WORTH) * now:
            found.append(Remedy(settings, text, then))
    return found


def _candidates(composed: Composed) -> Iterator[tuple[tuple[str, ...], str]]:
    ranks, total, stage = composed.data_ranks, composed.run.batch.global_batch_size, composed.zero_stage
    smaller = [size for size in range(composed.micro_batch_size - 1, 0, -1) if total % (ranks * size) == 0]
    for micro in _halves(smaller, composed.micro_batch_size):
        steps = total // (ranks * micro)
        settings = [f"train_micro_batch_size_per_gpu={micro}"] if _stated_in_json(composed, "train_micro_batch_size_per_gpu") else []
        if not settings or composed.run.batch.micro_batch_size != "auto":
            settings.append(f"batch.micro_batch_size={micro}")
        if _stated_in_json(composed, "gradient_accumulation_steps"):
            settings.append(f"gradient_accumulation_steps={steps}")
        yield tuple(settings), f"{steps} accumulation steps instead of {composed.accumulation_steps}: the same global batch and result"
    if composed.checkpoint_policy is None:
        yield ("activation_checkpointing.policy=selective",), "norms, GELU and dropout are computed again in backward: a few percent slower"
    if composed.checkpoint_policy != "full":
        yield ("activation_checkpointing.policy=full",), "each block is computed again in backward: about a third slower"
    ranks = _sharding_ranks(composed)
    for higher in range(stage + 1, 4 if ranks > 1 else 1):
        costs = "more communication, within a node hardly slower" if higher < 3 else "half as much communication again"
        yield (f"zero_optimization.stage={higher}",), f"{('', 'optimizer', 'gradients too', 'weights too')[higher]} split over {ranks} ranks: {costs}"
    if composed.hardware.kind == "cuda":  # on a CPU it is the same memory
        optimizer, weights = "zero_optimization.offload_optimizer.device=cpu", "zero_optimization.offload_param.device=cpu"
        yield (optimizer,) if stage >= 2 else ("zero_optimization.stage=2", optimizer), "the optimizer in the host's memory: slower"
        yield (optimizer, weights) if stage == 3 else ("zero_optimization.stage=3", optimizer, weights), "weights too in the host's memory: a good deal slower"


def _halves(smaller: list[int], size: int) -> list[int]:
    """Of the smaller micro-batches, from large to small: a half or less of `size`, of that again, once more, and the least."""
    kept: list[int] = []
    for candidate in smaller:
        if candidate * 2 <= (kept[-1] if kept else size) or candidate == smaller[-1]:
            kept.append(candidate)
    return list(dict.fromkeys([*kept[:3], *kept[-1:]]))


def _stated_in_json(composed: Composed, key: str) -> bool:
    return composed.owners.get(key, "").startswith("DeepSpeed config")


def _recomposed(composed: Composed, settings: Iterable[str]) -> Composed:
    """The same run with other settings, checked as any run is. Raises ConfigError."""
    # The run has the global batch; where ranks share sequences, what DeepSpeed was given for it is another number.
    values = {**composed.deepspeed, "optimizer": "auto", "train_batch_size": "auto"}
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if not _stated_in_json(composed, key):
            values[key] = "auto"
    if not _stated_in_json(composed, "data_types.grad_accum_dtype"):
        values["data_types"] = {**values.get("data_types", {}), "grad_accum_dtype": "auto"}
    if composed.checkpoint_policy:
        values["activation_checkpointing"] = {**values["activation_checkpointing"], "policy": composed.checkpoint_policy}
    files = ConfigFile(Path("run.yaml"), composed.run.model_dump(mode="json")), ConfigFile(Path("deepspeed.json"), values)
    return compose(*apply_overrides(*files, settings, KNOWN_KEYS), composed.hardware)


@contextmanager
def explained(composed: Composed, rank: int) -> Iterator[None]:
    """Turn running out of memory inside into an `OutOfMemory` that explains it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _OTHER_WORDS.search(str(error)):
            raise
        raise OutOfMemory(explanation(composed, rank, error, peak_bytes(composed))) from None


def peak_bytes(composed: Composed) -> int:
    """The most that this rank has used: allocated tensors on a GPU; on a CPU the process's resident set."""
    if composed.hardware.kind == "cuda" and "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        return sys.modules["torch"].cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts it in KiB


def explanation(composed: Composed, rank: int, error: BaseException, peak: int) -> str:
    """The message. Sizes are of this rank."""
    asked, capacity, free = _sizes(str(error))
    now, run = needs(composed), composed.run
    ranks, stage = composed.hardware.world_size, composed.zero_stage
    wanted = f" while asking for {_size(asked)}" if asked else ""
    left = f"; of {_size(capacity)}, {_size(free)} were free" if capacity is not None and free is not None else ""
    lines = [
        "",
        f"ds_gpt: out of memory on rank {rank} of {ranks}{wanted}{left}",
        f"in: {_place(error)}",
        "",
        f"what a step needs on each of {ranks} ranks, {parameters(run.model):,} parameters in {composed.precision} at ZeRO stage {stage}:",
        f"  weights      {_size(now.weights):>10}",
        f"  gradients    {_size(now.gradients):>10}",
        f"  optimizer    {_size(now.optimizer):>10}",
        f"  activations  {_size(now.activations):>10}   micro-batch {composed.micro_batch_size} x {run.model.context} tokens,"
        f" checkpointing {composed.checkpoint_policy or 'off'}",
        f"  together     {_size(now.total):>10}   by arithmetic; measured at its peak so far: {_size(peak)}"
        f" ({'tensors' if composed.hardware.kind == 'cuda' else 'the process with its libraries'}); the rest is buffers and allocator",
    ]
    found = remedies(composed)
    if found:
        lines += ["", "do:  add one of these, the cheapest first, or several (predicted saving on each rank):"]
        fits = next((remedy for remedy in found if capacity and remedy.needs.total <= _MARGIN * capacity), None)
        width = max(len(_flags(remedy)) for remedy in found)
        for remedy in found:
            enough = "   <- the first that should fit" if remedy is fits else ""
            lines.append(f"  {_flags(remedy):<{width}}  -{_size(now.total - remedy.needs.total)}: {remedy.text}{enough}")
        if capacity and fits is None:
            lines.append(f"  none of them alone fits into {_size(capacity)} by this arithmetic: combine them, take more GPUs, or a smaller model")
    else:
        lines += ["", "do:  nothing that ds_gpt can set would need less here: a smaller model or context, more ranks, or a machine with more memory"]
    return "\n".join([*lines, ""])


def _flags(remedy: Remedy) -> str:
    return " ".join(f"--set {setting}" for setting in remedy.settings)


def _sizes(text: str) -> tuple[float | None, float | None, float | None]:
    """Bytes asked for, in all, and free, as far as the allocator says."""
    number = r"([\d.]+) (bytes|KiB|MiB|GiB)"

    def find(pattern: str) -> float | None:
        found = re.search(pattern, text)
        return float(found[1]) * _UNITS[found[2]] if found else None

    return find(rf"[Tt]ried to allocate {number}"), find(rf"total capacity of {number}"), find(rf"of which {number} is free")


def _place(error: BaseException) -> str:
    """The innermost line of ds_gpt, or else of anything, that was being executed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "ds_gpt" in Path(frame.filename).parts and Path(frame.filename) != Path(__file__)]
    if not frames:
        return str(error).splitlines()[0]
    frame = (ours or frames)[-1]
    name = Path(frame.filename)
    return f"{'/'.join(name.parts[-3:])}:{frame.lineno}, {frame.name}: {frame.line}"


def _size(size_bytes: float) -> str:
    for unit in ("GiB", "MiB"):
        if size_bytes >= _UNITS[unit]:
            return f"{size_bytes / _UNITS[unit]:.2f} {unit}"
    return f"{size_bytes / 1024:.1f} KiB"
