"""Arguments that more than one verb takes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"


class Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError, so that a mistyped option is told once and not once a rank."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        from ds_gpt.config import ConfigError, Problem

        raise ConfigError(Problem(message, fix=" ".join(self.format_usage().split())))


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """``--config``, ``--deepspeed_config`` and ``--set``."""
    parser.add_argument(
        "--config", metavar="YAML", default=str(CONFIGS / "runs" / "quickstart.yaml"), help="the run: model, data, batch, learning (default: quickstart)"
    )
    parser.add_argument(
        "--deepspeed_config", metavar="JSON", default=str(CONFIGS / "zero1.json"), help="how it runs on the hardware (default: zero1.json)"
    )
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides", help="override a key of either file, for example --set zero_optimization.stage=3"
    )
