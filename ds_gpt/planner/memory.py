"""Memory of one rank over one optimizer step, from the configuration alone.

The step is walked through tensor by tensor, in the order in which PyTorch makes and frees them, on a ledger that knows
sizes only. So the peak is where it really is, and each byte of it has a kind. What autograd keeps of a block, in
elements, B x T tokens, width D, G key/value heads of K channels, feed-forward width F:

    inputs of both norms 2 BTD, of qkv and up 2 BTD, q k v BT (D + 2 GK), attention's output BTD, around the GELU 2 BTF
    or in SwiGLU 4 BTF, the dropout masks at a byte an element, and attention's log-sum-exp in fp32.

`tests/planner` holds the result to 2% of the trace of the real engine.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ds_gpt.config import Composed
from ds_gpt.planner.copies import ACTIVATIONS
from ds_gpt.planner.ledger import Ledger, Moment
from ds_gpt.planner.shapes import Shapes
from ds_gpt.planner.walk import Walk
from ds_gpt.planner.zero3 import sharding


@dataclass(frozen=True)
class Memory:
    """What one rank needs.

    Attributes:
        peak: the fullest moment: its phase, bytes, and bytes by kind.
        moments: the fullest moment of each phase, in order.
        resident: bytes between two steps, by kind.
        host_bytes: what is offloaded to host memory, by this rank.
    """

    peak: Moment
    moments: tuple[Moment, ...]
    resident: dict[str, int]
    host_bytes: int


def memory(composed: Composed) -> Memory:
    """Memory of a composed run.

    Raises:
        ConfigError: what the planner has no figures for.
    """
    return memory_of(Shapes.of(composed))


def memory_of(shapes: Shapes, last_stage: bool = False) -> Memory:
    """Memory of the fullest rank in a step like all but the first: the optimizer's state exists. `last_stage`: of that alone."""
    stages = [shapes.pipeline - 1] if last_stage else shapes.kinds_of_stages()
    return max((memory_of_stage(shapes, stage) for stage in stages), key=lambda memory: memory.peak.bytes)


@functools.lru_cache(maxsize=4096)  # one setting is looked at for device after device
def memory_of_stage(shapes: Shapes, stage: int) -> Memory:
    """The same of the ranks of one pipeline stage, counted from 0."""
    # One forward, one backward (Narayanan et al. 2021, section 2.2): the first stage holds as many micro-batches as there are stages.
    in_flight = min(shapes.pipeline - stage, shapes.accumulation)
    ledger = Ledger()
    parameters = shapes.parameters(stage)
    zero = sharding(shapes, parameters, ledger)
    resident = {kind: size for kind, size in ledger.held.items() if size}
    ledger.take(ACTIVATIONS, 8 * shapes.task.arrays * shapes.tokens * shapes.accumulation)  # token ids and the like, int64
    ledger.take(ACTIVATIONS, _constants(shapes))
    micro_steps = min(shapes.accumulation, 2)  # the first, and the last, which finds accumulated gradients
    for number in range(micro_steps):
        walk = Walk(shapes, parameters, ledger, zero, accumulated=number > 0, stage=stage)
        walk.micro_step(in_flight, last=number == micro_steps - 1)
    zero.step()
    ledger.end("step")
    return Memory(ledger.fullest(), tuple(ledger.moments), resident, zero.host_bytes)


def _constants(shapes: Shapes) -> int:
    """Bytes that all layers share: the mask of a sliding window, and the rotation of rotary positions."""
    model, element, task = shapes.model, shapes.element, shapes.task
    mask = element * shapes.context**2 if shapes.masked and not task.masked else 0
    own = (shapes.rows if task.own_positions else 1) * shapes.context // shapes.sequence  # positions of this rank's tokens
    return mask + (2 * element * own * model.head_width if model.positions == "rotary" else 0)
