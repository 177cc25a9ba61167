"""Which parameters decay."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups: matrices with `weight_decay`, then biases and norms with none.

    Decay shrinks a matrix towards simpler functions; on a bias or a norm's gain it only moves the output. Parameters
    come in the model's order, the same on every rank, frozen ones left out and a shared one given once. A group
    that would be empty is left out, because ZeRO cannot flatten nothing.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if dimensions(p) >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if dimensions(p) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def dimensions(parameter: nn.Parameter) -> int:
    """How many dimensions a parameter has when it is whole: ZeRO-3 leaves an empty vector and keeps `ds_shape`."""
    return len(getattr(parameter, "ds_shape", parameter.shape))
