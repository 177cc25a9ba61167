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
        run, ranks = engine.composed.run, engine.ranks
        self._engine = engine
        self._split = dataset.val
        self._context = run.model.context
        self._with_documents = not run.data.attend_across_documents
        windows = dataset.val.evaluation_windows(run.model.context, run.evaluation.sequences)
        self._windows = rank_share(windows, ranks.rank, ranks.world_size)
        probe = dataset.val.evaluation_windows(run.model.context, _PROBE_SEQUENCES)
        self._probe = rank_share(probe, ranks.rank, ranks.world_size)
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
        size = self._engine.composed.micro_batch_size
        for start in range(0, len(windows), size):
            batch = window_batch(self._split, windows[start : start + size], self._context, IGNORE_INDEX, self._with_documents)
            yield tuple(tensor_BT.to(self._engine.ranks.device) for tensor_BT in batch)


def pretraining_loss(dataset: Dataset, engine: Engine) -> float:
    """Loss of the next token, nats, on text of the pre-training, whatever is learned now; every rank must call it."""
    run, ranks = engine.composed.run, engine.ranks
    context, size = run.model.context, engine.composed.micro_batch_size
    windows = dataset.val.evaluation_windows(context, run.evaluation.pretraining_sequences)
    windows = rank_share(windows, ranks.rank, ranks.world_size)
    starts = (windows[first : first + size] for first in range(0, len(windows), size))
    batches = (window_batch(dataset.val, some, context, IGNORE_INDEX) for some in starts)
    on_device = (tuple(tensor_BT.to(ranks.device) for tensor_BT in batch) for batch in batches)
    return engine.measure(on_device, partial(next_token, run))[0]


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
    return dataset.tokenizer.decode([*prompt.tolist(), *continued])
