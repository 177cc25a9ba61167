"""Where metrics go."""

from __future__ import annotations

import json
import math
from pathlib import Path

from tiny import tiny
from trainer_bench import scalars

from ds_gpt.checkpoint.run_state import RunState
from ds_gpt.trainer.run_folder import RunFolder
from ds_gpt.trainer.sinks import MetricsFile, TensorBoard, perplexity

LINE = {"step": 3, "tokens": 768, "loss": 2.5, "lr": 1e-3, "grad_norm": 1.5, "step_s": 0.1, "tokens_per_s": 7680.0, "mfu": None, "peak_bytes": 1 << 31}


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    sink = MetricsFile(tmp_path / "metrics.jsonl")
    for value in (math.nan, math.inf, -math.inf):
        sink.write({**LINE, "grad_norm": value})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # not closed: each line is there at once
    assert [json.loads(line, parse_constant=None)["grad_norm"] for line in lines] == [None, None, None]
    assert "NaN" not in "".join(lines) and "Infinity" not in "".join(lines)
    sink.close()


def test_lines_are_appended(tmp_path: Path) -> None:
    for step in (1, 2):
        sink = MetricsFile(tmp_path / "metrics.jsonl")
        sink.write({**LINE, "step": step})
        sink.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_tensorboard_scalars(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path / "tensorboard")
    sink.write({**LINE, "mfu": 0.25, "val_loss": 2.0})
    sink.write({**LINE, "step": 4, "grad_norm": math.nan, "val_loss": 1e6})
    sink.close()
    found = scalars(tmp_path)
    assert found["train/mfu"] == {3: 0.25} and found["train/peak_bytes"][3] == 1 << 31
    assert math.isnan(found["train/grad_norm"][4])
    assert found["validation/loss"] == {3: 2.0, 4: 1e6}
    assert math.isclose(found["validation/perplexity"][3], math.exp(2), rel_tol=1e-6) and found["validation/perplexity"][4] == math.inf
    assert "train/step" not in found


def test_perplexity() -> None:
    assert perplexity(0) == 1 and math.isclose(perplexity(math.log(65)), 65)
    assert perplexity(1e6) == math.inf and math.isnan(perplexity(math.nan))


def test_a_disk_filled_to_the_last_byte_is_said_once_and_does_not_end_the_run(tmp_path: Path) -> None:
    from ds_gpt.engine.engine import StepResult
    from ds_gpt.engine.ranks import Ranks
    from ds_gpt.trainer.recorder import Recorder

    class Said:
        lines: list[str] = []

        def say(self, text: str) -> None:
            self.lines.append(text)

    composed, folder, said = tiny("zero1", 1), RunFolder(tmp_path), Said()
    recorder = Recorder(composed, Ranks.from_environment(), folder, said)  # type: ignore[arg-type]
    recorder._sinks.append(MetricsFile(Path("/dev/full")))  # every write fails: no space left on device
    folder.events = Path("/dev/full")
    for step in (1, 2):
        recorder.stopwatch.step_done()
        recorder.metrics(RunState(step=step), 0.1, StepResult(1.0, 1.0, True, None, False), None, None)
        recorder.event(step, "saved", "saved", show=False)
    assert len(said.lines) == 1 and "No space left on device" in said.lines[0]
