"""The run as a person follows it: a summary, a progress bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import IO, Any, cast

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from ds_gpt.config import Composed
from ds_gpt.model.counts import parameters, trained_parameters
from ds_gpt.trainer.sinks import Metrics, perplexity

_PRECISION = {"fp32": "fp32", "bf16": "bf16, master weights in fp32", "fp16": "fp16, master weights in fp32, dynamic loss scale"}


def _counted(number: int, name: str) -> str:
    return f"{number} {name}" + "s" * (number != 1)


def _shown(perplexity: float) -> str:
    """With two decimals while they mean something."""
    return f"{perplexity:.2f}" if perplexity < 10_000 else f"{perplexity:.4g}"


class _Status(ProgressColumn):
    """The numbers of the last logged step: as many whole fields as the others leave room for, the first ones first."""

    max_refresh = None

    def render(self, task: Task) -> RenderableType:
        return _Fields(task.fields["fields"])


class _Fields:
    def __init__(self, fields: Sequence[str]) -> None:
        self._fields = fields

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        count = len(self._fields)
        while count > 1 and len("  ".join(self._fields[:count])) > options.max_width:
            count -= 1
        yield Text("  ".join(self._fields[:count]), no_wrap=True, overflow="ellipsis")

    def __rich_measure__(self, console: RichConsole, options: ConsoleOptions) -> Measurement:
        return Measurement(0, len("  ".join(self._fields)))


class Unheeded:
    """A stream that a run does not depend on: its terminal may be closed, its pipe (``| head``) or its disk full."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or do without."""
        try:
            return self._stream.write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Flush, or do without."""
        try:
            self._stream.flush()
        except OSError:
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Console:
    """Prints for rank 0. On a terminal a bar is redrawn in place; elsewhere every logged step is a line."""

    def __init__(self, total_steps: int, console: RichConsole | None = None) -> None:
        self._console = console or RichConsole(file=cast(IO[str], Unheeded(sys.stdout)), highlight=False)
        self._total_steps = total_steps
        self._progress: Progress | None = None
        self._first: tuple[int, float] | None = None

    def summary(self, composed: Composed, run_folder: str, corpus: str) -> None:
        """What is about to run, and what was decided on the user's behalf."""
        run, hardware = composed.run, composed.hardware
        shape = f"{_counted(run.model.layers, 'layer')}, width {run.model.width}, {_counted(run.model.heads, 'head')}, context {run.model.context}, vocabulary {run.model.vocabulary:,}"
        batch = f"{composed.micro_batch_size} a rank x {_counted(composed.data_ranks, 'data rank' if run.parallel.used else 'rank')} x {_counted(composed.accumulation_steps, 'accumulation step')}"
        checkpointing = composed.checkpoint_policy or "off"
        item = "pair" if run.sequences == 2 else "sequence"
        clipping = composed.deepspeed.get("gradient_clipping") or "off"
        compiled = ", compiled: the first step takes a while" if composed.compiled else ""
        adapters = f"rank {run.lora.rank} beside {', '.join(run.lora.targets)}"
        facts = [
            ("model", f"{parameters(run.model):,} parameters: {shape}"),
            *([("adapters", f"{trained_parameters(run):,} parameters are trained: {adapters}")] if run.lora.rank else []),
            ("data", corpus),
            ("batch", f"{_counted(run.batch.global_batch_size, item)} = {composed.tokens_per_step:,} tokens: {batch}"),
            ("devices", f"{hardware.world_size} x {hardware.name}"),
            *([("parallel", f"{run.parallel}: copies of the model: {composed.data_ranks}")] if run.parallel.used else []),
            ("DeepSpeed", f"ZeRO stage {composed.zero_stage}, activation checkpointing {checkpointing}, clipping {clipping}{compiled}"),
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
            bar = BarColumn(bar_width=min(24, max(8, self._console.width // 8)))
            columns = (TextColumn("step"), MofNCompleteColumn(), bar, TextColumn("ETA"), TimeRemainingColumn(), _Status(table_column=Column(ratio=1)))
            self._progress = Progress(*columns, console=self._console, expand=True)
            self._task = self._progress.add_task("train", total=self._total_steps, completed=step, fields=[])
            self._progress.start()
            # A rank that is ended at once (a second Ctrl-C) cannot bring a hidden cursor back.
            self._console.show_cursor(True)

    def advance(self, step: int) -> None:
        """Move the bar to `step` steps done."""
        if self._progress:
            self._progress.update(self._task, completed=step)

    def write(self, metrics: Metrics) -> None:
        """Show the metrics of a step."""
        fields = [f"loss {metrics['loss']:.4f}", f"{metrics['tokens_per_s']:,.0f} tokens/s"]
        if metrics["mfu"] is not None:
            fields.append(f"MFU {metrics['mfu']:.1%}")
        fields += [f"grad norm {metrics['grad_norm']:.2f}", f"lr {metrics['lr']:.2e}"]
        validation = ""
        if "val_loss" in metrics:
            meaning = f"accuracy {metrics['val_accuracy']:.1%}" if "val_accuracy" in metrics else f"perplexity {_shown(perplexity(metrics['val_loss']))}"
            validation = f"  validation loss {metrics['val_loss']:.4f} ({meaning})"
        if self._progress:
            self._progress.update(self._task, completed=metrics["step"], fields=fields)
            if validation:
                self.say(f"step {metrics['step']:>6}  loss {metrics['loss']:.4f}{validation}")
        else:
            self.say(f"step {metrics['step']:>6}/{self._total_steps}  {'  '.join(fields)}  ETA {self._eta(metrics['step'])}{validation}")

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
