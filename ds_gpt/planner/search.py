"""Which settings of a run fit a device, which is fastest, and why the others are not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_gpt.config import ConfigError, Hardware, load
from ds_gpt.planner.devices import Device
from ds_gpt.planner.memory import Memory, memory_of
from ds_gpt.planner.shapes import Shapes
from ds_gpt.planner.speed import Speed, speed_of

# Not in any trace: the CUDA context and its libraries' kernels; NCCL's buffers with more than one rank. Commonly
# measured as 0.4 to 0.7 GiB and 0.3 to 0.8 GiB. The caching allocator's fragments come on top, as a share.
_CONTEXT_BYTES, _NCCL_BYTES = int(0.6 * 2**30), int(0.6 * 2**30)
_FRAGMENTS = (0.02, 0.08)
_AS_FAST = 0.98
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Candidate:
    """One setting, and what comes of it.

    Attributes:
        deepspeed_config: the JSON it starts from.
        overrides: what ``--set`` changes in it, beside the user's own.
        shapes: the run as numbers.
        memory: of one rank, allocated bytes.
        needed_bytes: the device's bytes that it takes, between these.
        headroom_bytes: what is left of the device, at the larger of them; negative where it does not fit.
        speed: of the whole run.
    """

    deepspeed_config: str
    overrides: tuple[str, ...]
    shapes: Shapes
    memory: Memory
    needed_bytes: tuple[int, int]
    headroom_bytes: int
    speed: Speed

    @property
    def fits(self) -> bool:
        """Whether it fits even if the allocator is as wasteful as it commonly gets."""
        return self.headroom_bytes >= 0

    @property
    def limiting_kind(self) -> str:
        """The kind of memory that is most of the peak."""
        return max(self.memory.peak.kinds, key=lambda kind: self.memory.peak.kinds[kind])


def judge(deepspeed_config: str, overrides: tuple[str, ...], shapes: Shapes, device: Device) -> Candidate:
    """Memory and speed of one setting."""
    memory = memory_of(shapes)
    around = _CONTEXT_BYTES + (_NCCL_BYTES if shapes.ranks > 1 else 0)
    low, high = (int(memory.peak.bytes * (1 + share)) + around for share in _FRAGMENTS)
    return Candidate(deepspeed_config, overrides, shapes, memory, (low, high), device.memory_bytes - high, speed_of(shapes, device))


def candidates(run: str, deepspeed_configs: Sequence[str], device: Device, devices: int, overrides: Sequence[str]) -> list[Candidate]:
    """Every stage that the JSONs give x micro-batch x checkpointing that the run allows, fastest first, those that fit before the rest.

    Raises:
        ConfigError: no setting can be composed; the problems are those of the first JSON.
    """
    hardware = device.hardware(devices)
    result: list[Candidate] = []
    first_error: ConfigError | None = None
    for path in deepspeed_configs:
        try:
            result += _of_one_json(run, path, hardware, device, overrides)
        except ConfigError as error:
            first_error = first_error or error
    if not result:
        assert first_error is not None
        raise first_error
    return sorted(result, key=lambda candidate: (not candidate.fits, -candidate.speed.tokens_per_s if candidate.fits else -candidate.headroom_bytes))


def recommended(found: Sequence[Candidate]) -> Candidate:
    """The fastest that fits; of those that are as fast, within what the prediction can tell, the lowest stage."""
    first = found[0]
    if not first.fits:
        return first
    as_fast = [candidate for candidate in found if candidate.fits and candidate.speed.tokens_per_s >= _AS_FAST * first.speed.tokens_per_s]
    return min(as_fast, key=lambda candidate: (candidate.shapes.stage, -candidate.speed.tokens_per_s))


def _of_one_json(run: str, path: str, hardware: Hardware, device: Device, overrides: Sequence[str]) -> list[Candidate]:
    stated = {override.partition("=")[0].strip() for override in overrides}
    alone = "batch.micro_batch_size=1"  # always composes where the global batch divides by the ranks
    composed = load(run, path, hardware, [*overrides, *([] if "batch.micro_batch_size" in stated else [alone])])
    base = Shapes.of(composed)
    share = composed.run.batch.global_batch_size // hardware.world_size
    sizes = [base.micro_batch] if "batch.micro_batch_size" in stated else sorted({size for size in (*_MICRO_BATCHES, share) if share % size == 0 and size <= 64})
    fixed = any(key == "activation_checkpointing" or key.startswith("activation_checkpointing.") for key in stated)
    policies = [base.policy] if fixed else [None, "selective", "full"]
    result = []
    for size, policy in itertools.product(sizes, policies):
        shapes = replace(base, micro_batch=size, accumulation=share // size, policy=policy)
        settings = [] if "batch.micro_batch_size" in stated else [f"batch.micro_batch_size={size}"]
        if not fixed and policy != base.policy:
            settings.append(f"activation_checkpointing.policy={policy}" if policy else "activation_checkpointing=null")
        result.append(judge(path, tuple(settings), shapes, device))
    return result
