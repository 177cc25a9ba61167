"""Many processes at one list of work, with counters that tell how far they are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, TypeVar

from ds_gpt.config import ConfigError, Problem

Item = TypeVar("Item")
Result = TypeVar("Result")

_REPORT_EVERY_S = 0.2
_TOLD_BYTES = 1 << 20


@dataclass(frozen=True)
class Counts:
    """How far a preparation is."""

    source_bytes: int = 0  # read of the sources, as they lie on disk
    text_bytes: int = 0  # tokenized, in UTF-8
    tokens: int = 0
    documents: int = 0


Report = Callable[[str, int, Counts], None]  # what is being done, bytes of the sources (0: not known), how far it is


class Counters:
    """Counts that all processes add to; now and then, as locks cost time."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared
        self._mine = [0, 0, 0, 0]

    def source(self, n_bytes: int) -> None:
        """Bytes of a source were read."""
        self._mine[0] += n_bytes
        if self._mine[0] >= _TOLD_BYTES:
            self.tell()

    def document(self, text_bytes: int, tokens: int) -> None:
        """A document was tokenized."""
        self._mine[1] += text_bytes
        self._mine[2] += tokens
        self._mine[3] += 1
        if self._mine[1] >= _TOLD_BYTES:
            self.tell()

    def tell(self) -> None:
        """Add up what was not told yet."""
        with self._shared.get_lock():
            for place, number in enumerate(self._mine):
                self._shared[place] += number
        self._mine = [0, 0, 0, 0]


def each(
    function: Callable[[Item, Counters], Result],
    items: Sequence[Item],
    processes: int,
    report: Callable[[Counts], None] = lambda counts: None,
) -> list[Result]:
    """`function` of every item, in order, by `processes` processes; one works in this process.

    Where one fails, the others are ended and its error is raised; where one is killed, a ConfigError. Where this
    process is killed, so are they.
    """
    context = multiprocessing.get_context("spawn")  # not fork: tokenizers and pyarrow have threads
    shared = context.Array("q", 4)
    processes = min(processes, len(items))
    report(Counts())
    if processes <= 1:
        return _here(function, items, shared, report)
    executor = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(shared,))
    try:
        futures = [executor.submit(_call, function, item) for item in items]
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, timeout=_REPORT_EVERY_S, return_when="FIRST_EXCEPTION")
            report(Counts(*shared))
            for future in done:
                future.result()
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise ConfigError(
            Problem(
                "one of the processes was ended from outside",
                "most often because the memory of the machine was used up",
                "run the same command again, which goes on from there, with fewer --processes",
            )
        ) from error
    except BaseException:
        for process in list((executor._processes or {}).values()):  # there is no public way before Python 3.14
            process.terminate()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _here(function: Callable[[Item, Counters], Result], items: Sequence[Item], shared: Any, report: Callable[[Counts], None]) -> list[Result]:
    results = []
    counters = _Reporting(shared, report)
    for item in items:
        results.append(function(item, counters))
        counters.tell()
    report(Counts(*shared))
    return results


class _Reporting(Counters):
    """Counters of a process that works and reports."""

    def __init__(self, shared: Any, report: Callable[[Counts], None]) -> None:
        super().__init__(shared)
        self._report, self._reported = report, 0.0

    def tell(self) -> None:
        super().tell()
        if time.monotonic() - self._reported > _REPORT_EVERY_S:
            self._report(Counts(*self._shared))
            self._reported = time.monotonic()


_counters: Counters


def _begin(shared: Any) -> None:
    """Set up a worker process."""
    global _counters
    _counters = Counters(shared)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first process, which ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """An executor's workers would wait for ever for more work from a parent that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _call(function: Callable[[Item, Counters], Result], item: Item) -> Result:
    result = function(item, _counters)
    _counters.tell()
    return result
