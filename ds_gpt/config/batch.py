"""Global batch, micro-batch and accumulation steps: two are given, the third follows."""

from __future__ import annotations

from typing import Any

from ds_gpt.config.errors import Problem
from ds_gpt.config.files import ConfigFile
from ds_gpt.config.parallel import ParallelConfig
from ds_gpt.config.run import BatchConfig


def stated_number(deepspeed: ConfigFile, key: str) -> Any:
    """What the DeepSpeed config states under a key; None where it is for the run to say."""
    value = deepspeed.get(key)
    return None if value == "auto" else value


# Micro-batches a stage, from which on a pipeline hardly idles (Huang et al. 2018, section 2.3).
_MICRO_BATCHES_PER_STAGE = 4


def settle_batch(
    batch: BatchConfig, deepspeed: ConfigFile, ranks: int, parallel: ParallelConfig
) -> tuple[int, int, list[Problem]]:
    """Micro-batch and accumulation steps with micro x accumulation x data-parallel ranks = global batch.

    Where neither is given, there is no accumulation, but in a pipeline as much as keeps its stages busy.

    Args:
        batch: what the run says.
        deepspeed: what the DeepSpeed config says.
        ranks: data-parallel ranks.
        parallel: the degrees: each of these is as many ranks as share its copy of the model.
    """
    total = batch.global_batch_size
    micro: Any = batch.micro_batch_size
    if micro == "auto":
        micro = stated_number(deepspeed, "train_micro_batch_size_per_gpu")
    accumulation: Any = stated_number(deepspeed, "gradient_accumulation_steps")
    wrong = [
        Problem(f"{key} = {value!r} ({deepspeed.where(key)}) should be a positive integer or \"auto\"", fix="correct it")
        for key, value in (("train_micro_batch_size_per_gpu", micro), ("gradient_accumulation_steps", accumulation))
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1)
    ]
    if wrong:
        return 0, 0, wrong
    product = ranks * (micro or 1) * (accumulation or 1)
    settled = micro is not None and accumulation is not None
    if total % product or (settled and total != product):
        return 0, 0, [_indivisible(batch, ranks, parallel.product, micro, accumulation)]
    if micro is None:
        accumulation = accumulation or _enough(total // ranks, parallel.pipeline)
        micro = total // (ranks * accumulation)
    return micro, total // (ranks * micro), []


def _enough(share: int, stages: int) -> int:
    """Into how many micro-batches a rank's share of the global batch is divided: as few as keep all stages busy."""
    wanted = 1 if stages == 1 else min(share, _MICRO_BATCHES_PER_STAGE * stages)
    return next(number for number in range(wanted, share + 1) if share % number == 0)


def _indivisible(batch: BatchConfig, ranks: int, ranks_a_copy: int, micro: int | None, accumulation: int | None) -> Problem:
    """The batch that does not divide, with one-number remedies. Each of them works; a test tries them all."""
    total = batch.global_batch_size
    factors = f"{ranks} ranks" if ranks_a_copy == 1 else f"{ranks} data-parallel ranks ({ranks * ranks_a_copy} / {ranks_a_copy})"
    factors += f" x micro-batch {micro}" if micro else ""
    factors += f" x {accumulation} accumulation steps" if accumulation else ""
    unit = (micro or 1) * (accumulation or 1)
    multiple, exact = ranks * unit, bool(micro and accumulation)
    below = total // multiple * multiple
    sizes = [multiple] if exact or not below else [below, below + multiple]
    remedies = [f"set batch.global_batch_size to {_either(sizes)}"]
    share = total // ranks
    if micro and total % (ranks * (accumulation or 1)) == 0:
        key = "train_micro_batch_size_per_gpu" if batch.micro_batch_size == "auto" else "batch.micro_batch_size"
        remedies.append(f"{key} to {_either([share // accumulation] if accumulation else _nearest_divisors(share, micro))}")
    if accumulation and total % (ranks * (micro or 1)) == 0:
        fitting = [share // micro] if micro else _nearest_divisors(share, accumulation)
        remedies.append(f"gradient_accumulation_steps to {_either(fitting)}")
    if total % unit == 0:
        fitting = [total // unit] if exact else _nearest_divisors(total // unit, ranks)
        remedies.append(f"the number of ranks to {_either([number * ranks_a_copy for number in fitting])}")
    return Problem(
        f"batch.global_batch_size = {total} is not {factors}" + ("" if exact else " x a whole number"),
        "every rank must take the same number of whole micro-batches",
        ", or ".join(remedies),
    )


def _nearest_divisors(number: int, wanted: int) -> list[int]:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return sorted(sorted(divisors, key=lambda d: abs(d - wanted))[:4])


def _either(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))
