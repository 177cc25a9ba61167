"""Low-rank adapters (LoRA; Hu et al. 2021): W + alpha / rank x B A, of which only A and B are trained.

R is the rank. The frozen map keeps its weight, and its place in the model: ``blocks.0.attention.qkv`` becomes an
`Adapted` that holds it as ``base``, beside ``lora_A`` and ``lora_B``, PEFT's names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_gpt.config import ConfigError, Problem
from ds_gpt.config.errors import did_you_mean
from ds_gpt.config.stage import LoraConfig


class Adapted(nn.Module):
    """A frozen linear map and its adapter. As B starts at zero, it starts as the map alone."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        self.dropout = nn.Dropout(dropout)
        options: Any = {"bias": False, "dtype": base.weight.dtype, "device": base.weight.device}
        self.lora_A = nn.Linear(base.in_features, rank, **options)
        self.lora_B = nn.Linear(rank, base.out_features, **options)
        # A is Gaussian as in the paper, with the variance of PEFT's uniform one. Both are drawn through `apply`, which
        # under ZeRO-3 gathers what it writes to.
        self.lora_A.apply(partial(_draw, std=math.sqrt(1 / (3 * base.in_features))))
        self.lora_B.apply(partial(_draw, std=0.0))
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., D'); `x` is whatever the map takes."""
        y = self.base(x)
        return y if self.merged else y + self.scale * self.lora_B(self.lora_A(self.dropout(x)))

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter to the map's weight, which then does the work of both. Not under ZeRO-3."""
        if not self.merged:
            self.base.weight += adapter_weight(self.lora_A.weight, self.lora_B.weight, self.scale)
            self.merged = True

    @torch.no_grad()
    def unmerge(self) -> None:
        """Undo `merge`, but for rounding."""
        if self.merged:
            self.base.weight -= adapter_weight(self.lora_A.weight, self.lora_B.weight, self.scale)
            self.merged = False


def adapter_weight(lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:
    """What an adapter adds to the weight of its map, (outputs, inputs): alpha / rank x B A (section 4.1)."""
    return scale * (lora_B @ lora_A)


def _draw(module: nn.Module, std: float) -> None:
    assert isinstance(module, nn.Linear)
    nn.init.normal_(module.weight, std=std)


def apply_lora(model: nn.Module, config: LoraConfig) -> None:
    """Freeze `model`, and put adapters beside the linear maps of its blocks that `config.targets` names.

    Raises:
        ConfigError: a target that no map has.
    """
    if config.rank is None:
        return
    maps = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("blocks.")
    }
    _check_targets(config, list(maps))
    model.requires_grad_(False)
    for name, base in maps.items():
        if config.adapts(name):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, Adapted(base, config.rank, config.alpha, config.dropout))
    model.get_submodule("embedding").register_forward_hook(_differentiable)


def _differentiable(module: nn.Module, inputs: object, x_BTD: Tensor) -> None:
    """Let gradients reach the first block's input, though nothing before it is trained.

    ZeRO-3 gathers a block's weights for the backward pass in a hook on the gradient of its input. Without one, a block
    that is recomputed there finds them empty.
    """
    if torch.is_grad_enabled():
        x_BTD.requires_grad_()


def _check_targets(config: LoraConfig, names: list[str]) -> None:
    known = sorted({name.rpartition(".")[2] for name in names})
    wrong = [
        Problem(
            f"lora.targets: no linear map of the blocks is named '{target}'",
            f"adapters stand beside linear maps; here these are {', '.join(known)}",
            did_you_mean(target, known),
        )
        for target in config.targets
        if not any(config.model_copy(update={"targets": (target,)}).adapts(name) for name in names)
    ]
    if wrong:
        raise ConfigError(wrong)


def adapted(model: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """The maps with adapters, by the names that they had without."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Adapted))


def merge(model: nn.Module) -> None:
    """Add every adapter to its map. Merging twice changes nothing."""
    for _, module in adapted(model):
        module.merge()


def unmerge(model: nn.Module) -> None:
    """Undo `merge`, but for rounding."""
    for _, module in adapted(model):
        module.unmerge()
