"""launch/local.sh --restarts: after a crash the run goes on where it was saved; what a restart can't mend is left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_scripts import LAUNCH, StandIn, wait_until

sys.path.append(str(Path(__file__).parents[1] / "commands"))
from jobs import TRAIN, metrics, started  # noqa: E402

SCRIPT = LAUNCH / "local.sh"

# A `deepspeed` that follows a plan, one line a start: the status it ends with, and the step that it saves before.
PLANNED = f"""#!{sys.executable}
import json, os, sys, time
from pathlib import Path
folder, arguments = Path(os.environ["STAND_IN"]), sys.argv[1:]
with (folder / "starts").open("a") as file:
    file.write(json.dumps(arguments) + "\\n")
number = len((folder / "starts").read_text().splitlines()) - 1
status, step = json.loads((folder / "plan").read_text())[number]
if "--run-dir" in arguments and step is not None:
    run = Path(arguments[arguments.index("--run-dir") + 1])
    run.mkdir(parents=True, exist_ok=True)
    (run / "run.yaml").touch()
    if step:
        (run / "checkpoints" / f"step_{{step:07d}}").mkdir(parents=True, exist_ok=True)
time.sleep(float(os.environ.get("PLANNED_S", "0")))
sys.exit(status)
"""


class Planned(StandIn):
    """`deepspeed` by plan, and GPUs by file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.environment |= {"DS_ACCELERATOR": "cpu"}
        python = folder / "bin" / "python3"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (folder / "bin" / "deepspeed").write_text(PLANNED)
        smi = folder / "bin" / "nvidia-smi"
        smi.write_text(f'#!/bin/sh\nread n <{folder}/gpus; for i in $(seq $n); do echo "GPU $i: NVIDIA A100"; done\n')
        sleep = folder / "bin" / "sleep"  # pauses are told, not waited for
        sleep.write_text(f"#!/bin/sh\necho $1 >>{folder}/slept\nexec /bin/sleep 0.05\n")
        for file in (python, smi, sleep):
            file.chmod(0o755)

    def planned(self, plan: list[tuple[int, int | None]], *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run local.sh in the folder; `plan` is what each start comes to."""
        (self.folder / "plan").write_text(json.dumps(plan))
        return self.run("local.sh", *arguments, cwd=self.folder, **environment)

    def starts(self) -> list[list[str]]:
        """The arguments of training, at each start."""
        found = [json.loads(line) for line in self.lines("starts")]
        return [words[words.index(str(TRAIN)) + 1 :] for words in found]

    def ranks(self) -> list[str]:
        """What followed --num_gpus at each start."""
        return [words[words.index("--num_gpus") + 1] for words in map(json.loads, self.lines("starts"))]


@pytest.fixture
def planned(tmp_path: Path) -> Planned:
    return Planned(tmp_path)


KILLED = 247  # what `deepspeed` makes of a rank that died of SIGKILL


@pytest.mark.parametrize(
    ("plan", "restarts", "status", "starts"),
    [
        ([(0, 10)], "3", 0, 1),
        ([(2, 0)], "3", 2, 1),
        ([(KILLED, 10), (0, 20)], "3", 0, 2),
        ([(1, 10), (KILLED, 20), (139, 30), (0, 40)], "3", 0, 4),
        ([(1, 10), (1, 20)], "1", 1, 2),
        ([(KILLED, 10)], "0", 137, 1),
        ([(1, 10), (2, 20)], "3", 2, 2),
        ([(143, 10)], "3", 143, 1),
        ([(1, 10), (1, 10), (1, 10), (0, 20)], "9", 1, 3),
        ([(1, 0), (1, 0), (1, 0)], "9", 1, 3),
        ([(1, 10), (1, 10), (1, 20), (1, 20), (0, 30)], "9", 0, 5),
    ],
    ids=["trained", "bad input", "killed", "three crashes", "no restart left", "no restart asked for", "bad input later", "asked to end", "stuck", "stuck at 0", "stuck once"],
)
def test_when_it_starts_again(planned: Planned, plan: list[tuple[int, int]], restarts: str, status: int, starts: int) -> None:
    result = planned.planned(plan, "--restarts", restarts)
    assert (result.returncode, len(planned.starts())) == (status, starts), result.stderr
    assert result.stderr.count("; restart ") == starts - 1


def test_it_goes_on_in_its_own_folder(planned: Planned) -> None:
    """Another job of the same name was there before, and one comes between."""
    (planned.folder / "runs" / "quickstart").mkdir(parents=True)
    result = planned.planned([(KILLED, 10), (1, 20), (0, 30)], "--restarts=2", "--set", "training.steps=30", "--set=seed=2")
    assert result.returncode == 0, result.stderr
    (planned.folder / "runs" / "quickstart-3").mkdir()
    given = ["--set=training.steps=30", "--set=seed=2", "--run-dir", "runs/quickstart-2"]
    assert planned.starts() == [given, [*given, "--resume"], [*given, "--resume"]]
    assert [pause for pause in planned.lines("slept") if pause in ("2", "4")] == ["2", "4"]
    assert "a rank died of signal 9; its newest checkpoint is of step 10; restart 1 of 2 in 2 s" in result.stderr
    assert "the run ended with status 1; its newest checkpoint is of step 20; restart 2 of 2 in 4 s" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "first", "later"),
    [
        (["--run-dir", "mine"], ["--run-dir", "mine"], ["--run-dir", "mine", "--resume"]),
        (["--run-dir=mine", "--resume"], ["--run-dir", "mine"], ["--run-dir", "mine", "--resume"]),
        (["--resume", "old", "--set", "seed=3"], ["--set=seed=3", "--run-dir", "old", "--resume"], ["--set=seed=3", "--run-dir", "old", "--resume"]),
        (["--resume"], ["--run-dir", "runs/quickstart", "--resume"], ["--run-dir", "runs/quickstart", "--resume"]),
        (["--resume=old/checkpoints/step_0000005"], ["--run-dir", "runs/quickstart-2", "--resume=old/checkpoints/step_0000005"], ["--run-dir", "runs/quickstart-2", "--resume"]),
    ],
)
def test_the_run_that_was_asked_for(planned: Planned, arguments: list[str], first: list[str], later: list[str]) -> None:
    for run in ("old", "runs/quickstart"):
        (planned.folder / run / "checkpoints" / "step_0000005").mkdir(parents=True)
        (planned.folder / run / "run.yaml").touch()
    result = planned.planned([(1, 10), (0, 20)], "--restarts", "1", "--", *arguments)
    assert result.returncode == 0, result.stderr
    assert planned.starts() == [first, later]


def test_a_crash_before_the_first_save_of_a_branch_does_not_start_from_nothing(planned: Planned) -> None:
    (planned.folder / "old" / "step_0000005").mkdir(parents=True)
    result = planned.planned([(1, 0)], "--restarts", "3", "--resume", "old/step_0000005")
    assert result.returncode == 1 and len(planned.starts()) == 1 and "nothing to go on from but 'old/step_0000005'" in result.stderr


def test_bad_input_leaves_no_folder(planned: Planned) -> None:
    result = planned.planned([(2, None)], "--restarts", "3", "--set", "training.step=3")
    assert result.returncode == 2 and list((planned.folder / "runs").glob("*")) == []


@pytest.mark.parametrize(("left", "batch", "ranks"), [(8, 24, "8"), (7, 24, "6"), (5, 24, "4"), (1, 24, "1"), (3, 7, None)])
def test_fewer_ranks_where_gpus_are_gone(planned: Planned, left: int, batch: int, ranks: str | None) -> None:
    del planned.environment["DS_ACCELERATOR"]
    asked = "7" if batch == 7 else "8"
    (planned.folder / "gpus").write_text(f"{asked}\n")
    (planned.folder / "plan").write_text(json.dumps([(1, 10), (0, 20)]))
    micro = ["--set", "batch.micro_batch_size=1", "--set", "gradient_accumulation_steps=1"] if batch == 7 else []
    command = ["--restarts", "2", "--set", f"batch.global_batch_size={batch}", *micro]
    with planned.started(SCRIPT, *command, PLANNED_S="0.5") as process:
        wait_until(lambda: planned.lines("starts"))
        (planned.folder / "gpus").write_text(f"{left}\n")
        _, said = process.communicate(timeout=60)
    if ranks is None:  # only 7 x 1 x 1 is 7
        assert process.returncode == 1 and planned.ranks() == ["7"] and "no number of ranks suits" in said
        return
    assert process.returncode == 0 and planned.ranks() == ["8", ranks], said
    assert (f"{left} of 8 GPUs are left: going on with {ranks} ranks" in said) == (left < 8)


def test_a_signal_ends_it_also_in_the_pause(planned: Planned) -> None:
    (planned.folder / "bin" / "sleep").write_text(f"#!/bin/sh\necho $1 >>{planned.folder}/slept\nexec /bin/sleep $(($1 * 15))\n")
    (planned.folder / "plan").write_text(json.dumps([(1, 10), (0, 20)]))
    with planned.started(SCRIPT, "--restarts", "2", "--run-dir", str(planned.folder / "run")) as process:
        wait_until(lambda: "2" in planned.lines("slept"))
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=10)
        assert process.returncode == 128 + 15 and len(planned.starts()) == 1


def test_a_signal_to_the_run_is_no_crash(stand_in: StandIn) -> None:
    with stand_in.started(SCRIPT, "--restarts", "2", "--run-dir", str(stand_in.folder / "run"), STAND_IN_SAVE_S="50", DS_ACCELERATOR="cpu") as process:
        wait_until(lambda: all("started" in stand_in.lines(f"rank.{rank}") for rank in range(2)))
        for count in (1, 2):
            os.kill(process.pid, signal.SIGINT)
            wait_until(lambda count=count: sum(stand_in.lines(f"rank.{rank}").count("SIGINT") for rank in range(2)) >= 2 * count - 1)
        _, said = process.communicate(timeout=20)
        assert process.returncode == 3 and "; restart " not in said and len(stand_in.pids()) == 4


def test_a_number_is_needed(stand_in: StandIn) -> None:
    for wrong in (["--restarts", "often"], ["--restarts", "-1"], ["--restarts"], ["--restarts=100000"]):
        result = stand_in.run("local.sh", *wrong)
        assert result.returncode == 2 and result.stderr.startswith("launch/local.sh: --restarts")


# For real

SMALL = (
    "model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "evaluation.every=1000000", "evaluation.sequences=8", "sample.tokens=2",
    "data.corpus=synthetic", "data.synthetic.tokens=20000", "logging.level=DEBUG", "logging.tensorboard=false", "checkpoints.every=5", "training.steps=400",
)  # fmt: skip


def test_a_run_whose_ranks_are_killed_twice_finishes(tmp_path: Path) -> None:
    settings = [word for setting in SMALL for word in ("--set", setting)]
    beside = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run = tmp_path / "runs" / "quickstart"
    with started(tmp_path, "bash", SCRIPT, "--restarts", 3, *settings, DS_ACCELERATOR="cpu", PATH=beside) as job:
        for victim in (1, 0):
            last = metrics(run)[-1]["step"] if run.exists() and metrics(run) else 0
            job.wait_for_step(run, last + 12)
            ranks = job.ranks()
            ranks[victim].kill()
            end = time.monotonic() + 60
            while any(rank.is_running() for rank in ranks):
                assert time.monotonic() < end, job.err
                time.sleep(0.1)
        ended = job.wait(150)
    assert ended.status == 0, ended.err
    assert [line["step"] for line in metrics(run)] == list(range(1, 401)), "each step once"
    assert ended.err.count("; restart ") == 2 and "restart 2 of 3 in 4 s" in ended.err
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["quickstart"] and (run / "sample.txt").exists()
