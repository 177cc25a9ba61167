"""Import DeepSpeed without its side effects."""

from __future__ import annotations

import logging
import os
import warnings
from types import ModuleType


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
    _import_muon_uncompiled()
    if device_type == "cpu":
        # On a CPU init_distributed builds a C++ op for collectives in shared memory and never removes the 66 MiB
        # a rank that it puts into /dev/shm. With no op declared compatible it uses gloo: no compiler, no leak.
        deepspeed.ops.__compatible_ops__ = {}
    # DeepSpeed calls collectives by names that PyTorch has since renamed, once a step and rank.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    return deepspeed


def _import_muon_uncompiled() -> None:
    """DeepSpeed asks of every optimizer whether it is its Muon, whose module has three functions compiled as it is imported.

    That loads PyTorch's compiler on every rank, a quarter of the processor time until the first step on a CPU. ds_gpt
    has no Muon; it would work as well without.
    """
    from deepspeed.runtime import compiler

    compile_decorator = compiler.compile
    compiler.compile = lambda: lambda function: function
    try:
        import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    finally:
        compiler.compile = compile_decorator
