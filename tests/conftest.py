"""Settings for all tests."""

import os
import signal
from collections.abc import Iterator

import pytest

# Before anything imports torch: two ranks, or a rank and the test, share two cores better with a thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

# What started the tests may ignore these (nohup, a shell's background job), and so would every run that they start.
for _number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _environment_is_put_back() -> Iterator[None]:
    """What a test, or the code that it calls, says of ranks is not for the processes that the next one starts."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
