"""A folder on this node's own disk, for what its ranks share and other nodes must not."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch

from ds_gpt.config import ConfigError, Problem


def node_folder() -> Path:
    """``/tmp/ds_gpt-UID``, made if it is not there.

    Raises:
        ConfigError: it is another user's, who could have us load their code.
    """
    folder = Path(tempfile.gettempdir()) / f"ds_gpt-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if os.lstat(folder).st_uid != os.getuid():
        raise ConfigError(
            Problem(
                f"'{folder}' belongs to user {os.lstat(folder).st_uid}, not to you",
                "ranks meet there and load compiled code from there",
                "remove it, or set TMPDIR to a folder of your own on this node's disk",
            )
        )
    return folder


def keep_compiled_code_here() -> None:
    """On several nodes: compile DeepSpeed's operations and Triton's kernels on each, unless the user says where.

    In a home folder that the nodes share all of them would wait for one lock file, which is for ever where its holder was
    killed; and code that was built for the processor of one node may crash on another.
    """
    built_by = f"torch-{torch.__version__}-py{sys.version_info.major}{sys.version_info.minor}"
    for variable in ("TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR"):
        if variable not in os.environ:
            os.environ[variable] = str(node_folder() / built_by / variable.removesuffix("_DIR").lower())
