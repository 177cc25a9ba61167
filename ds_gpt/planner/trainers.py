"""How a trainer keeps its numbers, where that is not how ds_gpt does: options of the planner's formulas.

The defaults are ds_gpt's own. The others let the same formulas predict runs that others published, with the software that they
used, so that the formulas are checked against measurements that nobody here made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class States:
    """Bytes for each parameter that a rank holds, in trainers that keep them plainly.

    Attributes:
        weights: what the model computes with, or is cast from under autocast.
        gradients: for as long as the run lasts; sharded from ZeRO 2 on.
        fresh: of a gradient as backward makes it, before it is added to the lasting ones; 0 where it is one of them.
        buckets: DistributedDataParallel's own copy of the gradients.
        optimizer: masters and moments; sharded from ZeRO 1 on.
        sent: of a gradient on its way to the other ranks.
        lasting: whether gradients exist all the time, not only from backward to step.
    """

    weights: int
    gradients: int
    fresh: int
    buckets: int
    optimizer: int
    sent: int
    lasting: bool


@dataclass(frozen=True)
class Trainer:
    """What differs between trainers.

    Attributes:
        attention: "flash" keeps a number for each query; "plain" forms the T x T scores of each head: softmax, dropout, product
            (Korthikanti et al. 2022, equation 1: 5 a s^2 b bytes a layer in half precision with dropout).
        loss: what the logits cost. "log_probs", ds_gpt: fp32 log-probabilities and the gradients through them. "fused": the logits and
            their gradient in the computing precision (FlashAttention's cross-entropy kernel, which llm-foundry calls
            fused_crossentropy). "softmax": one fp32 copy, made into the softmax and into its gradient in place (Megatron).
        autocast: fp32 weights and residual stream, matrices in half precision; the casts of the weights are kept until the step's
            end (PyTorch's autocast caches them while its context is open).
        states: how weights, gradients and optimizer are kept; None: as DeepSpeed does.
        vocabulary_parallel: whether tensor parallelism also cuts embedding and head (Megatron), not the blocks alone (AutoTP).
        norms_parallel: whether it also cuts what lies between, along the tokens (Korthikanti et al. 2022, section 4.2).
        fused: whether element-wise operations run fused: they read and write about half as much, and a SwiGLU keeps less.
    """

    attention: Literal["flash", "plain"] = "flash"
    loss: Literal["log_probs", "fused", "softmax"] = "log_probs"
    autocast: bool = False
    states: States | None = None
    vocabulary_parallel: bool = False
    norms_parallel: bool = False
    fused: bool = False


DS_GPT = Trainer()
# PyTorch alone: DistributedDataParallel, fp32 weights under autocast, attention written out.
PLAIN_DDP = Trainer("plain", "log_probs", autocast=True, states=States(4, 4, 0, 4, 8, sent=4, lasting=False))
