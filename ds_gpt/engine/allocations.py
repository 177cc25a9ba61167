"""Every storage that PyTorch makes and frees, in order: memory as a log, without an allocator."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_BLOCK_BYTES = 512  # CUDA's caching allocator hands out multiples of it


@dataclass(frozen=True)
class Phase:
    """One stretch of a step.

    Attributes:
        name: ``build``, then ``forward``, ``backward``, ``step`` of each micro-step of each optimizer step.
        bytes: live when it ended.
        peak_bytes: most that was live within it.
    """

    name: str
    bytes: int
    peak_bytes: int


class Allocations(TorchDispatchMode):
    """Every storage that is made while it is entered, and when it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []  # (serial number of the storage, bytes that it grew by; negative: freed)
        self.marks: list[tuple[str, int]] = []  # (phase, number of events when it ended)
        self.collectives: Counter[str] = Counter()
        self._live: dict[int, tuple[int, int]] = {}  # address -> (serial number, bytes)
        self._serial = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        if func.namespace == "c10d":
            tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            sizes = sorted(tensor.nbytes for tensor in tensors.values())
            self.collectives[func._schema.name.partition("::")[2].strip("_")] += sum(sizes) // 2 if len(sizes) > 1 else sum(sizes)
        return result

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once."""
        if tensor.device.type == "meta":  # DeepSpeed keeps shapes of parameters there
            return
        storage = tensor.untyped_storage()
        address, size = storage._cdata, -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        if address in self._live:
            serial, known = self._live[address]
            if size != known:  # ZeRO-3 resizes a gathered parameter's storage to nothing
                self._live[address] = (serial, size)
                self.events.append((serial, size - known))
            return
        self._serial += 1
        self._live[address] = (self._serial, size)
        self.events.append((self._serial, size))
        weakref.finalize(storage, self._free, address, self._serial)

    def _free(self, address: int, serial: int) -> None:
        known, size = self._live.get(address, (0, 0))
        if known == serial:
            del self._live[address]
            self.events.append((serial, -size))

    def serial(self, tensor: Tensor) -> int | None:
        """The number of a tensor's storage, or None where it was made outside."""
        return self._live.get(tensor.untyped_storage()._cdata, (None, 0))[0]

    def mark(self, phase: str) -> None:
        """A phase ends here."""
        self.marks.append((phase, len(self.events)))

    def phases(self, without: frozenset[int] | set[int] = frozenset()) -> Iterator[tuple[Phase, int]]:
        """Each phase, and the number of events at its peak; storages in `without` do not count."""
        live = start = 0
        for name, end in self.marks:
            peak, peak_at = live, start
            for at in range(start, end):
                serial, size = self.events[at]
                live += 0 if serial in without else size
                if live > peak:
                    peak, peak_at = live, at + 1
            yield Phase(name, live, peak), peak_at
            start = end

    def live_at(self, event: int) -> dict[int, int]:
        """Bytes of each storage that was live after so many events."""
        sizes: Counter[int] = Counter()
        for serial, size in self.events[:event]:
            sizes[serial] += size
        return {serial: size for serial, size in sizes.items() if size}
