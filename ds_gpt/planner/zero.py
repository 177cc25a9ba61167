"""Where weights, gradients and optimizer state are in each ZeRO stage, and what reducing the gradients costs on the way.

Each class follows one of DeepSpeed 0.19's optimizers and is called as the backward pass calls it: `ready` for each
gradient when it is complete, `reduce` when the backward pass is over, `step`. ``tests/planner`` compares them with
the trace of the real thing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_gpt.planner.ledger import Ledger
from ds_gpt.planner.shapes import Parameter, Shapes
from ds_gpt.planner.trainers import States

WEIGHTS, MASTERS, MOMENTS, GRADIENTS, BUCKETS, GATHERED = "weights", "masters", "moments", "gradients", "buckets", "gathered weights"
_DDP_BUCKET = 500_000_000  # elements; DeepSpeed's own, not configurable


class Sharding:
    """ZeRO 0: every rank holds everything. Gradients wait until the end, then go through one flat copy at a time."""

    def __init__(self, shapes: Shapes, parameters: Sequence[Parameter], ledger: Ledger) -> None:
        self.shapes, self.parameters, self.ledger = shapes, parameters, ledger
        self.elements = sum(parameter.elements for parameter in parameters)
        self.trained = [parameter for parameter in parameters if parameter.trained]
        self.trained_elements = sum(parameter.elements for parameter in self.trained)
        self.host_bytes = 0
        self.largest = max(parameter.elements for parameter in self.trained)
        self.fresh = shapes.element  # bytes of a number in a gradient that backward has just made
        self.build()

    def build(self) -> None:
        """What is held for as long as the run lasts."""
        self.hold(self.elements, self.trained_elements)

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

    def adam_bytes(self, largest: int) -> int:
        """What PyTorch's Adam needs beside its state to step its largest tensor of so many elements."""
        return 0 if self.shapes.fused or not self.shapes.moments else 8 * largest

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
            chunk = self.trained_elements if self.trained_elements <= _DDP_BUCKET else self._largest_bucket()
            self.ledger.take(BUCKETS, chunk * self.shapes.element)
            self.ledger.give(BUCKETS, chunk * self.shapes.element)

    def _largest_bucket(self) -> int:
        largest = filled = 0
        for parameter in self.trained:
            filled += parameter.elements
            largest = max(largest, filled)
            filled = 0 if filled > _DDP_BUCKET else filled
        return largest

    def step(self) -> None:
        """The optimizer step; the gradients are gone afterwards."""
        # All gradients in fp32, beside what they were copied from.
        size = (4 * self.trained_elements if self.shapes.element < 4 else 0) + self.adam_bytes(self.largest)
        self.ledger.take(GRADIENTS, size)
        self.ledger.give(GRADIENTS, size)
        self.ledger.give(GRADIENTS, self.shapes.element * self.trained_elements)


class Plain(Sharding):
    """No DeepSpeed: as many bytes for each parameter as the trainer says (`States`)."""

    def build(self) -> None:
        states, stage = self.states, self.shapes.stage
        shard = self.shapes.shard(self.elements)
        self.fresh = states.fresh or states.gradients
        self.gathered: list[int] = []
        self.kept = states.gradients * (shard if stage >= 2 else self.elements)
        self.ledger.take(WEIGHTS, states.weights * (shard if stage >= 3 else self.elements))
        self.ledger.take(BUCKETS, states.buckets * self.elements if self.shapes.ranks > 1 else 0)
        self.ledger.take(MOMENTS, states.optimizer * (shard if stage >= 1 else self.elements))
        self.ledger.take(GRADIENTS, self.kept if states.lasting else 0)

    @property
    def states(self) -> States:
        """How many bytes."""
        assert self.shapes.trainer.states
        return self.shapes.trainer.states

    def gather(self, index: int, count: int) -> None:
        """At stage 3, block by block: this one, and the next meanwhile."""
        if self.shapes.stage < 3:
            return
        size = self.shapes.element * sum(parameter.elements for parameter in self.parameters[index : index + count])
        self.ledger.take(GATHERED, size)
        self.gathered.append(size)
        if len(self.gathered) > 2:
            self.ledger.give(GATHERED, self.gathered.pop(0))

    def gather_again(self, index: int, count: int) -> None:
        self.gather(index, count)

    def ready(self, parameter: Parameter) -> None:
        self.ledger.give(GRADIENTS, self.fresh * parameter.elements if self.states.lasting else 0)

    def reduce(self, last: bool) -> None:
        """In the buckets, or in the lasting gradients; what was gathered is dropped."""
        self.ledger.give(GATHERED, sum(self.gathered))
        self.gathered.clear()

    def step(self) -> None:
        """One fused kernel."""
        self.ledger.give(GRADIENTS, 0 if self.states.lasting else self.states.gradients * self.elements)


class Bf16Optimizer(Sharding):
    """ZeRO 1, bf16 weights, fp32 accumulation: the fp32 gradients of the whole model live for ever on every rank.

    Also a pipeline's at ZeRO 0, which shards all the same, and keeps gradients in bf16.
    """

    def build(self) -> None:
        self.hold(self.elements, self.shapes.shard(self.trained_elements))
        self.kept = 4 if self.shapes.accumulates_fp32 else self.shapes.element  # bytes of a gradient
        self.ledger.take(GRADIENTS, self.kept * self.trained_elements)

    def reduce(self, last: bool) -> None:
        self.ledger.take(GRADIENTS, self.kept * self.largest)  # one at a time is added in fp32
        self.ledger.give(GRADIENTS, self.kept * self.largest)
        if last:
            matrices = sum(parameter.elements for parameter in self.trained if parameter.matrix)
            # The flat fp32 buffers are concatenated where both go into one bucket, and sent in bf16.
            size = 2 * matrices if matrices > _DDP_BUCKET else (6 if self.kept == 4 else 2) * self.trained_elements
            self.ledger.take(BUCKETS, size)
            self.ledger.give(BUCKETS, size)

    def step(self) -> None:
        temporaries = self.adam_bytes(self.shapes.shard(self.trained_elements))
        self.ledger.take(GRADIENTS, temporaries)
        self.ledger.give(GRADIENTS, temporaries)
        self.ledger.give(GRADIENTS, 2 * self.trained_elements)  # cleared between micro-steps, but not freed


class Stage1(Sharding):
    """ZeRO 1 otherwise: gradients wait until the end, then go through the bucket into this rank's shard."""

    def build(self) -> None:
        self.hold(self.weights_held(), self.shapes.shard(self.trained_elements))
        self.kept = self.kept_again = 0
        self.filled = self.filled_parameters = self.waiting = self.largest_waiting = 0
        self.open = self.fills_shard = False
        groups = {matrix: sum(p.elements for p in self.trained if p.matrix == matrix) for matrix in (True, False)}
        self.mine = {matrix: self.shapes.shard(elements) for matrix, elements in groups.items()}
        if self.shapes.offload_optimizer:
            self._hold_for_offload()
        # Rank 0's shard with the parameters at its end whole.
        self.mine_whole = sum(p.elements for p in self.trained if p.offset < self.mine[p.matrix])

    def _hold_for_offload(self) -> None:
        """Masters' gradients and the updated weights on the host; on both sides a buffer for one gradient."""
        element, shard = self.shapes.element, self.shapes.shard(self.trained_elements)
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
        size = 4 * self.shapes.shard(self.trained_elements) if self._compact else self.shapes.element * self.mine_whole
        if not self.kept:
            self.ledger.take(GRADIENTS, size)
            self.kept = size
            self.first = True
        elif not self._compact and not self.kept_again and not self.first:
            self.ledger.take(GRADIENTS, size)
            self.kept_again = size

    first = False

    @property
    def _waits(self) -> int:
        """Bytes of a number in a gradient that waits, and in the bucket: at ZeRO 1 fp32 where gradients are added in it."""
        return 4 if self.shapes.stage == 1 and self._compact else self.shapes.element

    def _bucket_bytes(self) -> int:
        return self.shapes.buckets["reduce_bucket_size"] * self._waits * (2 if self.shapes.overlap else 1)

    def _fill(self, parameter: Parameter) -> None:
        size = self._waits * parameter.elements
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
        return 4 * mine if self._waits < 4 and (self._compact or self.shapes.offload_optimizer) else 0

    def _flush(self) -> None:
        if not self.filled:
            return
        if self._compact and self.fills_shard:
            self._keep_shard()
        # What is sent is a flat copy of the bucket; of a single tensor there is none.
        copy = (self.filled * self._waits if self.filled_parameters > 1 else 0) + self.largest_waiting
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
        self.ledger.take(GRADIENTS, self._waits * parameter.elements if self._waits > self.fresh else 0)
        self.ledger.give(GRADIENTS, self.fresh * parameter.elements if self._waits > self.fresh else 0)

    def reduce(self, last: bool) -> None:
        if not last:
            return
        for parameter in self.trained:
            self._fill(parameter)
        self._close()

    def step(self) -> None:
        """The norm is of one parameter at a time, in wider numbers; gradients that are not compact are flattened."""
        if not self.shapes.offload_optimizer:
            largest = max(p.elements for p in self.trained if p.offset < self.mine[p.matrix])
            flat = max(self.mine.values())
            stepped = (0 if self._compact else 4 * flat) + self.adam_bytes(flat)
            size = max(4 * largest if self._compact else 2 * self.shapes.element * largest, stepped)
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
