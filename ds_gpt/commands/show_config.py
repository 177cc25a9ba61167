"""``ds-gpt show-config``: what would run, and who stated each number."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ds_gpt.commands.arguments import Parser, add_config_arguments
from ds_gpt.commands.failure import print_or_fail


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Parse the command line and print; ends the process with status 2 on bad input."""
    parser = Parser(prog=prog, description="Print the composed configuration and who owns each number.", allow_abbrev=False)
    add_config_arguments(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="compose for this kind of device (default: cpu)")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="number of ranks (default: 1)")
    parser.add_argument("--json", action="store_true", help="print only the dictionary that DeepSpeed gets")
    print_or_fail(lambda: show(parser.parse_args(arguments)))


def show(options: argparse.Namespace) -> None:
    """Print the composition. Raises ConfigError where it is impossible."""
    from ds_gpt.config import ConfigError, Hardware, Problem, flatten, load
    from ds_gpt.config.shipped import DEFAULT_DEEPSPEED, DEFAULT_RUN

    if options.devices < 1:
        raise ConfigError(Problem(f"--devices {options.devices} is not a number of ranks", fix="give 1 or more"))
    cuda = options.device == "cuda"
    hardware = Hardware(options.device, "a bf16-capable GPU" if cuda else "a CPU", options.devices, bf16=cuda)
    config, deepspeed_config = options.config or DEFAULT_RUN, options.deepspeed_config or DEFAULT_DEEPSPEED
    composed = load(config, deepspeed_config, hardware, options.overrides)
    if options.json:
        print(json.dumps(composed.deepspeed, indent=2))
        return
    print(f"# the run ({config})")
    _table(flatten(composed.run.model_dump(mode="json")), composed.run_owners)
    print(f"\n# what DeepSpeed gets ({deepspeed_config}), composed for {options.devices} x {hardware.name}")
    _table(flatten(composed.deepspeed), composed.owners)
    for note in composed.notes:
        print(f"\nnote: {note}")


def _table(values: Mapping[str, Any], owners: Mapping[str, str]) -> None:
    keys = max(map(len, values))
    texts = {key: json.dumps(value) for key, value in values.items()}
    width = max(map(len, texts.values()))
    for key, text in texts.items():
        print(f"{key:<{keys}}  {text:<{width}}  {owners.get(key, '')}".rstrip())
