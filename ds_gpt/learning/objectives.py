"""What a run minimizes: of each stage, from a batch to a loss.

An objective is called with the model's forward pass, whether it is training, and the tensors of a batch. It returns
sums, so that a mean over micro-batches and ranks weighs alike all that is counted: tokens, or pairs of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ds_gpt.config import ConfigError, Problem, RunConfig
from ds_gpt.learning.loss import IGNORE_INDEX, linear_cross_entropy_sum, linear_log_probs

Forward = Callable[..., Any]  # GPT.forward


@dataclass(frozen=True)
class Measured:
    """A micro-batch, summed.

    Attributes:
        loss_sum: nats.
        counted: how many tokens or pairs the sum is over.
        share: what it is divided by for the gradient: this micro-batch's even share of what all ranks count in a step.
        metrics: other sums over what is counted, by name.
    """

    loss_sum: Tensor
    counted: Tensor
    share: Tensor | int
    metrics: dict[str, Tensor] = field(default_factory=dict)


Objective = Callable[..., Measured]


def objective_of(run: RunConfig) -> Objective:
    """The objective of the run's stage: (forward, training, *tensors of a batch) to `Measured`."""
    if run.stage in ("dpo", "reward"):
        return partial(preference if run.stage == "dpo" else reward, run)
    if run.stage == "sft":
        return partial(answers, run)
    return partial(next_token if run.objective.name == "next_token" else corrupted, run)


def means(
    run: RunConfig, loss_sum: float, counted: float, names: Sequence[str], sums: Sequence[float]
) -> tuple[float, dict[str, float]]:
    """The loss, and metrics by name, of sums over all micro-batches and ranks.

    Raises:
        ConfigError: nothing was counted.
    """
    if counted == 0:
        raise ConfigError(
            Problem(
                f"no {'pair' if run.stage in ('dpo', 'reward') else 'token'} of data.corpus = '{run.data.title}' that was read is a target",
                f"the loss of stage = '{run.stage}' is a mean over targets, and there are none",
                f"give a corpus whose answers lie within model.context = {run.model.context} tokens",
            )
        )
    return loss_sum / counted, {name: value / counted for name, value in zip(names, sums, strict=True)}


def next_token(
    run: RunConfig,
    forward: Forward,
    training: bool,
    inputs_BT: Tensor,
    targets_BT: Tensor,
    documents_BT: Tensor | None = None,
) -> Measured:
    """Cross-entropy of every next token. With `documents_BT` a token sees its own document only."""
    return Measured(
        *forward(inputs_BT, loss=_cross_entropy(run, training, targets_BT), documents_BT=documents_BT),
        targets_BT.numel(),
    )


def answers(
    run: RunConfig,
    forward: Forward,
    training: bool,
    inputs_BT: Tensor,
    targets_BT: Tensor,
    documents_BT: Tensor,
    positions_BT: Tensor,
    share: Tensor | int = 1,
) -> Measured:
    """Cross-entropy of answers alone: all other targets are ignored. Each of the packed examples is a document."""
    loss = _cross_entropy(run, training, targets_BT)
    return Measured(*forward(inputs_BT, positions_BT, loss=loss, documents_BT=documents_BT), share)


def corrupted(
    run: RunConfig,
    forward: Forward,
    training: bool,
    inputs_BT: Tensor,
    targets_BT: Tensor,
    prefix_B: Tensor,
    share: Tensor | int = 1,
) -> Measured:
    """Cross-entropy of what was corrupted, the first `prefix_B` tokens seen by all."""
    return Measured(*forward(inputs_BT, loss=_cross_entropy(run, training, targets_BT), prefix_B=prefix_B), share)


def preference(
    run: RunConfig,
    forward: Forward,
    training: bool,
    inputs_NT: Tensor,
    targets_NT: Tensor,
    reference_B2: Tensor,
    share: Tensor | int = 1,
) -> Measured:
    """Direct preference optimization (Rafailov et al. 2023, equation 7), label smoothing as in cDPO (Mitchell 2023).

    The N = 2B sequences are pairs, the preferred answer first. `reference_B2` are log-probabilities of the answers
    under the model that the run started from. A pair without targets is padding.
    """
    beta, smoothing = run.preference.beta, run.preference.label_smoothing
    log_probs_B2 = forward(inputs_NT, loss=log_probs_of(run, targets_NT)).view(-1, 2)
    rewards_B2 = beta * (log_probs_B2 - reference_B2)
    margin_B = rewards_B2[:, 0] - rewards_B2[:, 1]
    loss_B = -(1 - smoothing) * F.logsigmoid(margin_B) - smoothing * F.logsigmoid(-margin_B)
    metrics = {"reward_chosen": rewards_B2[:, 0], "reward_rejected": rewards_B2[:, 1]}
    return _over_pairs(loss_B, margin_B, targets_NT, share, metrics)


def reward(
    run: RunConfig, forward: Forward, training: bool, inputs_NT: Tensor, targets_NT: Tensor, share: Tensor | int = 1
) -> Measured:
    """Pairwise loss of a reward model (Ouyang et al. 2022, equation 1): -log sigmoid(preferred - other).

    The N = 2B sequences are pairs, the preferred answer first. The reward of a sequence is the head's number at its one
    place with a target, its last token.
    """
    last_NT = targets_NT != IGNORE_INDEX

    def at_last(x_NTD: Tensor, weight: Tensor) -> Tensor:
        return (F.linear(x_NTD, weight).squeeze(-1).float() * last_NT).sum(dim=-1)

    rewards_B2 = forward(inputs_NT, loss=at_last).view(-1, 2)
    margin_B = rewards_B2[:, 0] - rewards_B2[:, 1]
    return _over_pairs(-F.logsigmoid(margin_B), margin_B, targets_NT, share, {})


def log_probs_of(run: RunConfig, targets_NT: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """What makes `sequence_log_probs` of the last hidden states and the head's weight."""
    return partial(sequence_log_probs, targets=targets_NT, chunk_tokens=run.loss_chunk_tokens)


def sequence_log_probs(x_BTD: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int | None = None) -> Tensor:
    """Log-probability of each sequence's targets together, B, fp32; ignored ones count for nothing.

    Logits exist for `chunk_tokens` tokens at a time, None: for all.
    """
    return linear_log_probs(x_BTD, weight, targets, chunk_tokens).sum(dim=-1)


def _cross_entropy(
    run: RunConfig, training: bool, targets_BT: Tensor
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    smoothing = run.loss.label_smoothing if training else 0.0
    return partial(
        linear_cross_entropy_sum, targets=targets_BT, label_smoothing=smoothing, chunk_tokens=run.loss_chunk_tokens
    )


def _over_pairs(
    loss_B: Tensor, margin_B: Tensor, targets_NT: Tensor, share: Tensor | int, metrics: dict[str, Tensor]
) -> Measured:
    real_B = (targets_NT != IGNORE_INDEX).any(dim=-1).view(-1, 2).all(dim=-1)
    metrics = {"reward_margin": margin_B, "accuracy": (margin_B > 0).float(), **metrics}
    sums = {name: values_B.masked_fill(~real_B, 0).sum() for name, values_B in metrics.items()}
    return Measured(loss_B.masked_fill(~real_B, 0).sum(), real_B.sum(), share, sums)
