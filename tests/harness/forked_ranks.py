"""Run a function on N real gloo ranks, quickly: a fork server imports DeepSpeed once and every rank is a fork of it.

The test process itself must not be forked: it has run autograd, whose threads do not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["preload"])


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, deadline_s: float = 120) -> list[Any]:
    """``function(ranks, *args)`` on every rank, connected over gloo; its results in rank order.

    A rank that raises, dies or is not done by the deadline fails the test, and no process outlives the call.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_rank_main, args=(rank, world_size, store, sender, function, args))
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, deadline_s)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Connection], deadline_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    end = time.monotonic() + deadline_s
    while len(results) < len(pipes):
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in results], timeout=max(0, end - time.monotonic()))
        if not ready:
            missing = sorted(set(range(len(pipes))) - set(results))
            raise AssertionError(f"ranks {missing} were not done after {deadline_s:.0f} s")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                ok, value = pipe.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died without a word") from None
            if not ok:
                raise AssertionError(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(rank: int, world_size: int, store: str, sender: Connection, function: Callable[..., Any], args: Any) -> None:
    import torch

    from ds_gpt.engine.ranks import Ranks

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_SIZE=str(world_size), OMP_NUM_THREADS="1"
    )
    # DeepSpeed reads these though the ranks meet in a file.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.set_num_threads(1)
    try:
        ranks = Ranks.from_environment()
        ranks.connect(init_method=store)
        value = function(ranks, *args)
        ranks.barrier()
        ranks.disconnect()
    except BaseException:
        sender.send((False, traceback.format_exc()))
    else:
        sender.send((True, value))
