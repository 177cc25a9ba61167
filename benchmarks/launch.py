"""Run a case in fresh processes and say what came of it. Whatever happens to them is a result."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cases import Case
from benchmarks.records import REPOSITORY

_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
_MARK = "DS_GPT_BENCHMARK_CASE"  # in the environment of everything that a case starts
_KILLED = re.compile(r"exitcode\s*:\s*-9|return code = -9|Signal 9|SIGKILL")


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
        status: ``ok``, ``out_of_memory``, ``crash`` or ``timeout``.
        message: why, where it is not ok.
        command: that started the ranks.
        wall_s: seconds from the launch to the end.
        by_rank: what each rank measured.
    """

    status: str
    message: str
    command: list[str]
    wall_s: float
    by_rank: list[dict[str, Any]]


def command(case: Case, case_file: str = "CASE.json", out: str = "OUT", worker: str = "benchmarks.worker") -> list[str]:
    """The command that starts a case's ranks."""
    arguments = ["--case", case_file, "--out", out]
    beside_python = Path(sys.executable).parent
    if case.launcher == "deepspeed":
        return [sys.executable, str(beside_python / "deepspeed"), "--num_gpus", str(case.ranks), "--module", worker, *arguments]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks), "-m", worker, *arguments]


def run(case: Case, worker: str = "benchmarks.worker") -> Outcome:
    """Start the ranks, wait for them until the case's deadline, leave none behind."""
    with tempfile.TemporaryDirectory(prefix="ds_gpt-bench-") as name:
        folder = Path(name)
        started = command(case, str(folder / "case.json"), str(folder), worker)
        start = time.time()
        (folder / "case.json").write_text(json.dumps({"case": asdict(case), "launched_at": start, "suite": os.getpid()}))
        environment = {key: value for key, value in os.environ.items() if key not in _FOREIGN}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), environment.get("PYTHONPATH")]))
        environment[_MARK] = str(folder)
        if case.threads:
            environment["OMP_NUM_THREADS"] = str(case.threads)
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(started, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
            try:
                process.wait(timeout=case.deadline_s)
                late = False
            except subprocess.TimeoutExpired:
                late = True
            finally:
                _end(process, str(folder))
        status, message, by_rank = _judge(case, folder, process.returncode, late)
        return Outcome(status, message, command(case, worker=worker), time.time() - start, by_rank)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill the launcher and its ranks, whatever sessions and parents they have by now."""
    for other in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if other.environ().get(_MARK) == mark:
                other.kill()
    process.wait()


def _judge(case: Case, folder: Path, returncode: int, late: bool) -> tuple[str, str, list[dict[str, Any]]]:
    files = [folder / f"rank{rank}.json" for rank in range(case.ranks)]
    if returncode == 0 and all(file.exists() for file in files):
        return "ok", "", [json.loads(file.read_text()) for file in files]
    errors = sorted((json.loads(file.read_text()) for file in folder.glob("error*.json")), key=lambda error: error["at"])
    # Where one rank runs out of memory the others fail in their collectives: the first that says so is the cause.
    errors.sort(key=lambda error: error["status"] != "out_of_memory")
    if errors:
        return errors[0]["status"], errors[0]["message"][:2000], []
    log = (folder / "log").read_text(errors="replace")
    if late:
        return "timeout", f"not done after {case.deadline_s:.0f} s", []
    if _KILLED.search(log):
        return "crash", "a rank was killed (signal 9): on a machine that runs out of memory the kernel does that", []
    return "crash", f"the launcher ended with status {returncode}: {log[-1500:]}", []
