"""How good a trained model is on text: the numbers of ``ds-gpt eval``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ds_gpt.checkpoint.saved_model import SavedModel
from ds_gpt.config import ConfigError, Problem
from ds_gpt.data import Dataset, prepare
from ds_gpt.data.loader import window_batch
from ds_gpt.data.text_bytes import token_bytes
from ds_gpt.learning.calibration import BINS, confidence_bins, expected_calibration_error
from ds_gpt.learning.loss import IGNORE_INDEX, cross_entropy_sum


@dataclass(frozen=True)
class Quality:
    """Measured on the targets of validation windows, as the validation loss of training is.

    Attributes:
        tokens: how many targets.
        loss: nats a token.
        bits_per_byte: of UTF-8, comparable between tokenizers; None where tokens are no text.
        accuracy: share of targets that were the likeliest token.
        confidence: mean probability of the likeliest token.
        calibration_error: expected calibration error.
    """

    tokens: int
    loss: float
    bits_per_byte: float | None
    accuracy: float
    confidence: float
    calibration_error: float

    @property
    def perplexity(self) -> float:
        """exp of the loss: as uncertain as a choice among so many tokens."""
        return math.exp(self.loss)


def validation_data(saved: SavedModel, corpus: str | None) -> Dataset:
    """The run's data; or another corpus, by the run's tokenizer.

    Raises:
        ConfigError: the corpus cannot be read, or its tokenizer is not the model's.
    """
    data = saved.run.data
    if corpus is None and saved.run.stage != "pretrain":
        raise ConfigError(
            Problem(
                f"the run of '{saved.checkpoint}' learned from examples, not from text (stage: {saved.run.stage})",
                "text is what is measured here",
                "give text: --corpus FILE",
            )
        )
    if corpus is not None:
        tokenizer = saved.checkpoint.absolute().parent.parent / "tokenizer.json"
        data = data.model_copy(update={"corpus": corpus, "tokenizer": str(tokenizer), "attend_across_documents": True})
    dataset = prepare(data, saved.run.seed)
    if dataset.tokenizer.identity != saved.tokenizer.identity:
        raise ConfigError(
            Problem(
                f"the corpus '{data.title}' has another tokenizer than the model of '{saved.checkpoint}'",
                "an id would mean one text in the corpus and another to the model",
                "give a corpus with --corpus: text files are read by the model's own tokenizer",
            )
        )
    return dataset


@torch.no_grad()
def measure(saved: SavedModel, dataset: Dataset, device: torch.device, sequences: int) -> Quality:
    """The model on `sequences` windows of the validation split, or on as many as there are.

    The windows, and so the loss, are those of training where `sequences` is ``evaluation.sequences``.

    Raises:
        ConfigError: the split is shorter than one window.
    """
    run, model = saved.run, saved.load(device)
    windows = dataset.val.evaluation_windows(run.model.context, sequences)
    sizes = token_bytes(dataset.tokenizer)
    apart = not run.data.attend_across_documents and dataset.val.has_documents  # a text given by --corpus has none
    batch = max(1, run.loss_chunk_tokens // run.model.context)  # as many logits as training forms at a time
    bins = torch.zeros(3, BINS, dtype=torch.float64, device=device)
    loss_sum, text_bytes = torch.zeros((), dtype=torch.float64, device=device), 0
    for start in range(0, len(windows), batch):
        found = window_batch(
            dataset.val,
            windows[start : start + batch],
            run.model.context,
            IGNORE_INDEX,
            apart,
        )
        inputs_BT, targets_BT, *documents_BT = (tensor_BT.to(device) for tensor_BT in found)
        logits_BTV = model(inputs_BT, documents_BT=documents_BT[0] if documents_BT else None)
        loss_sum += cross_entropy_sum(logits_BTV, targets_BT)[0]
        bins += confidence_bins(logits_BTV, targets_BT)
        text_bytes += int(sizes[found[1].numpy()].sum()) if sizes is not None else 0
    count, confidence, right = (int(bins[0].sum()), float(bins[1].sum()), float(bins[2].sum()))
    return Quality(
        tokens=count,
        loss=float(loss_sum) / count,
        bits_per_byte=float(loss_sum) / math.log(2) / text_bytes if text_bytes else None,
        accuracy=right / count,
        confidence=confidence / count,
        calibration_error=expected_calibration_error(bins),
    )
