"""Time of one optimizer step, from the configuration and a device.

Matrix multiplications run at a share of the device's peak that falls with small dimensions; attention at its kernel's
share; everything else at a share of the memory's bandwidth; what a kernel costs to launch is the floor of each. ZeRO's
collectives run at a share of the slowest link on their way, and what the backward pass can hide of them is hidden.

The constants are of the software (cuBLAS, FlashAttention 2, NCCL, DeepSpeed), not of a row: one set for all, near what two
halves of the published MPT rows give; ``python -m benchmarks planner`` prints these, and the errors of each half by the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_gpt.config import Composed
from ds_gpt.model.counts import mfu
from ds_gpt.planner.clock import Clock, Constants
from ds_gpt.planner.devices import Device
from ds_gpt.planner.network import Network
from ds_gpt.planner.shapes import Shapes

# What a step takes, over the prediction: nine in ten of the published runs that no constant was fitted to are within. See
# ``python -m benchmarks planner``.
RANGE = (0.85, 1.25)


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
    """Speed of a run on `device`, one rank each. Of a pipeline, the slowest stage sets the pace."""
    constants = constants or Constants()
    stages = (Clock(shapes, device, constants, stage) for stage in shapes.kinds_of_stages())
    clock = max(stages, key=lambda clock: clock.forward_s + clock.backward_s)
    parts = dict(clock.parts)
    network = Network(shapes, device, constants)
    parts |= network.within_the_model(len(clock.blocks))
    reduced, gathered = network.zero(clock.parameters, clock.trained)
    exposed = network.exposed(reduced, gathered, clock)
    if shapes.pipeline > 1:
        # A stage waits for as many micro-batches as there are stages before and behind it (Narayanan et al. 2021, section 2.2).
        busy = sum(parts.values()) / shapes.accumulation
        parts["pipeline bubble"] = (shapes.pipeline - 1) * busy
    parts["communication"] = exposed
    parts |= clock.optimizer()
    step_s = sum(parts.values())
    tokens = shapes.tokens * shapes.accumulation * shapes.ranks * shapes.sequence
    utilization = mfu(tokens / step_s / shapes.devices, shapes.flops_per_token, device.peak(shapes.precision))
    return Speed(step_s, parts, reduced + gathered, tokens / step_s, utilization, (step_s * RANGE[0], step_s * RANGE[1]))
