"""Cross-entropy as a sum and a count, so that a mean over micro-batches and ranks weighs every token alike."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100  # PyTorch's own


def cross_entropy_sum(
    logits: Tensor, targets: Tensor, label_smoothing: float = 0.0, ignore_index: int = IGNORE_INDEX
) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats summed over the counted tokens (fp32 scalar), and how many those are (int64 scalar).

    `logits` are (..., V) in any floating type, `targets` are (...) token ids or `ignore_index`. Label smoothing
    (Szegedy et al. 2016, section 7) mixes the target with the uniform distribution over V:
    (1 - eps) x nll + eps x mean over V of -log p. Neither result waits for the device. With no counted token both are
    zero, and so are the gradients.

    Memory: the one large tensor kept for backward is the log-probabilities, fp32. On CUDA, fp16 logits are read as they
    are; PyTorch copies bf16 ones to fp32 first, and frees the copy before this returns.
    """
    log_probs = F.log_softmax(logits.flatten(end_dim=-2), dim=-1, dtype=torch.float32)
    targets = targets.flatten()
    counted = targets != ignore_index
    loss_sum = F.nll_loss(log_probs, targets, ignore_index=ignore_index, reduction="sum")
    if label_smoothing > 0:
        uniform_sum = -log_probs.mean(dim=-1).masked_fill(~counted, 0).sum()
        loss_sum = (1 - label_smoothing) * loss_sum + label_smoothing * uniform_sum
    return loss_sum, counted.sum()
