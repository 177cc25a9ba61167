"""Run a function on N real gloo ranks, quickly: a fork server imports DeepSpeed once and every rank is a fork of it.

The test process itself must not be forked: it has run autograd, whose threads do not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["preload"])


def _start_server() -> None:
    """Start the fork server where it is not running. It gets no sys.path (Python 3.11.7), and skips in silence a
    preload that it cannot import: every rank would then import PyTorch's compiler for itself, for seconds."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        multiprocessing.forkserver.ensure_running()


class Job:
    """Ranks at work. Leaving the context ends those that still are."""

    def __init__(self, world_size: int, function: Callable[..., Any], *args: Any) -> None:
        _start_server()
        self._folder = tempfile.TemporaryDirectory()
        store = f"file://{Path(self._folder.name) / 'store'}"
        self.pipes: list[Connection] = []
        self.processes: list[multiprocessing.process.BaseProcess] = []
        for rank in range(world_size):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_rank_main, args=(rank, world_size, store, sender, function, args))
            process.start()
            sender.close()
            self.pipes.append(receiver)
            self.processes.append(process)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self.processes:
            if kind is None:
                process.join(timeout=5)
            process.kill()
            process.join()
        self._folder.cleanup()

    def results(self, deadline_s: float) -> list[Any]:
        """What the ranks returned, in rank order. A rank that raised, died or is not done in time is an AssertionError."""
        results: dict[int, Any] = {}
        end = time.monotonic() + deadline_s
        while len(results) < len(self.pipes):
            waited_for = [pipe for rank, pipe in enumerate(self.pipes) if rank not in results]
            ready = wait(waited_for, timeout=max(0, end - time.monotonic()))
            if not ready:
                missing = sorted(set(range(len(self.pipes))) - set(results))
                raise AssertionError(f"ranks {missing} were not done after {deadline_s:.0f} s")
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    raise AssertionError(f"rank {rank} died without a word") from None
                if not ok:
                    raise AssertionError(f"rank {rank} raised:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(len(self.pipes))]


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, deadline_s: float = 120) -> list[Any]:
    """``function(ranks, *args)`` on every rank, connected over gloo; its results in rank order.

    A rank that raises, dies or is not done by the deadline fails the test, and no process outlives the call.
    """
    with Job(world_size, function, *args) as job:
        return job.results(deadline_s)


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
