"""What a person sees: a bar on a terminal, lines in a log."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole
from tiny import tiny

from ds_gpt.trainer import console as console_module
from ds_gpt.trainer.console import Console

METRICS: dict[str, Any] = {
    "step": 100, "tokens": 25_600, "loss": 2.34567, "lr": 1e-3, "grad_norm": 0.754, "step_s": 0.5, "tokens_per_s": 58_300.4, "mfu": None, "peak_bytes": 1 << 30,
}  # fmt: skip


class Clock:
    """A clock that the test moves."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(console_module, "time", clock)
    return clock


def log(total_steps: int) -> tuple[Console, io.StringIO]:
    printed = io.StringIO()
    return Console(total_steps, RichConsole(file=printed, width=80)), printed


def terminal(total_steps: int, width: int) -> tuple[Console, io.StringIO]:
    printed = io.StringIO()
    return Console(total_steps, RichConsole(file=printed, force_terminal=True, color_system=None, width=width, height=24)), printed


def frames(printed: io.StringIO) -> list[str]:
    """What was drawn, frame after frame, without control sequences."""
    return [re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", frame) for frame in re.split(r"[\r\n]", printed.getvalue())]


def test_a_line_in_a_log() -> None:
    console, printed = log(900)
    console.start(0)
    console.write(METRICS)
    console.write({**METRICS, "step": 200, "val_loss": 2.0, "mfu": 0.4321})
    console.advance(201)
    console.close()
    first, second = printed.getvalue().splitlines()
    assert first.startswith("step    100/900  loss 2.3457  58,300 tokens/s  grad norm 0.75  lr 1.00e-03  ETA ")
    assert "MFU 43.2%" in second and second.endswith("validation loss 2.0000 (perplexity 7.39)")
    assert "\x1b" not in printed.getvalue()


def test_a_line_of_pairs_has_their_accuracy() -> None:
    console, printed = log(900)
    console.start(0)
    console.write({**METRICS, "val_loss": 0.5, "val_accuracy": 0.975})
    console.close()
    assert printed.getvalue().rstrip().endswith("validation loss 0.5000 (accuracy 97.5%)")


@pytest.mark.parametrize(
    ("start", "step", "seconds", "eta"),
    [(0, 100, 50, "0:06:40"), (0, 450, 3600, "1:00:00"), (0, 1, 864, "215:45:36"), (0, 900, 5, "0:00:00"), (800, 850, 100, "0:01:40")],
)
def test_eta(clock: Clock, start: int, step: int, seconds: float, eta: str) -> None:
    """Hours:minutes:seconds at the speed so far, counted from where this process started."""
    console, printed = log(900)
    console.start(start)
    clock.now += seconds
    console.write({**METRICS, "step": step})
    assert printed.getvalue().rstrip().endswith(f"ETA {eta}")


def test_numbers_that_are_none(clock: Clock) -> None:
    console, printed = log(900)
    console.start(0)
    console.write({**METRICS, "loss": float("nan"), "grad_norm": float("inf"), "val_loss": 1e9})
    assert "loss nan" in printed.getvalue() and "grad norm inf" in printed.getvalue() and "(perplexity inf)" in printed.getvalue()


@pytest.mark.parametrize(("value", "shown"), [(2.0, "7.39"), (9.2, "9897.13"), (9.3, "1.094e+04"), (43.58, "8.444e+18")])
def test_a_large_perplexity_is_short(value: float, shown: str) -> None:
    console, printed = log(900)
    console.write({**METRICS, "val_loss": value})
    assert printed.getvalue().rstrip().endswith(f"(perplexity {shown})")


@pytest.mark.parametrize("width", range(60, 140, 3))
def test_a_narrow_bar_drops_whole_fields_from_the_right(width: int) -> None:
    console, printed = terminal(900, width)
    console.start(0)
    console.write({**METRICS, "mfu": 0.5, "step": 900})
    console.close()
    last = [frame for frame in frames(printed) if frame][-1].rstrip()
    shown = last[last.index("loss ") :].split("  ")
    fields = ["loss 2.3457", "58,300 tokens/s", "MFU 50.0%", "grad norm 0.75", "lr 1.00e-03"]
    assert shown == fields[: len(shown)] and "\u2026" not in last
    assert len(shown) >= (1 + (width >= 75) + (width >= 90) + (width >= 108) + (width >= 120))
    assert last.count("\u2501") >= 8, "the bar"


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_bar_on_a_terminal(width: int) -> None:
    """Whatever the width: one line, with the step, the ETA and the loss in it."""
    console, printed = terminal(15_000, width)
    console.start(0)
    console.write({**METRICS, "step": 14_000, "mfu": 0.5})
    console.close()
    last = [frame for frame in frames(printed) if frame][-1]
    assert len(last) <= width
    assert "14000/15000" in last and re.search(r"ETA [-\d]:", last) and "loss 2.3457" in last
    if width >= 120:
        assert "58,300 tokens/s  MFU 50.0%  grad norm 0.75  lr 1.00e-03" in last


def test_lines_stay_above_the_bar() -> None:
    console, printed = terminal(900, 80)
    console.start(0)
    console.write({**METRICS, "val_loss": 2.0})
    console.say("a remark")
    console.close()
    console.say("the end")
    assert "step    100  loss 2.3457  validation loss 2.0000 (perplexity 7.39)" in frames(printed)
    assert "a remark" in frames(printed) and frames(printed)[-2] == "the end"


@pytest.mark.parametrize("buffering", [1, -1], ids=["lines, as a terminal", "blocks"])
@pytest.mark.parametrize("gone", ["pipe", "disk"])
def test_nobody_reads_and_the_run_goes_on(gone: str, buffering: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended by ``| head``, by a terminal that is closed, or by a log on a full disk, it would be lost."""
    reader, writer = os.pipe()
    os.close(reader)
    file = os.fdopen(writer, "w", buffering) if gone == "pipe" else Path("/dev/full").open("w", buffering)
    with pytest.raises(OSError):
        print("unheeded", file=file, flush=True)
    monkeypatch.setattr(sys, "stdout", file)
    console = Console(900)
    console.start(0)
    for _ in range(3):
        console.write({**METRICS, "val_loss": 2.0})
        console.say("a remark")
    console.close()
    with pytest.raises(OSError):  # the text that is left in the file's buffer
        file.close()


def test_the_cursor_is_never_left_hidden() -> None:
    """A rank that is ended at once, by a second Ctrl-C, has no time to bring it back."""
    console, printed = terminal(900, 80)
    console.start(0)
    console.write(METRICS)
    assert printed.getvalue().rfind("\x1b[?25h") > printed.getvalue().rfind("\x1b[?25l") >= 0
    console.close()


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console, printed = terminal(900, 80)
    console.start(0)
    console.write(METRICS)
    console.close()
    assert "step    100/900  loss 2.3457" in printed.getvalue()


def test_text_is_printed_as_it_is() -> None:
    console, printed = log(10)
    text = "[bold]not markup[/bold] :x: not an emoji " + "long " * 40
    console.say(text)
    assert printed.getvalue() == text + "\n"


def test_summary_says_what_was_decided() -> None:
    console, printed = log(900)
    composed = tiny("zero3", 2, ["gradient_accumulation_steps=4", "model.vocab_size=37"])
    console.summary(composed, "runs/tiny", "37 kinds of tokens")
    text = printed.getvalue()
    assert "29,024 parameters" in text or re.search(r"[\d,]+ parameters: 2 layers, width 32, 4 heads, context 16, vocabulary 37", text)
    assert "16 sequences = 256 tokens: 2 a rank x 2 ranks x 4 accumulation steps" in text
    assert "ZeRO stage 3, activation checkpointing full, clipping 1.0" in text
    assert "fp32" in text and 'bf16 is "auto" and CPU does not compute bf16 at full speed: fp32' in text
    assert "2 x CPU" in text and "runs/tiny" in text


def test_one_of_each_is_not_many() -> None:
    console, printed = log(900)
    console.summary(tiny("zero0", 1, ["batch.micro_batch_size=auto", "model.vocab_size=37"]), "runs/tiny", "text")
    assert "a rank x 1 rank x 1 accumulation step\n" in printed.getvalue()
