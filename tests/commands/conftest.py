"""Fixtures of the command tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``text.txt`` and the cache of its tokens, made once."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    return folder


@pytest.fixture(scope="session")
def tiny(shared: Path) -> list[str]:
    """Options that make any of the shipped runs tiny."""
    settings = (
        f"data.corpus={shared / 'text.txt'}",
        f"data.cache_dir={shared / 'cache'}",
        "model.layers=1",
        "model.width=16",
        "model.heads=2",
        "model.context=16",
        "model.ffn_width=auto",
        "model.vocab_size=auto",
        "training.steps=4",
        "evaluation.every=2",
        "evaluation.sequences=8",
        "sample.tokens=8",
    )
    return [word for setting in settings for word in ("--set", setting)]


@pytest.fixture(scope="session")
def endless(tiny: list[str]) -> list[str]:
    """The same, with more steps than any test waits for, each of them logged at once."""
    settings = ("training.steps=1000000", "evaluation.every=1000000", "logging.level=DEBUG", "logging.tensorboard=false")
    return [*tiny, *(word for setting in settings for word in ("--set", setting))]
