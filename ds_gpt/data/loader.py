"""Windows as torch tensors. The only module of ds_gpt.data that imports torch."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from ds_gpt.data.sampler import WindowSampler

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs_BT and targets_BT, int64; targets are the inputs one token on


class BatchLoader:
    """The micro-batches of one data-parallel rank, step by step, with the next step prepared in the background.

    `tokens` are what `sampler` was made for. Nothing is remembered but the batch in preparation: any step may be
    asked at any time, which is all that resume and rollback need.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        sampler: WindowSampler,
        rank: int,
        ranks: int,
        micro_batch_size: int,
        device: torch.device | str,
    ) -> None:
        assert len(tokens) == sampler.n_tokens, "the sampler was made for other tokens"
        self._tokens = tokens
        self._sampler = sampler
        self._share = (rank, ranks, micro_batch_size)
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            # Resolved here: the background thread has a current device of its own.
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead: tuple[int, Future[list[Batch]]] | None = None

    def load(self, step: int) -> list[Batch]:
        """(inputs_BT, targets_BT) on the device for each micro-step of optimizer step `step`, B = micro_batch_size.

        Starts the preparation of `step` + 1. Whatever went wrong in the background is raised here.
        """
        if self._ahead is None or self._ahead[0] != step:
            if self._ahead is not None:
                self._ahead[1].cancel()
            self._ahead = (step, self._thread.submit(self._prepare, step))
        _, prepared = self._ahead
        self._ahead = None  # a failure is reported once; asking again tries again
        batches = prepared.result()
        self._ahead = (step + 1, self._thread.submit(self._prepare, step + 1))
        # From pinned memory these copies overlap with computation. torch keeps the source alive until they are done.
        return [
            (inputs_BT.to(self._device, non_blocking=True), targets_BT.to(self._device, non_blocking=True))
            for inputs_BT, targets_BT in batches
        ]

    def close(self) -> None:
        """End the background thread. May be called twice; `load` then raises RuntimeError."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._ahead = None

    def _prepare(self, step: int) -> list[Batch]:
        """The batches of `step` in host memory. Runs in the background thread."""
        batches = [
            _split(_read(self._tokens, starts, self._sampler.context))
            for starts in self._sampler.rank_windows(step, *self._share)
        ]
        if self._device.type != "cuda":
            return batches
        # Without this, pinning would open a context on GPU 0 for every rank, some hundred MB each.
        with torch.cuda.device(self._device):
            return [(inputs_BT.pin_memory(), targets_BT.pin_memory()) for inputs_BT, targets_BT in batches]


def window_batch(tokens: np.ndarray, offsets: np.ndarray, context: int, ignore_index: int) -> Batch:
    """(inputs_BT, targets_BT) on the CPU for windows that start at `offsets`, B = len(offsets), T = `context`.

    Offset -1 is padding: a row of token 0 whose targets are all `ignore_index`, so that it adds nothing to a loss.
    """
    padding_B = torch.from_numpy(offsets < 0)
    inputs_BT, targets_BT = _split(_read(tokens, np.maximum(offsets, 0), context))
    inputs_BT[padding_B] = 0
    targets_BT[padding_B] = ignore_index
    return inputs_BT, targets_BT


def _read(tokens: np.ndarray, starts: np.ndarray, context: int) -> torch.Tensor:
    """Windows of `context` + 1 tokens, [len(starts), context + 1] int64."""
    positions = starts[:, None] + np.arange(context + 1)
    # np.asarray drops the memmap class, whose bookkeeping costs more than the read itself.
    return torch.from_numpy(np.asarray(tokens)[positions].astype(np.int64))


def _split(windows: torch.Tensor) -> Batch:
    """Inputs and targets as tensors of their own (`contiguous` would share memory where there is one window)."""
    return windows[:, :-1].clone(), windows[:, 1:].clone()
