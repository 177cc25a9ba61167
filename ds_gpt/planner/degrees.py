"""How many devices share a matrix, the blocks, a sequence: which splits of a run are possible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ds_gpt.config import ConfigError, ModelConfig, Problem


@dataclass(frozen=True)
class Degrees:
    """Devices that share one copy of the model.

    Attributes:
        tensor: that share each matrix of a block.
        pipeline: that share the blocks.
        sequence: that share each sequence (Ulysses).
    """

    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1

    @property
    def product(self) -> int:
        """Devices of one data-parallel rank."""
        return self.tensor * self.pipeline * self.sequence

    def __str__(self) -> str:
        parts = [f"{name} {size}" for name, size in vars(self).items() if size > 1]
        return " x ".join(parts) or "data parallel alone"


ALONE = Degrees()


def check(degrees: Degrees, model: ModelConfig, devices: int) -> None:
    """Say what makes a split impossible.

    Raises:
        ConfigError: with every reason.
    """
    problems = [Problem(f"--{name} {size} is not a number of devices", fix="give 1 or more") for name, size in vars(degrees).items() if size < 1]
    if problems:
        raise ConfigError(problems)
    if devices % degrees.product:
        problems.append(Problem(f"{devices} devices are not a whole number of times {degrees}", "every copy of the model takes as many devices", f"a product that divides {devices}"))
    if model.heads % (degrees.tensor * degrees.sequence):
        problems.append(
            Problem(
                f"model.heads = {model.heads} is not a multiple of tensor {degrees.tensor} x sequence {degrees.sequence}",
                "each device computes whole heads", f"degrees whose product divides {model.heads}",
            )
        )  # fmt: skip
    elif model.key_heads % (degrees.tensor * degrees.sequence):
        problems.append(
            Problem(
                f"the {model.key_heads} heads of keys (model.kv_heads) are not a multiple of tensor {degrees.tensor} x sequence {degrees.sequence}",
                "each device computes whole groups", f"degrees whose product divides {model.key_heads}",
            )
        )  # fmt: skip
    if model.hidden_width % degrees.tensor:
        problems.append(Problem(f"the feed-forward width {model.hidden_width} is not a multiple of tensor {degrees.tensor}", "its columns are shared out", "change either"))
    if degrees.pipeline > model.layers:
        problems.append(Problem(f"pipeline {degrees.pipeline} is more than model.layers = {model.layers}", "a stage has at least one block", f"at most {model.layers}"))
    if model.context % degrees.sequence:
        problems.append(Problem(f"model.context = {model.context} is not a multiple of sequence {degrees.sequence}", "each device takes as many tokens", "change either"))
    if problems:
        raise ConfigError(problems)


def possible(model: ModelConfig, devices: int, per_node: int) -> Iterator[Degrees]:
    """Splits worth a look: powers of two; tensor and sequence within a node; stages of as many blocks each; sequence on its own."""
    powers = [2**power for power in range(devices.bit_length())]
    for tensor in (size for size in powers if size <= per_node):
        for pipeline in (size for size in powers if size <= 64 and model.layers % size == 0):
            yield from _sound(Degrees(tensor, pipeline), model, devices)
    for sequence in (size for size in powers if 1 < size <= per_node):
        yield from _sound(Degrees(sequence=sequence), model, devices)


def _sound(degrees: Degrees, model: ModelConfig, devices: int) -> Iterator[Degrees]:
    try:
        check(degrees, model, devices)
    except ConfigError:
        return
    yield degrees
