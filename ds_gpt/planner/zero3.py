"""ZeRO 3, whose weights are gathered as they are used, and which class stands for a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ds_gpt.planner.ledger import Ledger
from ds_gpt.planner.shapes import Parameter, Shapes
from ds_gpt.planner.zero import BUCKETS, GATHERED, GRADIENTS, WEIGHTS, Bf16Optimizer, Plain, Sharding, Stage1, Stage2


class Stage3(Stage2):
    """ZeRO 3: weights too are sharded, gathered as the modules are called, and dropped when too many are live."""

    def build(self) -> None:
        super().build()
        shapes = self.shapes
        threshold = shapes.buckets["stage3_param_persistence_threshold"]
        persistent = sum(p.elements for p in self.parameters if p.elements < threshold)
        self.persistent = {index for index, p in enumerate(self.parameters) if p.elements < threshold}
        self.ledger.take(WEIGHTS, persistent * shapes.element * (shapes.shards > 1))
        self.ledger.take(BUCKETS, shapes.buckets["reduce_bucket_size"] * shapes.element)
        self._put(GRADIENTS, shapes.shard(self.trained_elements) * (4 if shapes.accumulates_fp32 else shapes.element), shapes.offload_optimizer)
        self.live: dict[int, int] = {}
        self.flat: list[tuple[set[int], int]] = []  # what is still to be used of several that were gathered as one, and its bytes

    def _hold_for_offload(self) -> None:
        self.host_bytes += 4 * self.shapes.shard(self.trained_elements)

    def weights_held(self) -> int:
        return self.shapes.shard(self.elements)

    def _fetch(self, indices: range, ahead: range) -> None:
        """Gather what a block needs now, and prefetch what follows up to the prefetch bucket."""
        budget, limit = (self.shapes.buckets[f"stage3_{key}"] for key in ("prefetch_bucket_size", "max_live_parameters"))
        self._gather([index for index in indices if index not in self.live and index not in self.persistent])
        self._use(indices)
        fetched: list[int] = []
        total = 0
        for index in ahead:
            size = self.parameters[index].elements
            if index in self.live or index in self.persistent:
                continue
            if total >= budget or sum(self.live.values()) + total >= limit:
                break
            fetched.append(index)
            total += size
        self._gather(fetched)

    def _gather(self, indices: list[int]) -> None:
        if not indices or self.shapes.shards == 1:  # alone, the shard is the whole
            return
        for index in indices:
            self.live[index] = self.parameters[index].elements
        self.ledger.take(GATHERED, self._bytes(indices))
        if len(indices) > 1:
            self.flat.append((set(indices), self._bytes(indices)))

    def _bytes(self, indices: Iterable[int]) -> int:
        return self.shapes.element * sum(self.parameters[index].elements for index in indices)

    def _use(self, indices: range) -> None:
        """What was gathered as one is copied out when the first of it is needed; the flat one goes when the last of it is."""
        kept = []
        for waiting, size in self.flat:
            if not waiting.isdisjoint(indices):
                self.ledger.take(GATHERED, size if self._bytes(waiting) == size else 0)
                waiting.difference_update(indices)
                if not waiting:
                    self.ledger.give(GATHERED, size)
                    continue
            kept.append((waiting, size))
        self.flat = kept

    def gather(self, index: int, count: int) -> None:
        if index == 0:  # the model itself has no parameters: what comes is gathered ahead
            self._fetch(range(0), range(len(self.parameters)))
            self._use(range(count))
            return
        self._fetch(range(index, index + count), range(index + count, len(self.parameters)))
        reach = self.shapes.buckets["stage3_max_reuse_distance"]
        if self.elements > min(reach, self.shapes.buckets["stage3_max_live_parameters"]):
            # Too far from its use in the backward pass to be kept. The distance is what the trace of DeepSpeed shows:
            # what is left of the forward pass, not there and back.
            after = sum(parameter.elements for parameter in self.parameters[index + count :])
            if after > reach or sum(self.live.values()) > self.shapes.buckets["stage3_max_live_parameters"]:
                self._drop(range(index, index + count))

    def gather_again(self, index: int, count: int) -> None:
        self._fetch(range(index, index + count), range(index - 1, -1, -1))

    def release(self, index: int, count: int) -> None:
        self._drop(range(index, index + count))
        if index == 0:
            self._use(range(len(self.parameters)))

    def _drop(self, indices: range) -> None:
        for index in indices:
            self.ledger.give(GATHERED, self.live.pop(index, 0) * self.shapes.element)

    def _keep_shard(self) -> None:
        """It is there from the build on."""

    def _converted(self, parameter: Parameter) -> int:
        return 0

    def ready(self, parameter: Parameter) -> None:
        self._fill(parameter)

    def _flush(self) -> None:
        if self.filled:
            converted = self.shapes.shard(self.filled) * 4 if self.shapes.element < 4 else 0
            self.ledger.take(BUCKETS, converted)
            self.ledger.give(BUCKETS, converted)
        super()._flush()

    def reduce(self, last: bool) -> None:
        self._flush()

    def step(self) -> None:
        """The shard of the gradients stays."""
        shard = self.shapes.shard(self.trained_elements)
        if not self.shapes.offload_optimizer:
            size = 4 * shard + self.adam_bytes(shard)
            self.ledger.take(GRADIENTS, size)
            self.ledger.give(GRADIENTS, size)


def sharding(shapes: Shapes, parameters: Sequence[Parameter], ledger: Ledger) -> Sharding:
    """What DeepSpeed picks for this stage and precision, or the trainer's own."""
    if shapes.trainer.states:
        return Plain(shapes, parameters, ledger)
    accumulating = shapes.stage == 1 and shapes.accumulates_fp32 and not shapes.offload_optimizer
    if shapes.precision == "bf16" and (accumulating or (shapes.stage == 0 and shapes.pipeline > 1)):
        return Bf16Optimizer(shapes, parameters, ledger)
    return (Sharding, Stage1, Stage2, Stage3)[shapes.stage](shapes, parameters, ledger)
