"""Ctrl-C and SIGTERM ask for an orderly end: the step is finished, the run saved."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType


class Interruption:
    """While active, the first SIGINT or SIGTERM sets ``requested``; a second one of the same kind ends the process.

    Of the same kind, because Ctrl-C reaches a rank twice: as SIGINT from the terminal, and as SIGTERM from the
    launcher, which had the SIGINT too.
    """

    def __init__(self) -> None:
        self.requested = False
        self._seen: set[int] = set()
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interruption:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in self._seen:
            os._exit(128 + number)  # at once: other threads, and collectives that wait for peers, are not waited for
        self._seen.add(number)
        self.requested = True
