"""A stand-in for the `deepspeed` command, with its three layers and its habits, that starts in milliseconds.

`deepspeed` starts launch.py, which starts the ranks. Like the real ones: the first handles no signal and returns its
child's code only where that is positive; the second answers a signal, or a failing rank, with SIGTERM to one rank
after the other; a rank finishes and saves at the first signal of a kind and stops at once at the second.

What happens is written into the folder $STAND_IN: `argv.json`, `passed` (variables for other machines), and `KIND.RANK` files that hold a line per event.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

FOLDER = Path(os.environ["STAND_IN"])


def note(name: str, text: str) -> None:
    """Append a line to a file of the folder."""
    with (FOLDER / name).open("a", encoding="utf-8") as file:
        file.write(text + "\n")


def deepspeed() -> int:
    """The command: start launch.py and wait."""
    (FOLDER / "argv.json").write_text(json.dumps(sys.argv[1:]))
    if variables := os.environ.get("DS_ENV_FILE"):  # read as DeepSpeed does, which asks whether it is a file
        assert Path(variables).is_file()
        (FOLDER / "passed").write_text(Path(variables).read_text())
    note("pids", str(os.getpid()))
    time.sleep(float(os.environ.get("STAND_IN_START_S", "0")))
    child = subprocess.Popen([sys.executable, __file__, "launch"], env={**os.environ, "STAND_IN_PART": "launch"})
    child.wait()
    return max(child.returncode, 0)


def launch() -> int:
    """launch.py: start two ranks, end them all when one fails or a signal comes."""
    note("pids", str(os.getpid()))
    train = Path(__file__).resolve().parents[2] / "ds_gpt" / "train.py"
    command = [sys.executable, __file__, str(train)]
    ranks = [subprocess.Popen(command, env={**os.environ, "STAND_IN_PART": "rank", "RANK": str(rank)}) for rank in range(2)]

    def end_ranks(number: int, frame: FrameType | None) -> None:
        note("launch", signal.Signals(number).name)
        for process in ranks:
            process.terminate()
            process.wait()
        sys.exit(1)

    signal.signal(signal.SIGINT, end_ranks)
    signal.signal(signal.SIGTERM, end_ranks)
    while any(process.poll() is None for process in ranks):
        time.sleep(0.02)
        for process in ranks:
            if process.returncode:
                for other in ranks:
                    other.terminate()
                return process.returncode
    return next((process.returncode for process in ranks if process.returncode), 0)


def rank() -> int:
    """A rank: train until told to end."""
    name = f"rank.{os.environ['RANK']}"
    seen: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        note(name, signal.Signals(number).name)
        if number in seen and not os.environ.get("STAND_IN_DEAF"):
            note(name, "stopped at once")
            os._exit(3)
        seen.append(number)

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    note("pids", str(os.getpid()))
    note(name, "started")
    if os.environ.get("STAND_IN_STRAY") and name == "rank.0":  # a data worker that its rank forgets
        note("pids", str(subprocess.Popen(["sleep", "300"]).pid))
    if code := os.environ.get("STAND_IN_CODE"):
        os.kill(os.getpid(), -int(code)) if code.startswith("-") and name == "rank.0" else None
        return abs(int(code)) if name == "rank.0" else 0
    end = time.monotonic() + 60
    while time.monotonic() < end and (not seen or os.environ.get("STAND_IN_DEAF")):
        time.sleep(0.02)
    end = time.monotonic() + float(os.environ.get("STAND_IN_SAVE_S", "0.3"))
    while time.monotonic() < end:
        time.sleep(0.02)
    note(name, "saved")
    return 0


if __name__ == "__main__":
    sys.exit({"launch": launch, "rank": rank}.get(os.environ.get("STAND_IN_PART", ""), deepspeed)() & 255)
