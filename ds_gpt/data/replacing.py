"""Files that appear whole or not at all, and stay: after a crash, or a full disk, there is the old one or the new one."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`: synced and moved over `path` if the block ends well, removed if not.

    What a killed process leaves behind is called ``.NAME.*.partial``. Raises OSError where the disk refuses.
    """
    # Not tempfile: its files are private (0600) and a shared cache must be readable. A pid alone repeats across nodes.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield temporary
        sync(temporary)  # else the new name may reach the disk before the content
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Replace a file's content as a whole, in UTF-8. Raises OSError where the disk refuses."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
