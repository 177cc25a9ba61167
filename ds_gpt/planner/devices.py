"""Devices that a run can be planned for, from ``devices.yaml`` and from the user's own file of the same form.

Matrix peaks of known names have their owner in ``ds_gpt.config.hardware``; a device that it does not know brings its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ds_gpt.config import ConfigError, Hardware, Problem
from ds_gpt.config.errors import did_you_mean
from ds_gpt.config.hardware import Precision, peak_flops

GIB, GB = 2**30, 1e9
_SHIPPED = Path(__file__).with_name("devices.yaml")
_ALIASES = {
    "a100": "a100-40gb", "a100-40": "a100-40gb", "a100-80": "a100-80gb", "h100-sxm": "h100", "4090": "rtx-4090", "rtx4090": "rtx-4090",
    "v100-32gb": "v100", "mi250x": "mi250", "mi300": "mi300x",
}  # fmt: skip


@dataclass(frozen=True)
class Device:
    """One device, as the planner sees it.

    Attributes:
        key: its name on the command line.
        name: the vendor's.
        memory_bytes: what the driver leaves to programs.
        bandwidth: bytes a second between the device and its memory.
        link: bytes a second to a peer in the node, one direction.
        network: bytes a second to other nodes for each device, one direction.
        host_link: bytes a second to host memory, one direction.
        host_bytes: this device's share of its machine's host memory.
        per_node: devices in a usual node.
        bf16: whether it computes bf16 at full speed.
        kind: a GPU or a CPU, as the configuration calls them.
        peaks: FLOP/s in bf16 or fp16, and in fp32.
        price: USD for an hour, where one is known.
    """

    key: str
    name: str
    memory_bytes: int
    bandwidth: float
    link: float
    network: float
    host_link: float
    host_bytes: int
    per_node: int
    bf16: bool
    kind: Literal["cuda", "cpu"]
    peaks: tuple[float, float]
    price: float | None

    def hardware(self, devices: int) -> Hardware:
        """What the configuration needs to know."""
        return Hardware(self.kind, self.name, devices, self.bf16)

    def peak(self, precision: Precision) -> float:
        """Peak matrix throughput, FLOP/s."""
        return self.peaks[precision == "fp32"]


class _Peaks(BaseModel):
    model_config = ConfigDict(extra="forbid")
    half: float = Field(gt=0)
    fp32: float = Field(gt=0)


class _Entry(BaseModel):
    """A device as the file gives it: see the head of ``devices.yaml``."""

    model_config = ConfigDict(extra="forbid")
    name: str
    kind: Literal["cuda", "cpu"] = "cuda"
    memory_gib: float = Field(gt=0, allow_inf_nan=False)
    bandwidth: float = Field(gt=0, allow_inf_nan=False)
    link: float = Field(gt=0, allow_inf_nan=False)
    network: float = Field(gt=0, allow_inf_nan=False)
    host_link: float = Field(gt=0, allow_inf_nan=False)
    host_gib: float = Field(64, gt=0, allow_inf_nan=False)
    per_node: int = Field(8, gt=0)
    bf16: bool = True
    peaks: _Peaks | None = None
    price: float | None = Field(None, ge=0, allow_inf_nan=False)


def read_devices(path: str | Path) -> dict[str, Device]:
    """The devices of a file, by their names on the command line.

    Raises:
        ConfigError: it cannot be read, or says of a device what cannot be; all problems at once.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(Problem(f"the device file '{path}' cannot be read: {error}", fix="see ds_gpt/planner/devices.yaml for its form")) from None
    if not isinstance(values, Mapping) or not values:
        raise ConfigError(Problem(f"the device file '{path}' holds no devices", fix="see ds_gpt/planner/devices.yaml for its form"))
    found: dict[str, Device] = {}
    problems: list[Problem] = []
    for key, entry in values.items():
        try:
            found[str(key).lower()] = _device(str(key).lower(), _Entry.model_validate(entry))
        except ValidationError as error:
            problems += [_problem(path, key, entry, each) for each in error.errors()]
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return found


def _problem(path: str | Path, device: str, entry: Any, error: Mapping[str, Any]) -> Problem:
    where = ".".join(map(str, (device, *error["loc"])))
    if error["type"] == "extra_forbidden":
        return Problem(f"unknown key '{where}' in the device file '{path}'", fix=did_you_mean(str(error["loc"][-1]), _Entry.model_fields))
    if error["type"] == "missing":
        return Problem(f"'{where}' is missing in the device file '{path}'", "the plan needs it", "take it from the vendor's datasheet")
    if error["type"] == "model_type":
        return Problem(f"{where} = {error['input']!r} in the device file '{path}' should be keys with values", fix="see ds_gpt/planner/devices.yaml for its form")
    return Problem(f"{where} = {error['input']!r} in the device file '{path}': {error['msg'].lower()}", fix="correct it")


def _device(key: str, entry: _Entry) -> Device:
    peaks = (entry.peaks.half * 1e12, entry.peaks.fp32 * 1e12) if entry.peaks else tuple(peak_flops(entry.name, precision) for precision in ("bf16", "fp32"))
    if None in peaks:
        raise ConfigError(
            Problem(f"the peak throughput of '{entry.name}' ({key}) is not known", "speed is a share of it", "add peaks: {half: N, fp32: N} in TFLOP/s, without sparsity")
        )
    return Device(
        key, entry.name, int(entry.memory_gib * GIB), entry.bandwidth * GB, entry.link * GB, entry.network * GB, entry.host_link * GB,
        int(entry.host_gib * GIB), entry.per_node, entry.bf16, entry.kind, peaks, entry.price,
    )  # type: ignore[arg-type]  # fmt: skip


DEVICES: dict[str, Device] = read_devices(_SHIPPED)


def device_named(name: str, known: Mapping[str, Device] = DEVICES) -> Device:
    """The device of that name.

    Raises:
        ConfigError: there is none; the nearest name is offered.
    """
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    key = key if key in known else _ALIASES.get(key, key)
    if key not in known:
        raise ConfigError(
            Problem(f"--device {name} is not known", "the plan needs its memory and its bandwidths", f"{did_you_mean(key, [*known, *_ALIASES])}; or describe it in a --device-file")
        )
    return known[key]
