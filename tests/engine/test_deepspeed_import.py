"""What DeepSpeed's import brings along is held back."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from ds_gpt.config import ConfigError
from ds_gpt.engine import deepspeed_import


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compilation's lock, held by another, after DeepSpeed's import."""
    monkeypatch.setattr(FileBaton, "wait", FileBaton.wait)  # put back afterwards
    deepspeed_import.import_deepspeed("cpu")
    path = tmp_path / "lock"
    assert FileBaton(str(path)).try_acquire()
    return path


def test_nobody_waits_for_a_compilation_that_was_killed(lock: Path) -> None:
    os.utime(lock, (0, time.time() - deepspeed_import.ABANDONED_S - 60))
    with pytest.raises(ConfigError, match=r"lock' is 11 minutes old\n(?s:.*)delete it"):
        FileBaton(str(lock)).wait()
    assert lock.exists(), "it may be another node's"


def test_one_that_is_under_way_is_waited_for(lock: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(deepspeed_import, "_SILENCE_S", 0.2)
    finished = threading.Timer(0.6, lock.unlink)
    start = time.monotonic()
    finished.start()
    FileBaton(str(lock)).wait()
    assert 0.5 < time.monotonic() - start < 10
    assert capfd.readouterr().err.count(f"waiting for another process to compile: '{lock}'") == 1
