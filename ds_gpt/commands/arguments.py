"""Arguments that more than one verb takes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import torch


class Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError, so that a mistyped option is told once and not once a rank."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        from ds_gpt.config import ConfigError, Problem

        usage = " ".join(self.format_usage().split())
        left_over = message.removeprefix("unrecognized arguments: ").split() if message.startswith("unrecognized") else []
        settings = [word for word in left_over if "=" in word.strip("=") and not word.startswith("-")]
        if settings and "--set" in usage:
            usage = f"--set takes one setting each time: {' '.join(f'--set {setting}' for setting in settings)}. {usage}"
        raise ConfigError(Problem(message, fix=usage))


def add_config_arguments(
    parser: argparse.ArgumentParser, config: str = "quickstart.yaml", deepspeed_config: str = "zero1.json"
) -> None:
    """``--config``, ``--deepspeed_config`` and ``--set``, whose help names the given defaults."""
    parser.add_argument(
        "--config", metavar="YAML", help=f"the run: model, data, batch, learning (default: {config})"
    )
    parser.add_argument(
        "--deepspeed_config", metavar="JSON", help=f"how it runs on the hardware (default: {deepspeed_config})"
    )
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides", help="override a key of either file, for example --set zero_optimization.stage=3"
    )


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """``--device`` of the verbs that use a model."""
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one"
    )


def torch_device(name: str) -> torch.device:
    """What ``--device`` means on this machine. Raises ConfigError where there is no such device."""
    import torch

    from ds_gpt.config import ConfigError, Problem

    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError(
            Problem(
                "--device cuda, but PyTorch finds no GPU", fix="leave out --device, or mend the driver (nvidia-smi)"
            )
        )
    return torch.device("cuda", 0) if available and name != "cpu" else torch.device("cpu")
