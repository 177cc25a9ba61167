"""Import DeepSpeed without its side effects."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from pathlib import Path
from types import ModuleType

from torch.utils.file_baton import FileBaton

from ds_gpt.config import ConfigError, Problem

ABANDONED_S = 600.0  # age of a lock of a compilation: DeepSpeed's largest op builds in less
_SILENCE_S = 10.0  # that a rank waits for another's compilation without a word


def import_deepspeed(device_type: str) -> ModuleType:
    """DeepSpeed, made quiet and, on a CPU, kept from compiling anything.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``.
    """
    # Settles DeepSpeed's choice of accelerator, which it otherwise announces in a warning.
    os.environ.setdefault("DS_ACCELERATOR", device_type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
    FileBaton.wait = _wait  # a method of PyTorch's, with its own patience: none
    if device_type == "cpu":
        # On a CPU init_distributed builds a C++ op for collectives in shared memory and never removes the 66 MiB
        # a rank that it puts into /dev/shm. With no op declared compatible it uses gloo: no compiler, no leak.
        deepspeed.ops.__compatible_ops__ = {}
    # DeepSpeed calls collectives by names that PyTorch has since renamed, once a step and rank.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    return deepspeed


def _wait(baton: FileBaton) -> None:
    """Wait for a compilation, but not for one that was killed: PyTorch waits as long as its lock file is there.

    Raises:
        ConfigError: the lock is older than any compilation takes.
    """
    lock, said, start = Path(baton.lock_file_path), False, time.monotonic()
    while True:
        try:
            age_s = time.time() - lock.stat().st_mtime
        except FileNotFoundError:
            return
        if age_s > ABANDONED_S:
            why = "the process that compiled there was probably killed, and its op of DeepSpeed (offload, Adam) is not finished"
            raise ConfigError(Problem(f"the lock '{lock}' is {age_s / 60:,.0f} minutes old", why, "if no compiler runs, delete it"))
        if not said and time.monotonic() - start > _SILENCE_S and os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"waiting for another process to compile: '{lock}'; if none does, delete it", file=sys.stderr, flush=True)
            said = True
        time.sleep(0.1)
