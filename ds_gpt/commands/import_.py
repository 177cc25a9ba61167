"""``ds-gpt import``: a model that was trained elsewhere, as a run to go on from."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ds_gpt.commands.arguments import Parser
from ds_gpt.commands.failure import run_or_fail


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Parse the command line and import; ends the process with status 2 on bad input."""
    parser = Parser(
        prog=prog, description="Make a run of a GPT-2, Llama, Mistral or Qwen3 model in safetensors files.", allow_abbrev=False
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a folder with config.json, *.safetensors and tokenizer.json, as transformers or ds-gpt export saves it",
    )
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="folder of the run, which does not exist yet (default: runs/NAME, by the folder's name)",
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json, instead of the folder's own")
    run_or_fail(lambda: run(parser.parse_args(arguments)))


def run(options: argparse.Namespace) -> None:
    """Check, convert, write, and say how to go on. Raises ConfigError."""
    from ds_gpt.engine.ranks import Ranks
    from ds_gpt.exchange.importing import find_foreign_model
    from ds_gpt.model.counts import parameters
    from ds_gpt.trainer.imported_run import import_run

    foreign = find_foreign_model(Path(options.path), Path(options.tokenizer) if options.tokenizer else None)
    path = import_run(foreign, options.run_dir, Ranks.from_environment().hardware())
    print(
        f"{foreign.folder}: {parameters(foreign.model):,} parameters, {foreign.tokenizer.vocab_size:,} token ids, "
        f"now the run {path}\n"
        f"go on with: deepspeed ds_gpt/train.py --resume {path} --set data.corpus=..."
    )
