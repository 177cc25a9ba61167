"""Files that appear whole or not at all: what a reader, a crash and a power cut see of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds_gpt.data.replacing import replace_text, replacing


def test_content_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of fsync and rename is what a power cut would show."""
    log: list[str] = []
    fsync, replace = os.fsync, os.replace

    def logged_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        log.append("sync folder" if path.is_dir() else f"sync {path.read_text()}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "replace", lambda old, new: (log.append(f"name {Path(new).name}"), replace(old, new)))
    replace_text(tmp_path / "a.json", "déjà")
    assert log == ["sync déjà", "name a.json", "sync folder"]
    assert (tmp_path / "a.json").read_bytes() == "déjà".encode() and os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_is_refused_leaves_the_old_file(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    replace_text(path, "old")

    def refuse(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match="no space left"):
        replace_text(path, "new")
    with pytest.raises(ValueError), replacing(path) as temporary:
        temporary.write_text("half")
        raise ValueError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.json"]
