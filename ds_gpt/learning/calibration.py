"""Whether a model is right as often as it is sure (Guo et al. 2017, "On Calibration of Modern Neural Networks")."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_gpt.learning.loss import IGNORE_INDEX

BINS = 15  # the paper's


def confidence_bins(logits: Tensor, targets: Tensor, bins: int = BINS, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Predictions sorted into `bins` equal intervals of confidence, ((m - 1) / M, m / M]: [3, M] float64.

    Of each bin: how many tokens, the sum of their confidences, and how many were right. The prediction is the
    likeliest token, the confidence its probability. `logits` are (..., V), `targets` (...). Sums of batches add up.
    """
    confidences, predictions = torch.softmax(logits.flatten(end_dim=-2), dim=-1, dtype=torch.float32).max(dim=-1)
    targets = targets.flatten()
    counted = targets != ignore_index
    confidences, right = confidences[counted].double(), (predictions == targets)[counted].double()
    number = (confidences * bins).ceil().long().clamp(1, bins) - 1
    sums = torch.zeros(3, bins, dtype=torch.float64, device=logits.device)
    return sums.index_add_(1, number, torch.stack((torch.ones_like(right), confidences, right)))


def expected_calibration_error(sums: Tensor) -> float:
    """Equation 3: the mean over tokens of their bin's |accuracy - confidence|; `sums` as of `confidence_bins`."""
    count, confidence, right = sums
    return float((right - confidence).abs().sum() / count.sum())
