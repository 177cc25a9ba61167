"""Devices that a run can be planned for: memory, bandwidths, links. Matrix peaks have their owner in ``ds_gpt.config.hardware``.

Sources: the vendors' datasheets (NVIDIA A100, H100, H200, B200, L4, L40S, V100, RTX 4090; AMD MI300X). Link: bytes a second
that a GPU sends to its peers within the node, one direction. Network: the same between nodes, for a GPU of a usual
machine of that kind (DGX A100: 8 x 200 Gbit/s, DGX H100 and later: 8 x 400; PCIe servers: 2 x 100 for all).
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_gpt.config import ConfigError, Hardware, Problem
from ds_gpt.config.errors import did_you_mean
from ds_gpt.config.hardware import Precision, peak_flops

GIB, GB = 2**30, 1e9


@dataclass(frozen=True)
class Device:
    """One GPU, as the planner sees it.

    Attributes:
        name: the vendor's, as ``peak_flops`` knows it.
        memory_bytes: what the driver leaves to programs.
        bandwidth: bytes a second between the GPU and its memory.
        link: bytes a second to a peer in the node, one direction.
        network: bytes a second to other nodes for each GPU, one direction.
        host_link: bytes a second to host memory, one direction.
        per_node: GPUs in a usual node.
        bf16: whether it computes bf16 at full speed.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    link: float
    network: float
    host_link: float
    per_node: int = 8
    bf16: bool = True

    def hardware(self, devices: int) -> Hardware:
        """What the configuration needs to know."""
        return Hardware("cuda", self.name, devices, self.bf16)

    def peak(self, precision: Precision) -> float:
        """Peak matrix throughput, FLOP/s."""
        peak = peak_flops(self.name, precision)
        assert peak, f"ds_gpt.config.hardware has no peak for {self.name}"
        return peak


def _gpu(name: str, gib: float, bandwidth: float, link: float, network: float, host: float, **more: int | bool) -> Device:
    return Device(name, int(gib * GIB), bandwidth * GB, link * GB, network * GB, host * GB, **more)  # type: ignore[arg-type]


# Memory is what nvidia-smi shows as total; it is less than the name says.
DEVICES: dict[str, Device] = {
    "a100-40gb": _gpu("NVIDIA A100-SXM4-40GB", 39.4, 1555, 300, 25, 25),
    "a100-80gb": _gpu("NVIDIA A100-SXM4-80GB", 79.2, 2039, 300, 25, 25),
    "a100-40gb-pcie": _gpu("NVIDIA A100-PCIE-40GB", 39.4, 1555, 25, 3, 25),
    "a100-80gb-pcie": _gpu("NVIDIA A100 80GB PCIe", 79.2, 1935, 25, 3, 25),
    "h100": _gpu("NVIDIA H100 80GB HBM3", 79.6, 3350, 450, 50, 50),
    "h100-pcie": _gpu("NVIDIA H100 PCIe", 79.6, 2000, 50, 6, 50),
    "h200": _gpu("NVIDIA H200", 139.8, 4800, 450, 50, 50),
    "b200": _gpu("NVIDIA B200", 179.0, 8000, 900, 50, 50),
    "mi300x": _gpu("AMD Instinct MI300X", 191.5, 5300, 448, 50, 50),
    "l40s": _gpu("NVIDIA L40S", 44.5, 864, 25, 3, 25),
    "l4": _gpu("NVIDIA L4", 22.5, 300, 25, 3, 25),
    "4090": _gpu("NVIDIA GeForce RTX 4090", 23.6, 1008, 12, 1.5, 25),
    "v100": _gpu("Tesla V100-SXM2-32GB", 31.7, 900, 150, 12.5, 12, bf16=False),
}
_ALIASES = {"a100": "a100-40gb", "a100-40": "a100-40gb", "a100-80": "a100-80gb", "h100-sxm": "h100", "rtx4090": "4090", "v100-32gb": "v100"}


def device_named(name: str) -> Device:
    """The device of that name.

    Raises:
        ConfigError: there is none; the nearest name is offered.
    """
    key = name.strip().lower().replace("_", "-")
    key = _ALIASES.get(key, key)
    if key not in DEVICES:
        raise ConfigError(Problem(f"--device {name} is not known", "the plan needs its memory and its bandwidths", did_you_mean(key, [*DEVICES, *_ALIASES])))
    return DEVICES[key]
