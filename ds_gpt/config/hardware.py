"""What a configuration needs to know about the machine it will run on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "bf16", "fp16"]

# Peak dense matrix throughput, FLOP/s: (bf16 or fp16 tensor cores, fp32 as ds_gpt runs it, that is TF32 where the
# device has it). Vendor datasheets, without sparsity; SXM parts unless the name says otherwise.
# Looked up by the first name that the device's own name contains as whole words ("RTX A4000" is no A40), longer names first.
_PEAK_FLOPS: tuple[tuple[str, float, float], ...] = (
    ("A100", 312e12, 156e12),
    ("A800", 312e12, 156e12),
    ("H100 PCIe", 756e12, 378e12),
    ("H100 NVL", 835e12, 417e12),
    ("H100", 989e12, 494e12),
    ("H800", 989e12, 494e12),
    ("H200", 989e12, 494e12),
    ("GH200", 989e12, 494e12),
    ("B200", 2250e12, 1100e12),
    ("L40S", 362e12, 183e12),
    ("L40", 181e12, 90.5e12),
    ("L4", 121e12, 60e12),
    ("A10G", 70e12, 35e12),
    ("A10", 125e12, 62.5e12),
    ("A40", 149.7e12, 74.8e12),
    ("A6000", 154.8e12, 77.4e12),
    ("V100", 125e12, 15.7e12),
    ("T4", 65e12, 8.1e12),
    ("RTX 4090", 165.2e12, 82.6e12),
    ("RTX 3090", 71e12, 35.6e12),
    ("MI300X", 1307e12, 654e12),
    ("MI250", 181e12, 45.3e12),  # one of a card's two devices
    ("MI250X", 191.5e12, 47.9e12),
)


@dataclass(frozen=True)
class Hardware:
    """The devices of a run, as one rank sees them.

    Attributes:
        kind: ``"cuda"`` or ``"cpu"``.
        name: the device's own name, for example ``"NVIDIA A100-SXM4-40GB"``.
        world_size: number of ranks.
        bf16: whether the device computes bf16 at full speed.
    """

    kind: Literal["cuda", "cpu"]
    name: str
    world_size: int
    bf16: bool


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """Peak matrix throughput of a device in FLOP/s, or None where it is not known (it is never guessed)."""
    for name, half, single in _PEAK_FLOPS:
        if re.search(rf"(?<![A-Za-z0-9]){name}(?![A-Za-z0-9])", device_name):
            return single if precision == "fp32" else half
    return None
