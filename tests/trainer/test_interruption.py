"""Signals ask; only a person who repeats Ctrl-C insists."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from ds_gpt.trainer import interruption as interruption_module
from ds_gpt.trainer.interruption import Interruption

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def test_the_first_signal_is_a_request_and_handlers_come_back() -> None:
    before = {number: signal.getsignal(number) for number in (INT, TERM, HUP)}
    for number in (INT, TERM, HUP):
        with Interruption() as interruption:
            assert not interruption.requested
            os.kill(os.getpid(), number)
            assert interruption.requested
        assert {number: signal.getsignal(number) for number in (INT, TERM, HUP)} == before
    with pytest.raises(ZeroDivisionError), Interruption():
        _ = 1 / 0
    assert {number: signal.getsignal(number) for number in (INT, TERM, HUP)} == before


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(HUP, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            os.kill(os.getpid(), HUP)
            assert not interruption.requested
        assert signal.getsignal(HUP) == signal.SIG_IGN
    finally:
        signal.signal(HUP, before)


class Clock:
    """A clock that the test moves."""

    now = 50.0

    def monotonic(self) -> float:
        return self.now


def _signalled(signals: list[tuple[float, int]]) -> None:
    interruption_module.time = clock = Clock()  # type: ignore[assignment,attr-defined]
    with Interruption() as interruption:
        try:
            for pause_s, number in signals:
                clock.now += pause_s
                os.kill(os.getpid(), number)
                assert interruption.requested
        finally:
            time.sleep(0.01)
    os._exit(0)


@pytest.mark.parametrize(
    ("signals", "status"),
    [
        ([(0, INT)], 0),
        ([(0, INT), (0.1, TERM)], 0),  # Ctrl-C under deepspeed's launcher
        ([(0, INT), (0.1, INT)], 0),  # and under a wrapper that passes it on, or by a nervous hand
        ([(0, TERM), (0.1, TERM)], 0),  # a job scheduler that signals the launcher and the ranks
        ([(0, TERM), (25, TERM), (25, TERM)], 0),  # the launcher comes to this rank when the one before is gone
        ([(0, INT), (10, TERM)], 0),
        ([(0, INT), (3, INT)], 130),
        ([(0, INT), (0.1, INT), (3, INT)], 130),
        ([(0, TERM), (3, INT)], 0),
        ([(0, TERM), (3, INT), (3, INT)], 130),
    ],
)
def test_only_ctrl_c_repeated_after_a_while_ends_at_once(signals: list[tuple[float, int]], status: int) -> None:
    process = multiprocessing.get_context("fork").Process(target=_signalled, args=(signals,))
    process.start()
    process.join(10)
    assert process.exitcode == status
