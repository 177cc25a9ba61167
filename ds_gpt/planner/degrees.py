"""How many devices share a matrix, the blocks, a sequence: which splits of a run are worth a look."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ds_gpt.config import ModelConfig, ParallelConfig
from ds_gpt.config.deepspeed_keys import KNOWN_KEYS
from ds_gpt.config.files import lay_over, read_deepspeed_json, read_run_yaml
from ds_gpt.config.parallel import COMBINATIONS, sharing_problems
from ds_gpt.config.parse import sound_sections

ALONE = ParallelConfig()


def stated(run: str, deepspeed_config: str, overrides: Sequence[str]) -> ParallelConfig:
    """The degrees of the run YAML under ``--set``; none where they are not sound, which composing tells.

    Raises:
        ConfigError: a file cannot be read.
    """
    run_file, _, _ = lay_over(read_run_yaml(run), read_deepspeed_json(deepspeed_config), overrides, KNOWN_KEYS)
    return sound_sections(run_file).get("parallel", ALONE)


def possible(model: ModelConfig, devices: int, per_node: int) -> Iterator[ParallelConfig]:
    """Splits worth a look: powers of two that ds_gpt trains with at some ZeRO stage; tensor and sequence within a node; stages of as many blocks each."""
    powers = [2**power for power in range(devices.bit_length())]
    stages = [size for size in powers if size <= 64 and model.layers % size == 0]
    for tensor, pipeline, sequence in product(powers, stages, powers):
        degrees = ParallelConfig(tensor=tensor, pipeline=pipeline, sequence=sequence)
        if degrees.used in COMBINATIONS and tensor * sequence <= per_node and not sharing_problems(degrees, model, devices):
            yield degrees
