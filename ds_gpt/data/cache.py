"""The cache folder: one process builds while the others wait."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ds_gpt.config import ConfigError, Problem


def cache_root(cache_dir: str) -> Path:
    """The cache folder with `~` expanded. Nothing is created. Raises ConfigError where `~` has no meaning."""
    expanded = os.path.expanduser(cache_dir)
    if expanded.startswith("~"):  # a container's nameless user without HOME: do not make a folder called "~"
        raise ConfigError(
            Problem(
                what=f"data.cache_dir = {cache_dir!r} has no meaning here",
                why="this user has no home folder (HOME is not set)",
                fix="set HOME, or give data.cache_dir as an absolute path",
            )
        )
    return Path(expanded)


@contextmanager
def exclusive(lock_path: Path) -> Iterator[None]:
    """Hold a lock file. The kernel frees it when its holder ends, however it ends, so no lock is ever stale.

    On a network disk without locks all build at once, which costs time only: what they build is the same, and appears whole.
    """
    lock = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # Lustre mounted without flock, NFS without its lock daemon
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        yield
    finally:
        os.close(lock)


@contextmanager
def writing_to(root: Path) -> Iterator[None]:
    """Turn what the file system refuses in this block (rights, space, locks) into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            Problem(
                what=f"data.cache_dir = '{root}' cannot be written: {error}",
                why="the tokens are written there once and then shared by all ranks of this machine",
                fix="set data.cache_dir to a folder that this user can write, with space left",
            )
        ) from error
