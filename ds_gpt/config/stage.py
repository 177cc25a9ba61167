"""Sections of the run YAML about what comes after pre-training, or is learned in place of the next token."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field, Strict

from ds_gpt.config.section import Fraction, PositiveFloat, PositiveInt, Section

Stage = Literal["pretrain", "sft", "dpo", "reward"]


class LoraConfig(Section):
    """Low-rank adapters on frozen linear maps (Hu et al. 2021): W + alpha / rank x B A."""

    rank: PositiveInt | None = None  # None: no adapters, every weight is trained
    alpha: PositiveFloat = 16.0
    dropout: Fraction = 0.0  # of what the adapters read
    # Names of linear maps within a block, or shell patterns of their full names: "blocks.[01].*.up"
    targets: Annotated[tuple[str, ...], Strict(False), Field(min_length=1)] = ("qkv", "out")

    def adapts(self, name: str) -> bool:
        """Whether the linear map of that full name gets an adapter, where there are adapters at all."""
        return any(fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}") for target in self.targets)


class ObjectiveConfig(Section):
    """What is predicted in pre-training: the next token, masked tokens (BERT), or corrupted spans (T5)."""

    name: Literal["next_token", "masked", "span_corruption"] = "next_token"
    rate: Annotated[float, Field(gt=0, lt=1)] = 0.15  # share of the tokens that is masked, or lies in corrupted spans
    mean_span: Annotated[float, Field(ge=1)] = 3.0  # tokens of a corrupted span, on average


class ExamplesConfig(Section):
    """How conversations, answers and pairs of answers become sequences; of stages sft, dpo and reward."""

    template: str | None = (
        None  # file of a Jinja chat template; None: "User: ...", "Assistant: ...", a blank line after each
    )
    too_long: Literal["cut", "drop"] = "cut"  # an example longer than model.context; a pair is always dropped
    packing: bool = True  # several examples in a sequence, none of which sees another


class PreferenceConfig(Section):
    """Direct preference optimization (Rafailov et al. 2023)."""

    beta: PositiveFloat = 0.1  # the larger, the closer to the model that it started from
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0  # probability that a preference is wrong
