"""The devices of this machine, asked of its driver: importing torch to see that there is no GPU would take seconds."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass

from ds_gpt.config import ConfigError, Hardware, Problem


@dataclass(frozen=True)
class Machine:
    """What cases can run on here.

    Attributes:
        kind: ``cuda`` or ``cpu``.
        name: of the device.
        devices: how many ranks can have one of their own: GPUs, or CPU cores.
        bf16: whether it computes bf16 at full speed.
        driver: version of the GPU's driver.
    """

    kind: str
    name: str
    devices: int
    bf16: bool
    driver: str | None

    def hardware(self, ranks: int) -> Hardware:
        """The same, as a configuration is composed for it."""
        return Hardware(self.kind, self.name, ranks, self.bf16)


def here(prefer: str) -> Machine:
    """This machine; `prefer` is the suite's device, and ``cpu`` leaves GPUs alone."""
    gpus = [] if prefer == "cpu" else _gpus()
    if gpus:
        name, capability, driver = gpus[0]
        return Machine("cuda", name, len(gpus), float(capability) >= 8.0, driver)
    return Machine("cpu", platform.processor() or "CPU", len(os.sched_getaffinity(0)), False, None)


def check(machine: Machine, suite: str, device: str) -> None:
    """Refuse a suite that this machine cannot run.

    Raises:
        ConfigError: it needs a GPU, or another one.
    """
    if device in ("cpu", "any") or (device == "cuda" and machine.kind == "cuda") or (machine.kind == "cuda" and device in machine.name):
        return
    wanted = "a GPU" if device == "cuda" else f"an {device} GPU"
    found = "none" if machine.kind == "cpu" else f"a {machine.name}"
    raise ConfigError(
        Problem(
            f"suite '{suite}' needs {wanted}, and this machine has {found}",
            "numbers are measured, never made up",
            f"list its cases with --suite {suite} --dry-run, predict them with ds-gpt plan, or take --suite {'cpu' if machine.kind == 'cpu' else 'single_gpu'}",
        )
    )


def _gpus() -> list[tuple[str, str, str]]:
    """Name, compute capability and driver version of each GPU that may be used."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    command = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [tuple(part.strip() for part in line.split(",")) for line in lines][: len(visible.split(",")) if visible else None]
