"""Arguments that more than one verb takes."""

from __future__ import annotations

import argparse
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"


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
