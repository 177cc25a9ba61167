"""Ctrl-C, SIGTERM and a closed terminal ask for an orderly end: the step is finished, the run saved."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType

# Within this time of a Ctrl-C another one is a wrapper's, passing on what the rank has had from the terminal.
_ECHO_S = 2.0


class Interruption:
    """While active, SIGINT, SIGTERM and SIGHUP set ``requested``; Ctrl-C once more, later, ends the process at once.

    A rank is asked more than once without anybody insisting: Ctrl-C in the terminal reaches it from there and as SIGTERM
    from deepspeed's launcher, and a SIGTERM to all processes of a job, as Slurm sends it, is sent again by the launcher
    while the rank is saving. So SIGTERM never insists: who wants an end at once has SIGKILL.
    """

    def __init__(self) -> None:
        self.requested = False
        self._first_ctrl_c_s: float | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interruption:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the run is to outlive its terminal
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._first_ctrl_c_s is None:
            self._first_ctrl_c_s = now
        elif now - self._first_ctrl_c_s > _ECHO_S:
            os._exit(128 + number)  # at once: other threads, and collectives that wait for peers, are not waited for
