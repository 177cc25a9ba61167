"""What others published of runs like these: to stand beside what is measured here, never among it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A row as it was published; empty where it does not say."""

    what: str
    devices: str
    tokens_per_s: str
    peak: str
    note: str


ROWS = (
    Published(
        "1.011B parameters, context 2048, 131,072 tokens a step",
        "8 x A100-40GB",
        "58,300",
        "27.66 GiB",
        "plain DistributedDataParallel, fp32 weights, autocast; ds_configs/runs/gpt_1b.yaml is this run",
    ),
    Published(
        "about 10M parameters, context 256, 16,384 tokens a step",
        "1 x A100",
        "about 15,000",
        "about 5 GB",
        "the same project's single-GPU row; ds_configs/runs/shakespeare_char.yaml is this run",
    ),
)
