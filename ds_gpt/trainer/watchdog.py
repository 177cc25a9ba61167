"""End a run that hangs: nothing finished in time, so every rank says where it stands, and the launcher ends the rest."""

from __future__ import annotations

import faulthandler
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from torch import nn

_LAST_RESORT_S = 5.0
_GRACE_S = 2.0  # others gave their last sign of life a little later: they write their stacks before this peer is gone
# Times as long for saving and loading. Whether a disk is slow or dead nobody can tell, and a run that is ended in each of
# its saves never gets anywhere.
_DISK = 10


class Watchdog:
    """While active, a thread watches the time since the last sign of life: a forward pass of the model, or a `beat`.

    A forward pass is one of many micro-steps, of an evaluation, of a token of the sample: what is slow but gets on is
    left alone. Every rank has a watchdog, since in a collective that hangs all ranks wait: the one that is elsewhere is
    the one to look at.

    Args:
        folder: the run's folder; the stacks of rank N go to ``stacks/rank_0000N.txt`` there.
        rank: this rank.
        timeout_s: seconds without a sign of life after which the process ends with status 1; ten times that `at_the_disk`.
        model: the model whose forward passes count.
    """

    def __init__(self, folder: Path, rank: int, timeout_s: float, model: nn.Module) -> None:
        self._path, self._rank, self._timeout_s, self._model = folder / "stacks" / f"rank_{rank:05d}.txt", rank, timeout_s, model
        self._allowed_s = timeout_s
        self._last = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @property
    def longest_s(self) -> float:
        """Seconds after which a hang is ended wherever it is."""
        return _DISK * self._timeout_s + _LAST_RESORT_S

    def beat(self) -> None:
        """Something finished: a step, a save."""
        self._last = time.monotonic()
        # Where the thread can't act, because what hangs holds the GIL (a read from a dead network disk), or because the
        # stacks can't be written (the same disk): Python's own, in C, which writes to stderr.
        # The lesser: whoever wants no watch gives a huge number.
        seconds = min(self._allowed_s + _LAST_RESORT_S, threading.TIMEOUT_MAX)
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)

    @contextmanager
    def at_the_disk(self) -> Iterator[None]:
        """A checkpoint may be saved or loaded inside, where no pass gives a sign of life."""
        self._allowed_s = _DISK * self._timeout_s
        self.beat()
        try:
            yield
        finally:
            self._allowed_s = self._timeout_s
            self.beat()

    def __enter__(self) -> Watchdog:
        self._passes = self._model.register_forward_hook(lambda *_: self.beat())
        self.beat()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        self._passes.remove()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        # In short naps: a beat moves the deadline while the thread sleeps.
        while not self._ended.wait(min(1.0, self._timeout_s / 10)):
            if time.monotonic() - self._last > self._allowed_s:
                self._bite()

    def _bite(self) -> None:
        times = "" if self._allowed_s == self._timeout_s else f"at the disk: {_DISK} x "
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        print(
            f"ds_gpt: rank {self._rank}: nothing finished in {self._allowed_s:g} s ({times}health.hang_timeout_s) on {platform.node()}; "
            f"its stacks are in '{self._path}'. The rank whose stack differs from the others, or is missing, is the one they wait for: "
            "look at it, at its host, and at the network between them.",
            file=sys.__stderr__,  # not sys.stderr, which a live progress bar has replaced, and whose lock the main thread may hold
            flush=True,
        )
        time.sleep(_GRACE_S)
        os._exit(1)  # the main thread may never return from where it waits
