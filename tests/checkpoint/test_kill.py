"""SIGKILL at any moment, on any rank, loses nothing but the steps since the last completed save."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

from forked_ranks import Job, run_ranks
from running import train_run

KILLS = 20
STEPS = 300
# Wide enough that a save takes as long as a step or two, and saved after every second step: many kills hit a save.
SETTINGS = ["model.width=96", "model.dropout=0.1", "checkpoints.every=2", f"training.steps={STEPS}", "checkpoints.keep_last=2"]


def wait_until(condition: object, deadline_s: float) -> bool:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.0005)
    return False


def test_a_run_killed_at_twenty_moments_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    expected = run_ranks(2, train_run, str(tmp_path / "whole"), "zero2", SETTINGS)
    random_moments = random.Random(20)
    run = tmp_path / "killed"
    checkpoints = run / "checkpoints"
    inside_saves, kills, reached = 0, 0, [0]
    while kills < KILLS:
        before = max((int(path.name[5:]) for path in checkpoints.glob("step_*")), default=0)
        assert before >= reached[-1], f"a completed checkpoint was lost: {reached[-1]}, now {before}"
        reached.append(before)
        with Job(2, train_run, str(run), "zero2", SETTINGS, None, False) as job:
            # A new checkpoint or a few first, so that the run gets somewhere; then anywhere in a step, or inside the next save.
            target = before + 2 * random_moments.randint(0, 2)
            assert target < STEPS - 20, "the run should not end while it is being killed"
            wait_until(lambda: any(int(p.name[5:]) > target for p in checkpoints.glob("step_*")) or not any(p.is_alive() for p in job.processes), 60)
            if random_moments.random() < 0.6:
                wait_until(lambda: any(checkpoints.glob(".step_*.partial")) or not all(p.is_alive() for p in job.processes), 2)
                time.sleep(random_moments.random() * 0.03)
            else:
                time.sleep(random_moments.random() * 0.1)
            victims = random_moments.choice([[0], [1], [0, 1]])
            for rank in victims:
                job.processes[rank].kill()
            for rank in victims:
                job.processes[rank].join()
            inside_saves += any(checkpoints.glob(".step_*.partial"))
            kills += 1
            ends_by_itself(job)
    assert inside_saves >= 3, "the test should hit saves"
    found = run_ranks(2, train_run, str(run), "zero2", SETTINGS)
    for rank in range(2):
        assert found[rank]["state"].step == STEPS
        assert found[rank]["weights"] == expected[rank]["weights"]
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1)), "every step stands in the metrics once"


def ends_by_itself(job: Job) -> None:
    """The rank that is left ends by itself, with an error, once its peer is gone; it is not waited for longer."""
    for process in job.processes:
        process.join(timeout=20)
        assert process.exitcode is not None, "a rank hung after its peer was killed"
