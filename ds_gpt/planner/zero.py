"""Where weights, gradients and optimizer state are in each ZeRO stage, and what reducing the gradients costs on the way.

Each class follows one of DeepSpeed 0.19's optimizers and is called as the backward pass calls it: `ready` for each
gradient when it is complete, `reduce` when the backward pass is over, `step`. ``tests/planner`` compares them with
the trace of the real thing.
"""

from __future__ import annotations

from collections.abc import Callable

from ds_gpt.planner.ledger import Ledger
from ds_gpt.planner.shapes import Parameter, Shapes

WEIGHTS, MASTERS, MOMENTS, GRADIENTS, BUCKETS, GATHERED = "weights", "masters", "moments", "gradients", "buckets", "gathered weights"
_DDP_BUCKET = 500_000_000  # elements; DeepSpeed's own, not configurable


class Sharding:
    """ZeRO 0: every rank holds everything. Gradients wait until the end, then go through one flat copy at a time."""

    def __init__(self, shapes: Shapes, parameters: list[Parameter], ledger: Ledger) -> None:
        self.shapes, self.parameters, self.ledger = shapes, parameters, ledger
        self.elements = sum(parameter.elements for parameter in parameters)
        self.host_bytes = 0
        self.largest = max(parameter.elements for parameter in parameters)
        self.build()

    def build(self) -> None:
        """What is held for as long as the run lasts."""
        self.hold(self.elements, self.elements)

    def hold(self, weights: int, trained: int) -> None:
        """Weights that the model computes with; fp32 masters and moments of those that this rank steps."""
        shapes = self.shapes
        has_masters = shapes.element < 4 or shapes.stage > 0
        self._put(WEIGHTS, weights * shapes.element, shapes.offload_weights)
        self._put(MASTERS, 4 * trained * has_masters, shapes.offload_optimizer)
        self._put(MOMENTS, 4 * trained * shapes.moments, shapes.offload_optimizer)

    def _put(self, kind: str, size: int, on_host: bool) -> None:
        if on_host:
            self.host_bytes += size
        else:
            self.ledger.take(kind, size)

    def begin(self) -> None:
        """The backward pass begins."""

    def gather(self, index: int, count: int) -> None:
        """The parameters from `index` are about to be used in the forward pass."""

    def gather_again(self, index: int, count: int) -> None:
        """The same in the backward pass."""

    def release(self, index: int, count: int) -> None:
        """They have been, in the backward pass."""

    def ready(self, parameter: Parameter) -> None:
        """A gradient, which is on the ledger, is complete. Here it stays."""

    def reduce(self, last: bool) -> None:
        """The backward pass is over; `last`: of the accumulation."""
        if last:
            chunk = self.elements if self.elements <= _DDP_BUCKET else self._largest_bucket()
            self.ledger.take(BUCKETS, chunk * self.shapes.element)
            self.ledger.give(BUCKETS, chunk * self.shapes.element)

    def _largest_bucket(self) -> int:
        largest = filled = 0
        for parameter in self.parameters:
            filled += parameter.elements
            largest = max(largest, filled)
            filled = 0 if filled > _DDP_BUCKET else filled
        return largest

    def step(self) -> None:
        """The optimizer step; the gradients are gone afterwards."""
        if self.shapes.element < 4:  # all gradients in fp32, beside what they were copied from
            self.ledger.take(GRADIENTS, 4 * self.elements)
            self.ledger.give(GRADIENTS, 4 * self.elements)
        self.ledger.give(GRADIENTS, self.shapes.element * self.elements)


class Bf16Optimizer(Sharding):
    """ZeRO 1, bf16 weights, fp32 accumulation: the fp32 gradients of the whole model live for ever on every rank."""

    def build(self) -> None:
        self.hold(self.elements, self.shapes.shard(self.elements))
        self.ledger.take(GRADIENTS, 4 * self.elements)

    def reduce(self, last: bool) -> None:
        self.ledger.take(GRADIENTS, 4 * self.largest)  # one at a time is added in fp32
        self.ledger.give(GRADIENTS, 4 * self.largest)
        if last:
            matrices = sum(parameter.elements for parameter in self.parameters if parameter.matrix)
            # The flat fp32 buffers are concatenated where both go into one bucket, and sent in bf16.
            size = 2 * matrices if matrices > _DDP_BUCKET else 6 * self.elements
            self.ledger.take(BUCKETS, size)
            self.ledger.give(BUCKETS, size)

    def step(self) -> None:
        self.ledger.give(GRADIENTS, 2 * self.elements)  # cleared between micro-steps, but not freed


class Stage1(Sharding):
    """ZeRO 1 otherwise: gradients wait until the end, then go through the bucket into this rank's shard."""

    def build(self) -> None:
        self.hold(self.weights_held(), self.shapes.shard(self.elements))
        self.kept = self.kept_again = 0
        self.filled = self.filled_parameters = self.waiting = self.largest_waiting = 0
        self.open = self.fills_shard = False
        groups = {matrix: sum(p.elements for p in self.parameters if p.matrix == matrix) for matrix in (True, False)}
        self.mine = {matrix: self.shapes.shard(elements) for matrix, elements in groups.items()}
        if self.shapes.offload_optimizer:
            self._hold_for_offload()
        # Rank 0's shard with the parameters at its end whole.
        self.mine_whole = sum(p.elements for p in self.parameters if p.offset < self.mine[p.matrix])

    def _hold_for_offload(self) -> None:
        """Masters' gradients and the updated weights on the host; on both sides a buffer for one gradient."""
        element, shard = self.shapes.element, self.shapes.shard(self.elements)
        self.host_bytes += (4 + element) * shard + element * self.largest
        self.ledger.take(BUCKETS, element * self.largest)

    def weights_held(self) -> int:
        """Elements of the model's weights on this rank between two steps."""
        return self.elements

    @property
    def _compact(self) -> bool:
        """Whether low-precision gradients are added to fp32 ones."""
        return self.shapes.accumulates_fp32 and self.shapes.element < 4

    def _keep_shard(self) -> None:
        """Where this rank's share goes. In the gradients' own precision each micro-step makes it anew, to be added afterwards."""
        if self.shapes.offload_optimizer:
            return
        size = 4 * self.shapes.shard(self.elements) if self._compact else self.shapes.element * self.mine_whole
        if not self.kept:
            self.ledger.take(GRADIENTS, size)
            self.kept = size
            self.first = True
        elif not self._compact and not self.kept_again and not self.first:
            self.ledger.take(GRADIENTS, size)
            self.kept_again = size

    first = False

    def _bucket_bytes(self) -> int:
        return self.shapes.buckets["reduce_bucket_size"] * self.shapes.element * (2 if self.shapes.overlap else 1)

    def _fill(self, parameter: Parameter) -> None:
        size = self.shapes.element * parameter.elements
        limit = self.shapes.buckets["reduce_bucket_size"]
        if self.filled + parameter.elements > limit:
            self._flush()
        self.filled += parameter.elements
        self.filled_parameters += 1
        self.fills_shard |= parameter.offset < self.mine[parameter.matrix]
        self.largest_waiting = max(self.largest_waiting, self._converted(parameter))
        if parameter.elements > limit:  # too large for the bucket: sent as it is
            self.waiting += size
        else:
            self.ledger.give(GRADIENTS, size)

    def _converted(self, parameter: Parameter) -> int:
        """Bytes of the fp32 copy by which a gradient, or the part of it in rank 0's shard, is added to the shard."""
        mine = min(parameter.elements, max(0, self.mine[parameter.matrix] - parameter.offset))
        return 4 * mine if self._compact else 0

    def _flush(self) -> None:
        if not self.filled:
            return
        if self._compact and self.fills_shard:
            self._keep_shard()
        # What is sent is a flat copy of the bucket; of a single tensor there is none.
        copy = (self.filled * self.shapes.element if self.filled_parameters > 1 else 0) + self.largest_waiting
        self.ledger.take(BUCKETS, copy)
        self.ledger.give(BUCKETS, copy)
        if self.fills_shard:
            self._keep_shard()
        self.fills_shard = False
        self.ledger.give(GRADIENTS, self.waiting)
        self.filled = self.filled_parameters = self.waiting = self.largest_waiting = 0

    def _open(self) -> None:
        if not self.open:
            self.ledger.take(BUCKETS, self._bucket_bytes())
            self.open = True

    def _close(self) -> None:
        self._flush()
        self.ledger.give(BUCKETS, self._bucket_bytes())
        self.ledger.give(GRADIENTS, self.kept_again)
        self.open, self.kept_again, self.first = False, 0, False

    def ready(self, parameter: Parameter) -> None:
        self._open()

    def reduce(self, last: bool) -> None:
        if not last:
            return
        for parameter in self.parameters:
            self._fill(parameter)
        self._close()

    def step(self) -> None:
        """The norm is of one parameter at a time, in wider numbers; gradients that are not compact are flattened."""
        if not self.shapes.offload_optimizer:
            largest = max(p.elements for p in self.parameters if p.offset < self.mine[p.matrix])
            size = 4 * largest if self._compact else max(2 * self.shapes.element * largest, 4 * max(self.mine.values()))
            self.ledger.take(GRADIENTS, size)
            self.ledger.give(GRADIENTS, size)
        self.ledger.give(GRADIENTS, self.kept)
        self.kept = 0


class Stage2(Stage1):
    """ZeRO 2: each gradient goes into the bucket as soon as it is complete."""

    def ready(self, parameter: Parameter) -> None:
        self._open()
        self._fill(parameter)

    def reduce(self, last: bool) -> None:
        self._close()


class Stage3(Stage2):
    """ZeRO 3: weights too are sharded, gathered as the modules are called, and dropped when too many are live."""

    def build(self) -> None:
        super().build()
        shapes = self.shapes
        threshold = shapes.buckets["stage3_param_persistence_threshold"]
        persistent = sum(p.elements for p in self.parameters if p.elements < threshold)
        self.persistent = {index for index, p in enumerate(self.parameters) if p.elements < threshold}
        self.ledger.take(WEIGHTS, persistent * shapes.element * (shapes.ranks > 1))
        self.ledger.take(BUCKETS, shapes.buckets["reduce_bucket_size"] * shapes.element)
        self._put(GRADIENTS, shapes.shard(self.elements) * (4 if shapes.accumulates_fp32 else shapes.element), shapes.offload_optimizer)
        self.live: dict[int, int] = {}
        self.flat: list[tuple[int, int]] = []

    def _hold_for_offload(self) -> None:
        self.host_bytes += 4 * self.shapes.shard(self.elements)

    def weights_held(self) -> int:
        return self.shapes.shard(self.elements)

    def _fetch(self, indices: range, ahead: range) -> None:
        """Gather what a module needs now, and prefetch what follows up to the prefetch bucket."""
        element, budget = self.shapes.element, self.shapes.buckets["stage3_prefetch_bucket_size"]
        limit = self.shapes.buckets["stage3_max_live_parameters"]
        self._gather([index for index in indices if index not in self.live and index not in self.persistent], element)
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
        self._gather(fetched, element)

    def _gather(self, indices: list[int], element: int) -> None:
        if not indices or self.shapes.ranks == 1:  # alone, the shard is the whole
            return
        flat = sum(self.parameters[index].elements for index in indices) * element
        for index in indices:
            self.live[index] = self.parameters[index].elements
        self.ledger.take(GATHERED, flat)
        if len(indices) > 1:  # gathered as one and copied out; the flat one goes when its last parameter has been used
            self.flat.append((indices[-1], flat))
            self.ledger.take(GATHERED, flat)

    def _let_go(self, used: Callable[[int], bool]) -> None:
        for last, size in self.flat:
            self.ledger.give(GATHERED, size if used(last) else 0)
        self.flat = [(last, size) for last, size in self.flat if not used(last)]

    def gather(self, index: int, count: int) -> None:
        if index == 0:  # the model itself has no parameters: what comes is gathered ahead
            self._fetch(range(0), range(len(self.parameters)))
            return
        self._let_go(lambda last: last < index)
        self._fetch(range(index, index + count), range(index + count, len(self.parameters)))
        reach = self.shapes.buckets["stage3_max_reuse_distance"]
        if self.elements > min(reach, self.shapes.buckets["stage3_max_live_parameters"]):
            # Too far from its use in the backward pass to be kept. The distance is what the trace of DeepSpeed shows:
            # what is left of the forward pass, not there and back.
            after = sum(parameter.elements for parameter in self.parameters[index + count :])
            if after > reach or sum(self.live.values()) > self.shapes.buckets["stage3_max_live_parameters"]:
                self._drop(range(index, index + count))

    def gather_again(self, index: int, count: int) -> None:
        self._let_go(lambda last: last >= index + count)
        self._fetch(range(index, index + count), range(index - 1, -1, -1))

    def release(self, index: int, count: int) -> None:
        self._drop(range(index, index + count))
        if index == 0:
            self._let_go(lambda last: True)

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
        shard = 4 * self.shapes.shard(self.elements)
        if not self.shapes.offload_optimizer:
            self.ledger.take(GRADIENTS, shard)
            self.ledger.give(GRADIENTS, shard)


def sharding(shapes: Shapes, parameters: list[Parameter], ledger: Ledger) -> Sharding:
    """What DeepSpeed picks for this stage and precision."""
    if shapes.stage == 1 and shapes.precision == "bf16" and shapes.accumulates_fp32 and not shapes.offload_optimizer:
        return Bf16Optimizer(shapes, parameters, ledger)
    return (Sharding, Stage1, Stage2, Stage3)[shapes.stage](shapes, parameters, ledger)
