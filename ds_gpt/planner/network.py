"""Time of what ranks send each other, before anything of it is hidden."""

from __future__ import annotations

from ds_gpt.planner.clock import Clock, Constants
from ds_gpt.planner.devices import Device
from ds_gpt.planner.shapes import Shapes


class Network:
    """Ranks are placed so that those that send most are nearest: tensor, sequence, data, pipeline."""

    def __init__(self, shapes: Shapes, device: Device, constants: Constants) -> None:
        self.shapes, self.device, self.constants = shapes, device, constants

    def _rate(self, ranks: int, apart: int) -> float:
        """Bytes a second of a ring over `ranks`, neighbours `apart` devices from each other."""
        device = self.device
        inside = max(1, device.per_node // apart)  # of them in a node: each brings its own share of the network
        rate = device.link if ranks <= inside else min(device.link, device.network * inside)
        return rate * self.constants.link

    def within_the_model(self, blocks: int) -> dict[str, float]:
        """What tensor, sequence and pipeline parallelism send in a step for so many blocks; nothing can be computed meanwhile."""
        shapes = self.shapes
        x = shapes.element * shapes.tokens * shapes.model.width
        passes = 3 if shapes.policy == "full" else 2  # forward, backward, and forward again
        blocks *= shapes.accumulation
        parts = {}
        if shapes.tensor > 1:
            # All-reduces after attention and after the feed-forward, each sent (t - 1) / t twice (Shoeybi et al. 2019, section 3).
            sent = 2 * (shapes.tensor - 1) / shapes.tensor * x
            parts["tensor parallel"] = blocks * passes * 2 * (sent / self._rate(shapes.tensor, 1) + self.constants.launch_s)
        if shapes.sequence > 1:
            # All-to-alls of queries, keys, values and result (Jacobs et al. 2023, section 3.2).
            sent = (shapes.sequence - 1) / shapes.sequence * x
            parts["sequence parallel"] = blocks * passes * 4 * (sent / self._rate(shapes.sequence, shapes.tensor) + self.constants.launch_s)
        if shapes.pipeline > 1:
            apart = shapes.tensor * shapes.sequence * shapes.ranks
            rate = (self.device.link if apart * 2 <= self.device.per_node else self.device.network) * self.constants.link
            parts["pipeline transfer"] = shapes.accumulation * 2 * x / shapes.tensor / rate
        return parts

    def zero(self, parameters: int, trained: int) -> tuple[float, float]:
        """Seconds for reducing the gradients of the trained parameters, and for gathering weights, in one optimizer step."""
        shapes, ranks = self.shapes, self.shapes.shards
        if ranks == 1:
            return 0.0, 0.0
        rate = self._rate(ranks, shapes.tensor)
        states = shapes.trainer.states
        whole = parameters * shapes.element * (ranks - 1) / ranks / rate  # every rank sends, or receives, the model once
        once = whole * trained / parameters
        reduced = once * (states.sent / shapes.element if states else 1)
        if shapes.stage == 0:
            return 2 * reduced, 0.0
        if shapes.stage == 1:
            return (1 if states else 2) * reduced, once
        if shapes.stage == 2:  # DeepSpeed reduces at every micro-step, by all-reduce of whole buckets
            return 2 * reduced * shapes.accumulation, once
        limit = min(shapes.buckets["stage3_max_live_parameters"], shapes.buckets["stage3_max_reuse_distance"])
        return reduced * shapes.accumulation, whole * shapes.accumulation * (1 if parameters <= limit else 2)

    def exposed(self, reduced: float, gathered: float, clock: Clock) -> float:
        """Seconds that reducing and gathering add to an optimizer step: what computation does not hide, and what hiding the rest costs it.

        Gradients are reduced as they become ready (Li et al. 2020, section 3.2.3). The embedding's are when the backward pass is over, and in
        stage 3 its weights are needed before the forward pass begins: neither has anything to hide behind. Where gradients are reduced once
        for all micro-steps, only the last one hides it.
        """
        shapes, constants, states = self.shapes, self.constants, self.shapes.trainer.states
        if shapes.shards == 1:
            return 0.0
        # DistributedDataParallel copies gradients into its buckets and back: both are read and written.
        copies = 4 * states.buckets * clock.trained / clock.bandwidth if states else 0.0
        if not (shapes.overlap and (shapes.stage >= 2 or states)):
            return reduced + gathered + copies
        micro_steps = shapes.accumulation if shapes.stage >= 2 else 1
        room = constants.hidden * micro_steps * (clock.backward_s + (clock.forward_s if shapes.stage == 3 else 0))
        hideable = (reduced + (gathered if shapes.stage == 3 else 0)) * (1 - clock.embedding / clock.parameters)
        return copies + reduced + gathered - (1 - constants.contention) * min(hideable, room)
