"""Arguments that more than one verb takes."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError, so that a mistyped option is told once and not once a rank."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        from ds_gpt.config import ConfigError, Problem

        raise ConfigError(Problem(message, fix=" ".join(self.format_usage().split())))


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """``--config``, ``--deepspeed_config`` and ``--set``."""
    parser.add_argument(
        "--config", metavar="YAML", help="the run: model, data, batch, learning (default: quickstart.yaml, or that of the run to resume)"
    )
    parser.add_argument(
        "--deepspeed_config", metavar="JSON", help="how it runs on the hardware (default: zero1.json, or that of the run to resume)"
    )
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides", help="override a key of either file, for example --set zero_optimization.stage=3"
    )
