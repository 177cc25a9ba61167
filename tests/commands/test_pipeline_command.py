"""The command trains a pipeline from its start to its sample, and one process goes on with what it saved."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import DEEPSPEED, PLAIN, TRAIN, checkpoint, metrics, ran


def test_a_pipeline_of_two_is_trained_saved_and_resumed_by_one_process(tmp_path: Path, tiny: list[str]) -> None:
    staged = [*tiny, "--set", "model.layers=2", "--set", "parallel.pipeline=2", "--set", "gradient_accumulation_steps=4"]
    run = tmp_path / "run"
    ended = ran(tmp_path, *DEEPSPEED, "--num_gpus", 2, TRAIN, *staged, "--run-dir", run, deadline_s=90)
    assert ended.status == 0 and ended.err == "", ended.out + ended.err
    assert "pipeline 2: copies of the model: 1" in ended.out and "pipeline: 2 stages idle 20% of the time with 4 micro-batches a step" in ended.out
    assert ended.out.count("\nsample:\n") == 1 and checkpoint(run) == "step_0000004"
    longer = ["--set", "parallel.pipeline=1", "--set", "training.steps=6"]
    resumed = ran(tmp_path, *PLAIN, TRAIN, *staged, *longer, "--resume", run, deadline_s=60)
    assert resumed.status == 0 and resumed.err == "", resumed.out + resumed.err
    assert "parallel.pipeline: 2 when saved, 1 now" in resumed.out and checkpoint(run) == "step_0000006"
    alone = ran(tmp_path, *PLAIN, TRAIN, *staged, *longer, "--run-dir", tmp_path / "alone", deadline_s=60)
    assert alone.status == 0, alone.out + alone.err
    found, expected = ([(line["loss"], line["grad_norm"]) for line in metrics(folder)] for folder in (run, tmp_path / "alone"))
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=1e-4)
