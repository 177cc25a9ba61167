"""The sections of the run YAML that are about what comes after pre-training, or is learned instead of the next token."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from ds_gpt.config.section import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section

Stage = Literal["pretrain", "sft", "dpo", "reward"]


class LoraConfig(Section):
    """Low-rank adapters on frozen linear maps (Hu et al. 2021): W + alpha / rank x B A."""

    rank: PositiveInt | None = None  # None: no adapters, every weight is trained
    alpha: PositiveFloat = 16.0
    dropout: Fraction = 0.0  # of what the adapters read
    # Names of linear maps within a block, or shell patterns of their full names: "blocks.[01].*.up"
    targets: Annotated[tuple[str, ...], Strict(False), Field(min_length=1)] = ("qkv", "out")
