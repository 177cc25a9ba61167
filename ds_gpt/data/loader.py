"""Windows as torch tensors. The only module of ds_gpt.data that imports torch."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from ds_gpt.data.corruption import Corrupted
from ds_gpt.data.rows import Rows
from ds_gpt.data.sampler import Sampler
from ds_gpt.data.split import Split

# inputs_BT and targets_BT, int64; targets are the inputs one token on. Where a token is to see its own document only,
# also documents_BT, int64: equal numbers in a row are one document. Of rows and corrupted windows: what their `batch`
# gives, and in training the share that the micro-batch has in what the step counts.
Batch = tuple[torch.Tensor, ...]


class BatchLoader:
    """The micro-batches of one data-parallel rank, step by step, with the next step prepared in the background.

    `split` is what `sampler` was made for. Nothing is remembered but the batch in preparation: any step may be
    asked at any time, which is all that resume and rollback need.
    """

    def __init__(
        self,
        split: Split | Rows | Corrupted,
        sampler: Sampler,
        rank: int,
        ranks: int,
        micro_batch_size: int,
        device: torch.device | str,
        with_documents: bool = False,
    ) -> None:
        assert len(split) == sampler.n_tokens, "the sampler was made for other tokens"
        self._split = split
        self._with_documents = with_documents
        self._sampler = sampler
        self._share = (rank, ranks, micro_batch_size)
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            # Resolved here: the background thread has a current device of its own.
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead: tuple[int, Future[list[Batch]]] | None = None

    def load(self, step: int) -> list[Batch]:
        """(inputs_BT, targets_BT), and documents_BT where asked for, on the device for each micro-step of optimizer step `step`, B = micro_batch_size.

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
        return [tuple(tensor_BT.to(self._device, non_blocking=True) for tensor_BT in batch) for batch in batches]

    def close(self) -> None:
        """End the background thread. May be called twice; `load` then raises RuntimeError."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._ahead = None

    def _prepare(self, step: int) -> list[Batch]:
        """The batches of `step` in host memory. Runs in the background thread."""
        batches = [
            _batch(self._split, starts, self._sampler.context, self._with_documents, step)
            for starts in self._sampler.rank_windows(step, *self._share)
        ]
        if not isinstance(self._split, Split):
            counted = max(1, self._split.count(self._sampler.windows(step)))
            share = torch.tensor(counted * self._share[2] / self._sampler.global_batch_size)
            batches = [(*batch, share) for batch in batches]
        if self._device.type != "cuda":
            return batches
        # Without this, pinning would open a context on GPU 0 for every rank, some hundred MB each.
        with torch.cuda.device(self._device):
            return [tuple(tensor_BT.pin_memory() for tensor_BT in batch) for batch in batches]


def window_batch(
    split: Split | Rows | Corrupted, starts: np.ndarray, context: int, ignore_index: int, with_documents: bool = False
) -> Batch:
    """A batch on the CPU for windows that begin at `starts`, B = len(starts), T = `context`.

    Start -1 is padding: a row of token 0 whose targets are all `ignore_index`, so that it adds nothing to a loss.
    """
    padding = torch.from_numpy(starts < 0)
    batch = _batch(split, np.maximum(starts, 0), context, with_documents)
    inputs_BT, targets_BT = batch[:2]
    padding_B = padding.repeat_interleave(len(inputs_BT) // len(padding))  # a pair is two sequences
    inputs_BT[padding_B] = 0
    targets_BT[padding_B] = ignore_index
    return batch


def _batch(
    split: Split | Rows | Corrupted, starts: np.ndarray, context: int, with_documents: bool, step: int = 0
) -> Batch:
    if not isinstance(split, Split):
        return tuple(torch.from_numpy(array) for array in split.batch(starts, step))
    windows = torch.from_numpy(split.read(starts, context + 1))
    # As tensors of their own (`contiguous` would share memory where there is one window).
    inputs_BT, targets_BT = windows[:, :-1].clone(), windows[:, 1:].clone()
    if not with_documents:
        return inputs_BT, targets_BT
    return inputs_BT, targets_BT, torch.from_numpy(split.documents(starts, context))
