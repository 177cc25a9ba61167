"""Keys and values of earlier tokens, kept so that a new token costs one position of every layer instead of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_gpt.model.attention import Attend
from ds_gpt.model.gpt import GPT


@dataclass(frozen=True)
class _Places:
    """Where one new token of each row goes, and what it sees.

    Attributes:
        slot: of the row that has kept most.
        slots_B: of each row; None: the same of all.
        oldest: the first slot that any row sees; the last is `slot`.
        mask: which of these S slots each row sees, (B, 1, 1, S); None: all of them.
    """

    slot: int
    slots_B: Tensor | None
    oldest: int
    mask: Tensor | None


class _Layer:
    """What one layer keeps. It has the G heads of the keys, so grouped queries make it H / G times smaller."""

    def __init__(self, own: Attend, rows: int, capacity: int) -> None:
        self.own = own
        self._rows, self._capacity = rows, capacity
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def _kept(self, k_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """The whole of it, allocated when the first keys show type, device, and the heads that this rank has.

        Zeros: a slot that a row has not reached has no weight in its mixture, but 0 x NaN would be NaN.
        """
        if self._keys is None or self._values is None:
            shape = (self._rows, k_BGTK.shape[1], self._capacity, k_BGTK.shape[3])
            self._keys, self._values = k_BGTK.new_zeros(shape), k_BGTK.new_zeros(shape)
        return self._keys, self._values

    def fill(self, rows_B: Tensor, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, dropout: float) -> Tensor:
        """Keep the first T tokens of some rows; they attend among themselves."""
        keys, values = self._kept(k_BGTK)
        length = k_BGTK.shape[2]
        keys[rows_B, :, :length], values[rows_B, :, :length] = k_BGTK, v_BGTK
        return self.own(q_BHTK, k_BGTK, v_BGTK, dropout)

    def extend(self, places: _Places, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, dropout: float) -> Tensor:
        """Keep one more token of every row, T = 1, which attends to all that its row has kept."""
        keys, values = self._kept(k_BGTK)
        if places.slots_B is None:
            keys.narrow(2, places.slot, 1).copy_(k_BGTK)
            values.narrow(2, places.slot, 1).copy_(v_BGTK)
        else:
            rows_B = torch.arange(len(keys), device=keys.device)
            keys[rows_B, :, places.slots_B], values[rows_B, :, places.slots_B] = k_BGTK[:, :, 0], v_BGTK[:, :, 0]
        k_BGSK, v_BGSK = (kept.narrow(2, places.oldest, places.slot + 1 - places.oldest) for kept in (keys, values))
        # The queries of a group stand where the time would: so they share its keys without a copy for each.
        queries = q_BHTK.reshape(*k_BGSK.shape[:2], -1, k_BGSK.shape[-1])  # B, G, heads of the group, K
        mixtures = F.scaled_dot_product_attention(queries, k_BGSK, v_BGSK, attn_mask=places.mask, dropout_p=dropout)
        return mixtures.reshape(q_BHTK.shape)

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows."""
        self._rows = len(rows)
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[rows], self._values[rows]


class KeyValueCache:
    """Room for `capacity` tokens in each of `rows` sequences. The token at position p lies in slot p.

    Rows may hold differently many tokens: each starts at slot 0 and sees no further than its own newest. The cache
    takes the place of every layer's `attend` for one forward pass at a time; between two the model is as it was.
    """

    def __init__(self, model: GPT, rows: int, capacity: int) -> None:
        self._attentions = [block.attention for block in model.blocks]
        self._layers = [_Layer(attention.attend, rows, capacity) for attention in self._attentions]
        self._window = model.config.sliding_window

    @contextmanager
    def filling(self, rows: Tensor) -> Iterator[None]:
        """A forward pass in here brings the first tokens of `rows` (int64), BT at positions 0 to T - 1.

        What these rows held is replaced. Where one has fewer than T tokens, anything may follow them: it is not seen.
        """
        with self._attending(lambda layer: partial(layer.fill, rows)):
            yield

    @contextmanager
    def extending(self, places: Sequence[int], device: torch.device) -> Iterator[Tensor]:
        """A forward pass in here brings one more token of every row, at the positions that are yielded (BT, T = 1).

        Args:
            places: the position of each row's token: how many tokens it has kept.
            device: of the model.
        """
        slots_B = torch.tensor(places, device=device)
        first, last = min(places), max(places)
        oldest = 0 if self._window is None else max(0, first + 1 - self._window)
        if first == last:
            where = _Places(last, None, oldest, None)
        else:
            distance_BS = slots_B[:, None] - torch.arange(oldest, last + 1, device=device)
            seen_BS = distance_BS >= 0
            if self._window is not None:
                seen_BS &= distance_BS < self._window
            where = _Places(last, slots_B, oldest, seen_BS[:, None, None])
        with self._attending(lambda layer: partial(layer.extend, where)):
            yield slots_B[:, None]

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these (int64), which are numbered anew in this order."""
        for layer in self._layers:
            layer.keep(rows)

    @contextmanager
    def _attending(self, attend_of: Callable[[_Layer], Attend]) -> Iterator[None]:
        try:
            for attention, layer in zip(self._attentions, self._layers, strict=True):
                attention.attend = attend_of(layer)
            yield
        finally:
            for attention, layer in zip(self._attentions, self._layers, strict=True):
                attention.attend = layer.own
