"""Imported once by the fork server, so that a rank of a test starts in milliseconds instead of seconds."""

import os

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")

from ds_gpt.engine.deepspeed_import import import_deepspeed  # noqa: E402

import_deepspeed("cpu")

# What an optimizer imports on first use, and what a rank that compiles does.
import torch._dynamo  # noqa: E402,F401
import torch._inductor.compile_fx  # noqa: E402,F401
import torch.utils.tensorboard  # noqa: E402,F401

import ds_gpt.engine.engine  # noqa: E402,F401
