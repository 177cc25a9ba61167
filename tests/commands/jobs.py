"""Commands as a user starts them: real processes, each with a deadline, and none left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
TRAIN = REPOSITORY / "ds_gpt" / "train.py"
CONFIGS = REPOSITORY / "ds_configs"

_BESIDE_PYTHON = Path(sys.executable).parent
PLAIN = (sys.executable,)
DEEPSPEED = (sys.executable, str(_BESIDE_PYTHON / "deepspeed"))
TORCHRUN = (sys.executable, str(_BESIDE_PYTHON / "torchrun"))
DS_GPT = (sys.executable, str(_BESIDE_PYTHON / "ds-gpt"))

_MARK = "DS_GPT_TEST_JOB"
# What a launcher or an outer test run may have set.
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "DS_ACCELERATOR")


@dataclass(frozen=True)
class Ended:
    """What a command left: exit status, output, and how long it took."""

    status: int
    out: str
    err: str
    seconds: float


class Job:
    """A command in a process group of its own, as a shell would start it."""

    def __init__(self, folder: Path, command: Sequence[object], **environment: str) -> None:
        self.mark = uuid.uuid4().hex
        inherited = {key: value for key, value in os.environ.items() if key not in _FOREIGN}
        self._out, self._err = folder / f"{self.mark}.out", folder / f"{self.mark}.err"
        self._start = time.monotonic()
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                cwd=folder,
                env={**inherited, "OMP_NUM_THREADS": "1", **environment, _MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """What Ctrl-C does: a signal to every process of the group."""
        os.killpg(self.process.pid, number)

    def wait(self, deadline_s: float) -> Ended:
        """Wait for its end. Fails if it takes longer, or if any process that it started is still there afterwards."""
        try:
            status = self.process.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done after {deadline_s:.0f} s:\n{self.out}\n{self.err}") from None
        seconds = time.monotonic() - self._start
        end = time.monotonic() + 10  # on a busy machine the launcher takes its time to end rank after rank
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left, f"still running: {[process.cmdline() for process in left]}\n{self.out}\n{self.err}"
        return Ended(status, self.out, self.err, seconds)

    def processes(self) -> list[psutil.Process]:
        """Everything that this job started and that lives, whoever its parent is by now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == self.mark:
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        """The processes that train, by rank."""
        found = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if "RANK" in process.environ() and str(TRAIN) in process.cmdline():
                    found[int(process.environ()["RANK"])] = process
        return [found[rank] for rank in sorted(found)]

    def wait_for_step(self, folder: Path, step: int, deadline_s: float = 90) -> None:
        """Wait until the run in `folder` has logged `step`."""
        end = time.monotonic() + deadline_s
        while not (lines := metrics(folder)) or lines[-1]["step"] < step:
            assert self.process.poll() is None, f"ended before step {step}:\n{self.out}\n{self.err}"
            assert time.monotonic() < end, f"step {step} was not reached in {deadline_s:.0f} s:\n{self.out}\n{self.err}"
            time.sleep(0.05)

    def kill(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def started(folder: Path, *command: object, **environment: str) -> Iterator[Job]:
    """The command while it runs; killed with everything it started if the test leaves early."""
    job = Job(folder, command, **environment)
    try:
        yield job
    finally:
        job.kill()


def ran(folder: Path, *command: object, deadline_s: float = 60, **environment: str) -> Ended:
    """The command, run to its end."""
    with started(folder, *command, **environment) as job:
        return job.wait(deadline_s)


def metrics(run: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's metrics."""
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def checkpoint(run: Path) -> str:
    """Name of the run's latest checkpoint, which is there."""
    name = (run / "checkpoints" / "latest").read_text().strip()
    assert (run / "checkpoints" / name).is_dir()
    return name
