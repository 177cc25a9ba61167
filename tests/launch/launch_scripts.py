"""What the launch tests share: running a script with a stand-in for `deepspeed` first on PATH."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCH = REPOSITORY / "launch"


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(what: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait for a condition; fails after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def words_of(command: str) -> list[str]:
    """The words of a printed command as bash reads them: it can be pasted into a shell."""
    printed = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True).stdout
    return printed.split("\0")[:-1]


class StandIn:
    """A folder with a `deepspeed` command that notes what it is told (see stand_in_deepspeed.py)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = folder / "bin" / "deepspeed"
        command.parent.mkdir()
        script = Path(__file__).with_name("stand_in_deepspeed.py")
        command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(script))} "$@"\n')
        command.chmod(0o755)
        self.environment = {
            **{key: value for key, value in os.environ.items() if key not in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR") and not key.startswith("SLURM")},
            "PATH": f"{command.parent}:{os.environ['PATH']}",
            "STAND_IN": str(folder),
        }

    def command(self, name: str, body: str) -> None:
        """Another command on PATH, of bash."""
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def run(self, script: str, *arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a launch script to its end."""
        command = ["bash", str(LAUNCH / script), *arguments]
        return subprocess.run(command, cwd=cwd, env={**self.environment, **environment}, capture_output=True, text=True, timeout=60, check=False)

    def dry_run(self, script: str, *arguments: str, **environment: str) -> list[str]:
        """The words of the command that a script would run."""
        result = self.run(script, "--dry-run", *arguments, **environment)
        assert result.returncode == 0, result.stderr
        assert not (self.folder / "argv.json").exists(), "a dry run started something"
        return words_of(result.stdout)

    def lines(self, name: str) -> list[str]:
        """Lines of a file that the stand-in writes, none where it is not there yet."""
        path = self.folder / name
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def argv(self) -> list[str]:
        """What the stand-in was called with."""
        return json.loads((self.folder / "argv.json").read_text())

    def pids(self) -> list[int]:
        """Every process that the stand-in started."""
        return [int(line) for line in self.lines("pids")]

    def alive(self) -> list[int]:
        """Those of them that still run."""
        return [pid for pid in self.pids() if alive(pid)]

    @contextlib.contextmanager
    def started(self, script: Path, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
        """A launch script in the background; its processes, and no others, are ended afterwards, whatever the test did."""
        command = ["bash", str(script), *arguments]
        process = subprocess.Popen(
            command, env={**self.environment, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            yield process
        finally:
            for pid in [process.pid, *self.pids()]:
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)
            process.communicate()
