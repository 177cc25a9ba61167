"""The configuration files that come with ds_gpt."""

from pathlib import Path

SHIPPED = Path(__file__).resolve().parents[2] / "ds_configs"
DEFAULT_RUN = SHIPPED / "runs" / "quickstart.yaml"
DEFAULT_DEEPSPEED = SHIPPED / "zero1.json"
