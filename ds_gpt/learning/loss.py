"""Cross-entropy as a sum and a count, so that a mean over micro-batches and ranks weighs every token alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


def linear_cross_entropy_sum(
    x: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float = 0.0, chunk_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """`cross_entropy_sum` of the logits x @ weight.T, of which only `chunk_tokens` rows exist at a time.

    `x` are (..., D), `weight` (V, D), `targets` (...). Logits, log-probabilities and their gradients are the largest
    tensors of a model with a large vocabulary. Here each chunk's gradient is taken in the forward pass, right after
    its loss, so that nothing is computed twice: what waits for the backward pass is the gradient of `x`, as large as
    `x`, and that of `weight`, in fp32. The arithmetic is that of the whole, in another order of summation.

    In one chunk, or with None, the logits go through autograd as usual.
    """
    rows = targets.numel()
    if chunk_tokens is None or rows <= chunk_tokens:
        return cross_entropy_sum(F.linear(x, weight), targets, label_smoothing)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _ChunkedLoss.apply(x, weight, targets, label_smoothing, chunk_tokens)
    chunks = zip(x.flatten(end_dim=-2).split(chunk_tokens), targets.flatten().split(chunk_tokens), strict=True)
    sums = [cross_entropy_sum(F.linear(chunk, weight), wanted, label_smoothing) for chunk, wanted in chunks]
    return torch.stack([loss for loss, _ in sums]).sum(), torch.stack([counted for _, counted in sums]).sum()


class _ChunkedLoss(torch.autograd.Function):
    """The loss by chunks, its gradients made along with it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        rows, targets = x.detach().flatten(end_dim=-2), targets.flatten()
        x_gradient = torch.empty_like(rows)
        # fp32, because the backward pass multiplies it by fp16's loss scale and divides it by the tokens: a sum over
        # all tokens may be beyond what fp16 holds, and many small ones added up beyond what bf16 tells apart.
        trained = ctx.needs_input_grad[1]
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if trained else None
        loss_sum = torch.zeros((), dtype=torch.float32, device=x.device)
        leaf = weight.detach().requires_grad_(trained)
        for start in range(0, len(rows), chunk_tokens):
            chunk = rows[start : start + chunk_tokens].requires_grad_()
            with torch.enable_grad():
                logits = F.linear(chunk, leaf)
                loss, _ = cross_entropy_sum(logits, targets[start : start + chunk_tokens], label_smoothing)
                del logits  # the backward pass of the loss has no need of them
            gradients = torch.autograd.grad(loss, (chunk, leaf) if trained else (chunk,))
            x_gradient[start : start + chunk_tokens] = gradients[0]
            if trained:
                weight_gradient += gradients[1]
            loss_sum += loss.detach()
            del loss, gradients  # before the next chunk's are made
        ctx.save_for_backward(x_gradient.view_as(x), weight_gradient)
        ctx.weight_dtype = weight.dtype
        counted = (targets != IGNORE_INDEX).sum()
        ctx.mark_non_differentiable(counted)
        return loss_sum, counted

    @staticmethod
    def backward(ctx: Any, factor: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        # In place, to need no memory; a second backward pass over the same loss is an error of autograd's then.
        x_gradient, weight_gradient = ctx.saved_tensors
        if weight_gradient is not None:
            weight_gradient = weight_gradient.mul_(factor).to(ctx.weight_dtype)
        return x_gradient.mul_(factor), weight_gradient, None, None, None


def linear_log_probs(x: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int | None = None) -> Tensor:
    """Log-probability of each target under the logits x @ weight.T, fp32, zero where it is ignored.

    `x` are (..., D), `weight` (V, D), `targets` (...), as the result. Logits exist for `chunk_tokens` rows at a time, in
    both passes: what a row's gradient is multiplied by is known in the backward pass only, so each chunk's logits are
    made there a second time, and nothing but `x` waits for it. The arithmetic is that of the whole; in one chunk, or
    with None, the logits go through autograd as usual.
    """
    if chunk_tokens is None or targets.numel() <= chunk_tokens:
        return _log_probs(F.linear(x, weight), targets)
    return _ChunkedLogProbs.apply(x, weight, targets, chunk_tokens)


def _log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    chosen = F.log_softmax(logits, dim=-1, dtype=torch.float32).gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    return chosen.masked_fill(targets == IGNORE_INDEX, 0)


class _ChunkedLogProbs(torch.autograd.Function):
    """Log-probabilities by chunks, whose logits are computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
        ctx.save_for_backward(x, weight, targets)
        ctx.chunk_tokens = chunk_tokens
        found = torch.empty(targets.numel(), dtype=torch.float32, device=x.device)
        for place, rows, wanted in _chunks(x, targets, chunk_tokens):
            found[place] = _log_probs(F.linear(rows, weight), wanted)
        return found.view_as(targets)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, targets = ctx.saved_tensors
        trained = ctx.needs_input_grad[1]
        x_gradient, factors = x.new_empty(targets.numel(), x.shape[-1]), gradient.flatten()
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if trained else None  # many small ones add up
        leaf = weight.detach().requires_grad_(trained)
        for place, rows, wanted in _chunks(x.detach(), targets, ctx.chunk_tokens):
            rows = rows.requires_grad_()
            with torch.enable_grad():
                found = _log_probs(F.linear(rows, leaf), wanted)
            gradients = torch.autograd.grad(found, (rows, leaf) if trained else (rows,), factors[place])
            x_gradient[place] = gradients[0]
            if trained:
                weight_gradient += gradients[1]
            del found, gradients  # before the next chunk's are made
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight.dtype)
        return x_gradient.view_as(x), weight_gradient, None, None


def _chunks(x: Tensor, targets: Tensor, chunk_tokens: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Where each chunk lies among the rows, its rows and its targets."""
    rows, targets = x.flatten(end_dim=-2), targets.flatten()
    for start in range(0, len(rows), chunk_tokens):
        place = slice(start, start + chunk_tokens)
        yield place, rows[place], targets[place]
