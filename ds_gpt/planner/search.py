"""Which settings of a run fit a device, which is fastest, and which device would be cheapest."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ds_gpt.config import Composed, ConfigError, Hardware, ParallelConfig, Problem, load
from ds_gpt.config.parallel import proved, sharing_problems
from ds_gpt.planner.degrees import stated as stated_degrees
from ds_gpt.planner.devices import Device
from ds_gpt.planner.memory import Memory, memory_of
from ds_gpt.planner.shapes import Shapes
from ds_gpt.planner.speed import Speed, speed_of
from ds_gpt.planner.vocabulary import settled

# Not in any trace: the CUDA context and its libraries' kernels; NCCL's buffers with more than one rank. Commonly measured as 0.4 to
# 0.7 GiB and 0.3 to 0.8 GiB. The caching allocator's fragments come on top, as a share: of 140 published runs that ran, none would
# be refused by it.
_CONTEXT_BYTES, _NCCL_BYTES = int(0.6 * 2**30), int(0.6 * 2**30)
_FRAGMENTS = (0.02, 0.08)
# What the driver shows beyond what is allocated: a caching allocator keeps what was freed, and gives it back only when it must. The median of
# published runs whose memory was read off an A100 (``python -m benchmarks planner``).
CACHED = 0.16
_AS_FAST = 0.98
HOST = "host memory"
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
WITHOUT_DEGREES = tuple(f"parallel.{name}=1" for name in ParallelConfig.model_fields)


@dataclass(frozen=True)
class Candidate:
    """One setting, and what comes of it.

    Attributes:
        deepspeed_config: the JSON it starts from.
        overrides: what ``--set`` changes in it, beside the user's own.
        shapes: the run as numbers.
        memory: of one rank, allocated bytes.
        needed_bytes: the device's bytes that it takes, between these.
        headroom_bytes: what is left of the device, at the larger of them, or of its share of host memory where that is less; negative where
            it does not fit.
        host_is_short: whether it is host memory.
        speed: of the whole run.
    """

    deepspeed_config: str
    overrides: tuple[str, ...]
    shapes: Shapes
    memory: Memory
    needed_bytes: tuple[int, int]
    headroom_bytes: int
    host_is_short: bool
    speed: Speed

    @property
    def fits(self) -> bool:
        """Whether it fits even if the allocator is as wasteful as it commonly gets."""
        return self.headroom_bytes >= 0

    @property
    def shown_bytes(self) -> int:
        """What the driver will show, about: cached memory is in use for it."""
        return int(self.memory.peak.bytes * (1 + CACHED)) + around_bytes(self.shapes.devices)

    @property
    def degrees(self) -> ParallelConfig:
        """Devices that share one copy of the model."""
        return ParallelConfig(tensor=self.shapes.tensor, pipeline=self.shapes.pipeline, sequence=self.shapes.sequence)

    @property
    def on_paper(self) -> bool:
        """Whether ds_gpt refuses to train with it: these degrees at this ZeRO stage."""
        return not proved(self.degrees, self.shapes.stage)

    @property
    def limiting_kind(self) -> str:
        """The kind of memory that is most of what is short."""
        return HOST if self.host_is_short else max(self.memory.peak.kinds, key=lambda kind: self.memory.peak.kinds[kind])

    @property
    def limiting_bytes(self) -> int:
        """How much there is of it."""
        return self.memory.host_bytes if self.host_is_short else self.memory.peak.kinds[self.limiting_kind]


def around_bytes(devices: int) -> int:
    """The CUDA context, and NCCL where there is anyone to talk to."""
    return _CONTEXT_BYTES + (_NCCL_BYTES if devices > 1 else 0)


def judge(deepspeed_config: str, overrides: tuple[str, ...], shapes: Shapes, device: Device) -> Candidate:
    """Memory and speed of one setting."""
    memory = memory_of(shapes)
    if device.kind == "cpu":  # no context, and what is offloaded stays in the same memory
        low, high = (int((memory.peak.bytes + memory.host_bytes) * (1 + share)) for share in _FRAGMENTS)
    else:
        low, high = (int(memory.peak.bytes * (1 + share)) + around_bytes(shapes.devices) for share in _FRAGMENTS)
    headroom = device.memory_bytes - high
    host_headroom = device.host_bytes - memory.host_bytes if memory.host_bytes and device.kind == "cuda" else headroom
    short = host_headroom < 0 and host_headroom < headroom
    return Candidate(deepspeed_config, overrides, shapes, memory, (low, high), min(headroom, host_headroom), short, speed_of(shapes, device))


def candidates(
    run: str, deepspeed_configs: Sequence[str], device: Device, devices: int, overrides: Sequence[str], splits: Iterable[ParallelConfig] | None = None
) -> list[Candidate]:
    """Every setting that the run allows: DeepSpeed JSON x `splits` x micro-batch x checkpointing; fastest first, what fits before the rest.

    Without `splits`, the degrees are the run's own.

    Raises:
        ConfigError: no setting can be composed; the problems are those of the first.
    """
    result: list[Candidate] = []
    first_error: ConfigError | None = None
    own = stated_degrees(run, deepspeed_configs[0], overrides)
    for degrees, path in itertools.product([own] if splits is None else splits, deepspeed_configs):
        chosen = tuple(f"parallel.{name}={size}" for name, size in degrees if size != getattr(own, name))
        try:
            result += _of_one_json(run, path, device, devices, overrides, degrees, chosen)
        except ConfigError as error:
            first_error = first_error or error
    if not result:
        assert first_error is not None
        raise first_error
    return ranked(result)


def ranked(found: Iterable[Candidate]) -> list[Candidate]:
    """Fastest first, what fits before the rest, which is by how little is missing."""
    return sorted(found, key=lambda candidate: (not candidate.fits, -candidate.speed.tokens_per_s if candidate.fits else -candidate.headroom_bytes))


def recommended(found: Sequence[Candidate]) -> Candidate:
    """Of what `ranked` gave, the fastest that fits, where any does one that ds_gpt can run; of those that are as fast, within what the
    prediction can tell, the one that splits and shards least."""
    fitting = [candidate for candidate in found if candidate.fits]
    if not fitting:
        return found[0]
    pool = [candidate for candidate in fitting if not candidate.on_paper] or fitting
    as_fast = [candidate for candidate in pool if candidate.speed.tokens_per_s >= _AS_FAST * pool[0].speed.tokens_per_s]
    return min(as_fast, key=lambda candidate: (candidate.degrees.product, candidate.shapes.stage, -candidate.speed.tokens_per_s))


def cheapest(
    run: str, deepspeed_configs: Sequence[str], known: Iterable[Device], devices: int, overrides: Sequence[str], degrees: ParallelConfig
) -> list[tuple[float, Device, Candidate]]:
    """USD of the run's million tokens, device and best setting, for each device whose price is known and that it fits with these degrees; cheapest first."""
    found = []
    for device in known:
        if device.price is None:
            continue
        best = recommended(candidates(run, deepspeed_configs, device, devices, overrides, [degrees]))
        if best.fits:
            found.append((device.price * devices / 3600 / best.speed.tokens_per_s * 1e6, device, best))
    return sorted(found, key=lambda item: item[0])


def composed(run: str, path: str, hardware: Hardware, overrides: Sequence[str]) -> Composed:
    """The run on so many ranks; where nobody states a micro-batch, of one sequence, which composes wherever any does."""
    stated = _keys(overrides)
    return settled(load(run, path, hardware, [*overrides, *([] if "batch.micro_batch_size" in stated else ["batch.micro_batch_size=1"])]))


def _keys(overrides: Sequence[str]) -> set[str]:
    return {override.partition("=")[0].strip() for override in overrides}


def _of_one_json(
    run: str, path: str, device: Device, devices: int, overrides: Sequence[str], degrees: ParallelConfig, chosen: tuple[str, ...]
) -> list[Candidate]:
    """`chosen`: what ``--set`` makes the degrees of the run's own."""
    stated = _keys(overrides)
    ranks = max(1, devices // degrees.product)
    whole = composed(run, path, device.hardware(ranks), [*overrides, *WITHOUT_DEGREES])
    impossible = sharing_problems(degrees, whole.run.model, devices)
    if impossible:
        raise ConfigError(impossible)
    if proved(degrees, whole.zero_stage):
        whole = composed(run, path, device.hardware(devices), [*overrides, *chosen])
    elif degrees.pipeline > 1 and whole.zero_stage > 1:
        raise ConfigError(Problem(f"pipeline {degrees.pipeline} with ZeRO {whole.zero_stage} ({path})", "DeepSpeed's pipeline keeps gradients whole", "use ZeRO 1"))
    base = replace(Shapes.of(whole), ranks=ranks, **degrees.model_dump())
    share = whole.run.batch.global_batch_size // ranks
    fixed_size = "batch.micro_batch_size" in stated
    sizes = [base.micro_batch] if fixed_size else sorted({size for size in (*_MICRO_BATCHES, share) if share % size == 0 and size <= 64})
    fixed = any(key == "activation_checkpointing" or key.startswith("activation_checkpointing.") for key in stated)
    policies = [base.policy] if fixed else [None, "selective", "full"]
    result = []
    for size, policy in itertools.product(sizes, policies):
        shapes = replace(base, micro_batch=size, accumulation=share // size, policy=policy)
        settings = [*chosen] if fixed_size else [*chosen, f"batch.micro_batch_size={size}"]
        if not fixed and policy != base.policy:
            settings.append(f"activation_checkpointing.policy={policy}" if policy else "activation_checkpointing=null")
        result.append(judge(path, tuple(settings), shapes, device))
    return result
