"""Fixtures of the config tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A valid pair of files in a folder of its own."""
    return Bench(tmp_path)


@pytest.fixture
def merged() -> Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]:
    """A deep copy of the first dictionary with the second laid over it."""

    def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
        result = {**base}
        for key, value in over.items():
            result[key] = merge(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        return result

    return merge
