"""A folder that appears whole or not at all, and replaces nothing."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ds_gpt.checkpoint.folder import remove
from ds_gpt.config import ConfigError, Problem
from ds_gpt.data.replacing import sync


@contextmanager
def new_folder(path: Path, option: str) -> Iterator[Path]:
    """A folder under a temporary name beside `path`; it gets its name if the block ends well, and is removed if not.

    Args:
        path: its name.
        option: what the user chooses the name by, for messages.

    Raises:
        ConfigError: something bears the name, or the disk refuses.
    """
    if path.exists() or path.is_symlink():
        raise _taken(path, option)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        sync(temporary)
        if path.exists() or path.is_symlink():  # since we looked
            raise _taken(path, option)
        os.rename(temporary, path)
        sync(path.parent)
    except OSError as error:
        raise ConfigError(
            Problem(
                f"'{path}' cannot be written: {error.strerror or error}",
                "nothing was left behind",
                f"make room, or choose another folder with {option}",
            )
        ) from error
    finally:
        remove(temporary)


def _taken(path: Path, option: str) -> ConfigError:
    return ConfigError(
        Problem(
            f"'{path}' exists", "what is there is never overwritten", f"choose another with {option}, or move it away"
        )
    )
