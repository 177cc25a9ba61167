"""Validation loss over a fixed set of windows, and a sample of generated text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ds_gpt.config import ConfigError
from ds_gpt.config.run import SampleConfig
from ds_gpt.data import Dataset, rank_share
from ds_gpt.data.loader import Batch, window_batch
from ds_gpt.engine.engine import Engine
from ds_gpt.generation.decoding import generate
from ds_gpt.generation.options import Sampling
from ds_gpt.learning.loss import IGNORE_INDEX
from ds_gpt.learning.objectives import next_token

_PROBE_SEQUENCES = 16


class Validation:
    """The windows that this rank evaluates: the same set over all ranks, whatever their number."""

    def __init__(self, dataset: Dataset, engine: Engine) -> None:
        run = engine.composed.run
        self._engine = engine
        self._dataset = dataset
        self._with_documents = not run.data.attend_across_documents
        self._windows = _windows(dataset, engine, run.evaluation.sequences)
        self._probe = _windows(dataset, engine, _PROBE_SEQUENCES)
        self.metrics: dict[str, float] = {}

    def loss(self) -> float:
        """Token-weighted mean loss, nats a token; every rank must call it. What else was measured is in `metrics`."""
        loss, metrics = self._engine.measure(self._batches(self._windows))
        self.metrics = {f"val_{name}": value for name, value in metrics.items()}
        return loss

    def probe_loss(self) -> float:
        """The same over a few windows that do not depend on the run's settings, to know a model again by."""
        return self._engine.evaluate(self._batches(self._probe))

    def _batches(self, windows: np.ndarray) -> Iterator[Batch]:
        return _batches(self._dataset, self._engine, windows, self._with_documents)


def pretraining_loss(dataset: Dataset, engine: Engine) -> float:
    """Loss of the next token, nats, on text of the pre-training, whatever is learned now; every rank must call it."""
    run = engine.composed.run
    windows = _windows(dataset, engine, run.evaluation.pretraining_sequences)
    return engine.measure(_batches(dataset, engine, windows), partial(next_token, run))[0]


def _windows(dataset: Dataset, engine: Engine, sequences: int) -> np.ndarray:
    """This rank's share of the validation windows."""
    windows = dataset.val.evaluation_windows(engine.composed.run.model.context, sequences)
    return rank_share(windows, engine.grid.data_rank, engine.grid.data_ranks)


def _batches(dataset: Dataset, engine: Engine, windows: np.ndarray, with_documents: bool = False) -> Iterator[Batch]:
    """The windows on this rank's device, a micro-batch at a time."""
    context, size = engine.composed.run.model.context, engine.composed.micro_batch_size
    for start in range(0, len(windows), size):
        batch = window_batch(dataset.val, windows[start : start + size], context, IGNORE_INDEX, with_documents)
        yield tuple(tensor_BT.to(engine.ranks.device) for tensor_BT in batch)


def sample_text(engine: Engine, dataset: Dataset, sample: SampleConfig) -> str:
    """The prompt, continued by the model; every rank must call it. A prompt that has no tokens is replaced.

    All ranks draw from equal random states, so they generate the same text and stay together under ZeRO-3.
    """
    try:
        prompt = dataset.tokenizer.encode(dataset.framed(sample.prompt))
    except ConfigError:  # the prompt of a recipe may not suit the corpus it was pointed at
        prompt = np.empty(0, dtype=np.int64)
    if len(prompt) == 0:
        prompt = dataset.val.read(np.array([0]), 1)[0]
    vocab_size = dataset.tokenizer.vocab_size
    sampling = Sampling(sample.temperature, sample.top_k)
    with engine.evaluating():
        (continued,) = generate(engine.model, [prompt.tolist()], sample.tokens, sampling, engine.composed.run.seed, vocab_size, engine.logits)
    text = dataset.tokenizer.decode([*prompt.tolist(), *continued])
    return text if engine.composed.run.stage == "pretrain" else text.rstrip()  # of what follows an answer
