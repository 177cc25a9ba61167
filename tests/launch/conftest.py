"""Fixtures of the launch tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch_scripts import StandIn


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    """A stand-in for the `deepspeed` command in a folder of its own."""
    return StandIn(tmp_path)
