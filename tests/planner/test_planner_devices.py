"""Devices: the shipped ones, the user's, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_gpt.config import ConfigError
from ds_gpt.planner.devices import DEVICES, GIB, device_named, read_devices

MINE = "mine: {name: My GPU, memory_gib: 10, bandwidth: 100, link: 10, network: 1, host_link: 5, peaks: {half: 50, fp32: 25}}\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "devices.yaml"
    path.write_text(text)
    return path


def test_the_devices_of_the_plan_are_there() -> None:
    wanted = {"a100-40gb", "a100-80gb", "a100-40gb-pcie", "a100-80gb-pcie", "h100", "h100-pcie", "h200", "b200", "mi250", "mi300x", "rtx-4090", "v100-16gb", "v100", "cpu"}
    assert wanted <= set(DEVICES)


def test_a_device_of_ones_own(tmp_path: Path) -> None:
    device = read_devices(written(tmp_path, MINE))["mine"]
    assert (device.memory_bytes, device.peak("bf16"), device.peak("fp32"), device.kind) == (10 * GIB, 50e12, 25e12, "cuda")
    assert device_named("Mine", {"mine": device}) is device


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("memory_gib: 10", "memory_gib: 0"), "mine.memory_gib = 0 .*greater than 0"),
        (("bandwidth: 100", "bandwith: 100"), "unknown key 'mine.bandwith'.*\n.*did you mean 'bandwidth'"),
        ((", link: 10", ""), "'mine.link' is missing"),
        ((", peaks: {half: 50, fp32: 25}", ""), "the peak throughput of 'My GPU' .* is not known"),
        (("{name", "[name"), "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_devices(written(tmp_path, MINE.replace(*change)))


def test_a_device_that_is_no_section(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mine = 3 in the device file .* should be keys with values"):
        read_devices(written(tmp_path, "mine: 3"))


def test_all_problems_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_devices(written(tmp_path, MINE.replace("memory_gib: 10", "memory_gib: -1").replace(", link: 10", "")))
    assert len(caught.value.problems) == 2


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_devices(tmp_path / "none.yaml")


def test_other_names_of_a_device() -> None:
    assert device_named("A100").key == "a100-40gb" and device_named("RTX_4090").key == device_named("4090").key == "rtx-4090"
