"""Exact bytes of live tensors by kind, on a CPU, where no allocator keeps count.

Every result of every operation passes a dispatch mode; a storage counts from its first tensor to its last. Rounded up
to 512 bytes, as the CUDA caching allocator does, so that the numbers are those of a GPU.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.ledger_kinds import KINDS
from ds_gpt.engine.state import Piece

_BLOCK_BYTES = 512


@dataclass
class _Entry:
    bytes: int
    kind: str


class Ledger(TorchDispatchMode):
    """The live storages of this process, while entered.

    `born` is the kind of what is created now and not known better; peaks are kept for each `phase`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.born = "", "activations"
        self._live: dict[int, _Entry] = {}
        self._total_bytes = 0
        self._peaks: dict[str, tuple[int, list[tuple[_Entry, int]]]] = {}  # by phase: bytes, and what they were

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result

    def add(self, tensor: Tensor, kind: str | None = None) -> None:
        """Count a tensor's storage, once; with `kind`, say what it is."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a tensor without memory of its own
            return
        key, size = storage._cdata, -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        entry = self._live.get(key)
        if entry is None:
            entry = self._live[key] = _Entry(0, kind or self.born)
            weakref.finalize(storage, self._freed, key)
        if kind:
            entry.kind = kind
        if size != entry.bytes:
            self._total_bytes += size - entry.bytes
            entry.bytes = size
            if self._total_bytes > self._peaks.get(self.phase, (0,))[0]:
                self._peaks[self.phase] = self._total_bytes, [(live, live.bytes) for live in self._live.values()]

    def communicated(self, collective: str, tensors: Iterable[Tensor]) -> None:
        """Tell that these tensors went into or came out of a collective, which says what they are where nothing else does."""
        for tensor in tensors:
            self.add(tensor)
            entry = self._live[tensor.untyped_storage()._cdata]
            if entry.kind in ("activations", "buffers"):
                entry.kind = "gathered" if collective.startswith("all_gather") else "buffers"

    def _freed(self, key: int) -> None:
        entry = self._live.pop(key, None)
        if entry:
            self._total_bytes -= entry.bytes

    def add_everything(self) -> None:
        """Count what was there before the ledger: every tensor that Python knows, and the gradients that hang on them."""
        for thing in gc.get_objects():
            if isinstance(thing, Tensor) and thing.device.type == "cpu":
                self.add(thing, "buffers")

    def held(self) -> dict[str, int]:
        """Bytes by kind, now."""
        return _by_kind((entry, entry.bytes) for entry in self._live.values())

    def at_peaks(self) -> dict[str, dict[str, int]]:
        """For each phase the bytes by kind at the moment when most were held, with what has become known since."""
        return {phase: _by_kind(entries) for phase, (_, entries) in self._peaks.items() if phase}


def _by_kind(entries: Iterable[tuple[_Entry, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    for entry, size in entries:
        sums[entry.kind] += size
    return dict(sums)


def deepspeeds_tensors(engine: Any, pieces: Iterable[Piece]) -> Iterator[tuple[Tensor, str]]:
    """The tensors that a DeepSpeed engine keeps, with their kinds; what comes later overrules what came before.

    `pieces` are this rank's masters and moments.
    """
    optimizer, model = engine.optimizer, engine.module
    for name, tensor in _attributes(optimizer):
        if "ipg" in name:
            yield tensor, "buffers"
        elif "grad" in name and "norm" not in name:
            yield tensor, "gradients"
    for piece in pieces:
        for tensor in piece.tensors.values():
            yield tensor, "optimizer"
    for parameter in model.parameters():
        if parameter.grad is not None:
            yield parameter.grad, "gradients"
    for name, tensor in _attributes(optimizer):
        if "ipg" in name:  # gradients are views of it
            yield tensor, "buffers"
    yield from model_weights(model)


def model_weights(model: torch.nn.Module) -> Iterator[tuple[Tensor, str]]:
    """The weights that the model computes with; under ZeRO-3 this rank's share of them."""
    for parameter in model.parameters():
        share = getattr(parameter, "ds_tensor", None)
        # ZeRO-3 keeps small parameters whole always: those are weights, not guests.
        yield parameter.data, "weights" if share is None or parameter.ds_persist else "gathered"
        if share is not None:
            yield share.data, "weights"


def _attributes(thing: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors among an object's attributes, in containers too, with the attribute's name."""
    for name, value in vars(thing).items():
        for leaf in _leaves(value):
            yield name, leaf


def _leaves(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth < 4 and isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item, depth + 1)
    elif depth < 4 and isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item, depth + 1)
    elif depth < 2 and type(value).__name__.startswith("IPGBucket"):
        yield from _leaves(vars(value), depth + 1)
