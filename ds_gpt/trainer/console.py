"""The run as a person follows it: a summary, a progress bar on a terminal, plain lines in a log."""

from __future__ import annotations

import time

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from ds_gpt.config import Composed
from ds_gpt.model.counts import parameters
from ds_gpt.trainer.sinks import Metrics, perplexity

_PRECISION = {"fp32": "fp32", "bf16": "bf16, master weights in fp32", "fp16": "fp16, master weights in fp32, dynamic loss scale"}


class Console:
    """Prints for rank 0. On a terminal a bar is redrawn in place; elsewhere every logged step is a line."""

    def __init__(self, total_steps: int, console: RichConsole | None = None) -> None:
        self._console = console or RichConsole(highlight=False)
        self._total_steps = total_steps
        self._progress: Progress | None = None
        self._first: tuple[int, float] | None = None

    def summary(self, composed: Composed, run_folder: str, corpus: str) -> None:
        """What is about to run, and what was decided on the user's behalf."""
        run, hardware = composed.run, composed.hardware
        shape = f"{run.model.layers} layers, width {run.model.width}, {run.model.heads} heads, context {run.model.context}, vocabulary {run.model.vocabulary}"
        batch = f"{composed.micro_batch_size} a rank x {hardware.world_size} ranks x {composed.accumulation_steps} accumulation steps"
        checkpointing = composed.checkpoint_policy or "off"
        clipping = composed.deepspeed.get("gradient_clipping") or "off"
        facts = [
            ("model", f"{parameters(run.model):,} parameters: {shape}"),
            ("data", corpus),
            ("batch", f"{run.batch.global_batch_size} sequences = {composed.tokens_per_step:,} tokens: {batch}"),
            ("devices", f"{hardware.world_size} x {hardware.name}"),
            ("DeepSpeed", f"ZeRO stage {composed.zero_stage}, activation checkpointing {checkpointing}, clipping {clipping}"),
            ("precision", _PRECISION[composed.precision]),
            *[("", note) for note in composed.notes],
            ("run folder", run_folder),
        ]
        for name, text in facts:
            self.say(f"{name:<12}{text}")
        self._console.print()

    def start(self, step: int) -> None:
        """Begin to show progress at `step` steps done."""
        self._first = (step, time.monotonic())
        if self._console.is_interactive:
            # The status gets what the others leave: 40 of a terminal's 80 columns, and is cut there.
            status = Column(ratio=1, no_wrap=True, overflow="ellipsis")
            columns = (
                TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24 if self._console.width >= 130 else 8),
                TextColumn("ETA"), TimeRemainingColumn(), TextColumn("{task.fields[status]}", table_column=status),
            )  # fmt: skip
            self._progress = Progress(*columns, console=self._console, expand=True)
            self._task = self._progress.add_task("train", total=self._total_steps, completed=step, status="")
            self._progress.start()
            # A rank that is ended at once (a second Ctrl-C) cannot bring a hidden cursor back.
            self._console.show_cursor(True)

    def advance(self, step: int) -> None:
        """Move the bar to `step` steps done."""
        if self._progress:
            self._progress.update(self._task, completed=step)

    def write(self, metrics: Metrics) -> None:
        """Show the metrics of a step."""
        status = f"loss {metrics['loss']:.4f}  {metrics['tokens_per_s']:,.0f} tokens/s"
        if metrics["mfu"] is not None:
            status += f"  MFU {metrics['mfu']:.1%}"
        status += f"  grad norm {metrics['grad_norm']:.2f}  lr {metrics['lr']:.2e}"
        validation = ""
        if "val_loss" in metrics:
            validation = f"  validation loss {metrics['val_loss']:.4f} (perplexity {perplexity(metrics['val_loss']):.2f})"
        if self._progress:
            self._progress.update(self._task, completed=metrics["step"], status=status)
            if validation:
                self.say(f"step {metrics['step']:>6}  loss {metrics['loss']:.4f}{validation}")
        else:
            self.say(f"step {metrics['step']:>6}/{self._total_steps}  {status}  ETA {self._eta(metrics['step'])}{validation}")

    def _eta(self, step: int) -> str:
        first, start = self._first or (0, time.monotonic())
        seconds = (time.monotonic() - start) / max(1, step - first) * (self._total_steps - step)
        hours, rest = divmod(round(seconds), 3600)
        return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        (self._progress.console if self._progress else self._console).print(text, markup=False, emoji=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the bar."""
        if self._progress:
            self._progress.stop()
            self._progress = None
