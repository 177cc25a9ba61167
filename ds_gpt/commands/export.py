"""``ds-gpt export``: a run's model as files that other tools read."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ds_gpt.commands.arguments import Parser
from ds_gpt.commands.failure import run_or_fail


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Parse the command line and export; ends the process with status 2 on bad input."""
    parser = Parser(prog=prog, description="Write a run's model as files that other tools read.", allow_abbrev=False)
    parser.add_argument(
        "run", metavar="RUN", help="a run folder (its newest intact checkpoint), or the folder of a checkpoint"
    )
    parser.add_argument(
        "--format", choices=("hf", "peft", "safetensors", "torch"), default="hf",
        help="hf: for transformers, vLLM and others, adapters merged; peft: the adapters alone, for peft and the model "
        "that the run started from, exported as hf; safetensors: ds_gpt's own tensor names; torch: one file for "
        "torch.load (default: hf)",
    )  # fmt: skip
    parser.add_argument(
        "--base", metavar="NAME_OR_PATH",
        help="of peft: where transformers finds the model that the run started from, for AutoPeftModelForCausalLM",
    )  # fmt: skip
    parser.add_argument(
        "--output", metavar="DIR", help="a folder that does not exist yet (default: RUN/exports/STEP-FORMAT-DTYPE)"
    )
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="of the weights (default: fp32, as they were trained)",
    )
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", default="5GB", help="of one file of weights (default: 5GB)"
    )
    run_or_fail(lambda: run(parser.parse_args(arguments)))


def run(options: argparse.Namespace) -> None:
    """Find, convert, write, and say where. Raises ConfigError."""
    from ds_gpt.checkpoint.saved_model import find_saved_model
    from ds_gpt.config import ConfigError, Problem
    from ds_gpt.exchange.adapters import export_adapter
    from ds_gpt.exchange.exporting import export
    from ds_gpt.exchange.tensor_files import parse_bytes

    try:
        max_shard_bytes = parse_bytes(options.max_shard_size)
    except ValueError as error:
        raise ConfigError(Problem(f"--max-shard-size {error}", fix="for example --max-shard-size 5GB")) from None
    if options.base is not None and options.format != "peft":
        raise ConfigError(Problem(f"--base with --format {options.format}", "only adapters have one", "leave it out, or use --format peft"))
    saved = find_saved_model(options.run, lambda text: print(text, file=sys.stderr))
    name = f"{saved.checkpoint.name}-{options.format}-{options.dtype}"
    output = Path(options.output) if options.output else saved.checkpoint.absolute().parent.parent / "exports" / name
    if options.format == "peft":
        export_adapter(saved, output, options.dtype, options.base)
    else:
        export(saved, output, options.format, options.dtype, max_shard_bytes)
    size_bytes = sum(path.stat().st_size for path in output.iterdir())
    shown = output.relative_to(Path.cwd()) if output.is_relative_to(Path.cwd()) else output
    print(f"{saved.checkpoint} as {options.format}, {options.dtype}, {size_bytes / 1e6:,.1f} MB: {shown}")
