"""Time of one optimizer step, from the configuration and a device.

Matrix multiplications run at a share of the device's peak that falls with small dimensions; attention at its kernel's
share; everything else at a share of the memory's bandwidth; what a kernel costs to launch is the floor of each. ZeRO's
collectives run at a share of the slowest link on their way, and what the backward pass can hide of them is hidden.

The constants are of the software (cuBLAS, FlashAttention 2, NCCL, DeepSpeed), not of a row: one set for all. They
were fitted on half of the published rows and checked on the other; ``benchmarks`` prints the errors.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_gpt.config import Composed
from ds_gpt.model.counts import flops_per_token, mfu, parameters
from ds_gpt.planner.devices import Device
from ds_gpt.planner.shapes import Shapes


@dataclass(frozen=True)
class Constants:
    """Shares of a device's peaks that software reaches.

    Attributes:
        matrix: of the matrix peak, for matrices without end.
        half_size: dimension at which a matrix multiplication has lost half of that by this dimension alone.
        attention: of the matrix peak, FlashAttention 2, forward and backward, of the causal half.
        bandwidth: of the memory's, for element-wise kernels.
        launch_s: least time of a kernel, as PyTorch launches them one by one.
        link: of a link's bandwidth, for NCCL's collectives.
        hidden: share of the backward pass under which ZeRO 2 and 3 can hide communication.
        host_adam: parameters a second that the host's Adam updates for one rank (offload).
    """

    matrix: float = 0.80
    half_size: float = 256.0
    attention: float = 0.30
    bandwidth: float = 0.80
    launch_s: float = 15e-6
    link: float = 0.70
    hidden: float = 0.75
    host_adam: float = 2e8


# Of the predictions on the rows that were not fitted: nine in ten are within this. See ``benchmarks/planner.py``.
RANGE = 0.15
_KERNELS_A_BLOCK = {"forward": 16, "backward": 30}


@dataclass(frozen=True)
class Speed:
    """Where the time of a step goes, in seconds, and what comes of it.

    Attributes:
        step_s: one optimizer step.
        parts: the same by kind; communication is what is not hidden.
        communication_s: all communication, hidden or not.
        tokens_per_s: of all devices.
        mfu: model FLOPs utilization (PaLM's convention).
        range_s: the step takes between these, by the errors seen on published runs.
    """

    step_s: float
    parts: dict[str, float]
    communication_s: float
    tokens_per_s: float
    mfu: float
    range_s: tuple[float, float]


def speed(composed: Composed, device: Device) -> Speed:
    """Speed of a composed run."""
    return speed_of(Shapes.of(composed), device)


def speed_of(shapes: Shapes, device: Device, constants: Constants | None = None) -> Speed:
    """Speed of a run on `device`, one rank each."""
    clock = _Clock(shapes, device, constants or Constants())
    parts = clock.compute()
    reduced, gathered = clock.communication()
    backward = shapes.accumulation * clock.backward_s
    exposed = gathered + reduced
    if shapes.overlap and shapes.stage >= 2:
        room = clock.constants.hidden * (backward + (shapes.accumulation * clock.forward_s if shapes.stage == 3 else 0))
        hideable = reduced + (gathered if shapes.stage == 3 else 0)
        exposed -= min(hideable, room)
    parts["communication"] = exposed
    parts |= clock.optimizer()
    step_s = sum(parts.values())
    tokens = shapes.tokens * shapes.accumulation * shapes.ranks
    utilization = mfu(tokens / step_s / shapes.ranks, flops_per_token(shapes.model), device.peak(shapes.precision))
    return Speed(step_s, parts, reduced + gathered, tokens / step_s, utilization, (step_s / (1 + RANGE), step_s * (1 + RANGE)))


class _Clock:
    def __init__(self, shapes: Shapes, device: Device, constants: Constants) -> None:
        self.shapes, self.device, self.constants = shapes, device, constants
        self.peak = device.peak(shapes.precision)
        self.bandwidth = device.bandwidth * constants.bandwidth
        self.parameters = parameters(shapes.model)
        self.forward_s = self.backward_s = 0.0

    def compute(self) -> dict[str, float]:
        """Matrices, attention, element-wise and recomputation, over all micro-steps."""
        shapes, model = self.shapes, self.shapes.model
        width, hidden, tokens, layers = model.width, model.hidden_width, shapes.tokens, model.layers
        into = 2 if model.ffn == "swiglu" else 1  # matrices that make the hidden values
        projected = width + 2 * model.key_heads * model.head_width
        linear = sum(self._matrix(tokens, i, o) for i, o in ((width, projected), (width, width), *into * ((width, hidden),), (hidden, width)))
        head = self._matrix(tokens, width, model.vocabulary)
        # Causal: half of the scores. Backward: 2.5 times the forward (FlashAttention recomputes the scores).
        attended = min(model.context, 2 * (model.sliding_window or model.context))  # on average half of it, or all of a window
        attention = 2 * tokens * attended * width / (self.peak * self.constants.attention) + self.constants.launch_s
        element = shapes.element
        x, h, logits = element * tokens * width, element * tokens * hidden, tokens * model.vocabulary
        dropout = 5 * x if model.dropout else 0
        heads = element * tokens * (model.heads + model.key_heads) * model.head_width
        # Queries and keys rotated by kernels for negation, concatenation, two products and their sum; an RMSNorm of each head.
        turned = (11 * heads if model.positions == "rotary" else 0) + (2 * heads if model.qk_norm else 0)
        # Bytes read and written: two norms, two sums, GELU or SiLU and product, dropout; backward also the stacking of q, k, v.
        forward = self._pass(10 * x + (5 * into - 3) * h + dropout + turned, _KERNELS_A_BLOCK["forward"] - 5)
        backward = self._pass(20 * x + (5 * into - 2) * h + dropout + turned, _KERNELS_A_BLOCK["backward"] - 9)
        loss = self._pass((34 + 3 * element) * logits, 10)
        recompute = 0.0
        if shapes.policy == "full":
            recompute = layers * (linear + attention + forward)
        elif shapes.policy == "selective":
            recompute = layers * (forward + (attention if model.dropout else 0))
        self.forward_s = layers * (linear + attention + forward) + head + loss / 2
        self.backward_s = layers * (2 * linear + 2.5 * attention + backward) + 2 * head + loss / 2 + recompute
        steps = shapes.accumulation
        return {
            "matrices": steps * 3 * (layers * linear + head),
            "attention": steps * 3.5 * layers * attention,
            "element-wise": steps * (layers * (forward + backward) + loss),
            "recomputation": steps * recompute,
        }

    def _matrix(self, rows: int, inputs: int, outputs: int) -> float:
        """One multiplication: limited by the arithmetic, the memory or its launch."""
        share = self.constants.matrix
        for size in (rows, inputs, outputs):
            share *= size / (size + self.constants.half_size)
        moved = self.shapes.element * (rows * inputs + inputs * outputs + rows * outputs)
        return max(2 * rows * inputs * outputs / (self.peak * share), moved / self.bandwidth, self.constants.launch_s)

    def _pass(self, size: float, kernels: int) -> float:
        return max(size / self.bandwidth, kernels * self.constants.launch_s)

    def communication(self) -> tuple[float, float]:
        """Seconds for reducing gradients, and for gathering weights, in one optimizer step; nothing hidden yet."""
        shapes, ranks = self.shapes, self.shapes.ranks
        if ranks == 1:
            return 0.0, 0.0
        device = self.device
        rate = device.link if ranks <= device.per_node else min(device.link, device.network * device.per_node)
        rate *= self.constants.link
        once = self.parameters * shapes.element * (ranks - 1) / ranks / rate  # every rank sends, or receives, the model once
        if shapes.stage == 0:
            return 2 * once, 0.0
        if shapes.stage == 1:
            return 2 * once, once
        if shapes.stage == 2:  # DeepSpeed reduces at every micro-step, by all-reduce of whole buckets
            return 2 * once * shapes.accumulation, once
        kept = self.parameters <= min(shapes.buckets["stage3_max_live_parameters"], shapes.buckets["stage3_max_reuse_distance"])
        return once * shapes.accumulation, once * shapes.accumulation * (1 if kept else 2)

    def optimizer(self) -> dict[str, float]:
        """Clipping, Adam, and what offload moves."""
        shapes = self.shapes
        trained = self.parameters / (shapes.ranks if shapes.stage else 1)
        if shapes.offload_optimizer:
            moved = trained * (4 if shapes.accumulates_fp32 else shapes.element) + trained * shapes.element
            parts = {"optimizer": trained / self.constants.host_adam, "offload": moved / self.device.host_link}
        else:
            # Norm and clipping read and write the fp32 gradients; Adam reads four numbers and writes three.
            parts = {"optimizer": trained * (12 + 28 + shapes.element) / self.bandwidth}
        if shapes.offload_weights:
            fetched = self.parameters / shapes.ranks * shapes.element * 2 * shapes.accumulation
            parts["offload"] = parts.get("offload", 0.0) + fetched / self.device.host_link
        return parts
