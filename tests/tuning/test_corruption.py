"""Masked language modelling and span corruption: how much is corrupted, and that it is learned."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import run_ranks
from tiny import tiny

from ds_gpt.config import ConfigError
from ds_gpt.config.stage import ObjectiveConfig
from ds_gpt.data import Dataset, Split, SyntheticTokenizer
from ds_gpt.data.corruption import Corrupted, added_tokens, masked_tokens, span_sizes
from ds_gpt.data.loader import BatchLoader, window_batch
from ds_gpt.data.rows import IGNORED
from ds_gpt.data.stages import needed_vocabulary, prepare_stage
from ds_gpt.learning.loss import IGNORE_INDEX
from ds_gpt.learning.objectives import objective_of
from ds_gpt.model.gpt import GPT

TEXT = np.random.default_rng(0).integers(0, 500, 40_000).astype(np.uint16)
MASKED, SPANS = ObjectiveConfig(name="masked"), ObjectiveConfig(name="span_corruption")


def corrupted(objective: ObjectiveConfig, context: int = 128, seed: int = 3) -> Corrupted:
    return Corrupted(Split.of(TEXT), objective, context, 500, seed)


def test_masking_has_berts_rates() -> None:
    source, starts = corrupted(MASKED), np.arange(300) * 128
    inputs, targets, prefix = source.batch(starts, step=0)
    text, chosen = source.read(starts, 128), targets != IGNORED
    assert chosen.sum(axis=1).tolist() == [19] * 300 == [masked_tokens(128, 0.15)] * 300
    assert (targets[chosen] == text[chosen]).all() and (inputs[~chosen] == text[~chosen]).all()
    mask, kept = inputs[chosen] == 500, inputs[chosen] == text[chosen]
    count = chosen.sum()  # 5,700; three standard deviations
    assert mask.mean() == pytest.approx(0.8, abs=3 * math.sqrt(0.8 * 0.2 / count))
    assert kept.mean() == pytest.approx(0.1 + 0.1 / 500, abs=3 * math.sqrt(0.1 * 0.9 / count))
    assert inputs.max() == 500 and added_tokens(MASKED, 128) == 1
    assert chosen.mean(axis=0) == pytest.approx(np.full(128, 19 / 128), abs=0.1), "every place is chosen as often"
    assert (prefix == 128).all() and source.count(starts) == chosen.sum()


def test_spans_can_be_put_back() -> None:
    source, starts = corrupted(SPANS), np.arange(100) * 128
    inputs, targets, prefix = source.batch(starts, step=0)
    length, noise, spans = span_sizes(128, SPANS)
    assert (length, noise, spans) == (116, 17, 6) and length + 2 * spans + 1 == 129, "the sequence is filled"
    assert noise / length == pytest.approx(0.15, abs=0.01) and added_tokens(SPANS, 128) == spans + 1
    for row, start in enumerate(starts):
        before = int(prefix[row])
        assert before == length - noise + spans
        answer = targets[row][targets[row] != IGNORED]
        assert (np.flatnonzero(targets[row] != IGNORED) == np.arange(before - 1, before + noise + spans)).all()
        assert (inputs[row, before:] == answer[:-1][: 128 - before]).all(), "the answer is fed back, one token on"
        sentinels = np.flatnonzero(answer >= 500)
        assert answer[sentinels].tolist() == list(range(500, 500 + spans + 1))
        restored: list[int] = []
        for token in inputs[row, :before]:
            place = sentinels[token - 500] if token >= 500 else None
            restored += [token] if place is None else answer[place + 1 : sentinels[token - 499]].tolist()
        assert restored == source.read(np.array([start]), length)[0].tolist()
    assert source.count(starts) == (targets != IGNORED).sum()


def test_corruption_is_a_function_of_seed_step_and_window() -> None:
    starts = np.array([5, 77])
    for objective in (MASKED, SPANS):
        first = corrupted(objective).batch(starts, 4)
        assert all((a == b).all() for a, b in zip(first, corrupted(objective).batch(starts, 4), strict=True))
        assert all((a[1:] == b).all() for a, b in zip(first, corrupted(objective).batch(starts[1:], 4), strict=True))
        assert (first[1] != corrupted(objective).batch(starts, 5)[1]).any()
        assert (first[1] != corrupted(objective, seed=4).batch(starts, 4)[1]).any()


@pytest.mark.parametrize("context", [4, 16, 127, 512])
@pytest.mark.parametrize("rate", [0.15, 0.5])
def test_span_sizes_fit(context: int, rate: float) -> None:
    length, noise, spans = span_sizes(context, ObjectiveConfig(name="span_corruption", rate=rate))
    assert 1 <= spans <= noise < length and length - noise >= spans and length + 2 * spans + 1 <= context + 1


@pytest.mark.parametrize("settings", [(), ("model.positions=rotary", "model.kv_heads=2"), ("model.sliding_window=3",)])
def test_a_prefix_sees_itself_and_the_rest_sees_what_is_before(settings: tuple[str, ...]) -> None:
    torch.manual_seed(1)
    model = GPT(tiny("zero0", 1, settings).run.model).eval()
    tokens_BT = torch.randint(0, 37, (1, 12))
    seen = torch.zeros(12, 12, dtype=torch.bool)
    x_BTD = model.embedding(tokens_BT).detach().requires_grad_()
    for query in range(12):
        stream = x_BTD
        shared = model.shared(stream, None, None, torch.tensor([5]))
        block = model.blocks[0]
        (gradient,) = torch.autograd.grad(block(stream, *shared)[0, query].sum(), x_BTD)
        seen[query] = gradient[0].abs().sum(-1) > 0
    places, window = torch.arange(12), 3 if settings == ("model.sliding_window=3",) else 99
    distance = places[:, None] - places
    assert torch.equal(seen, (distance >= 0) & (distance < window) | (places < 5))


def test_the_vocabulary_grows_and_other_stages_are_refused() -> None:
    settings = [
        "data.corpus=synthetic",
        "data.synthetic.vocab_size=16",
        "data.synthetic.tokens=5000",
        "objective.name=masked",
    ]
    run = tiny("zero1", 1, settings).run
    dataset = prepare_stage(run)
    assert isinstance(dataset.train, Corrupted) and needed_vocabulary(run, dataset) == 17
    with pytest.raises(ConfigError, match="objective.name = 'masked' with stage = 'sft'"):
        prepare_stage(tiny("zero1", 1, [*settings, "stage=sft"]).run)
    assert not run.generates


K = 8  # a corpus of pairs: any of K tokens, then the one of K others that belongs to it


def paired_dataset() -> Dataset:
    first = np.random.default_rng(5).integers(0, K, 400_000)
    return Dataset.cut(
        np.stack([first, K + (first * 3 + 1) % K], axis=1).reshape(-1).astype(np.uint16),
        0.1,
        SyntheticTokenizer(2 * K),
        "pairs",
    )


def masked_bound(chosen: float) -> float:
    """The least loss on the pairs, nats a masked token, by Bayes' rule over all that can be seen.

    A masked token is one of K, equally likely. Of it one sees the mask (0.8), any token (0.1) or itself (0.1). Of its
    partner, which was chosen too with probability `chosen`, one sees it, or what a chosen token becomes. All other
    pairs say nothing of it.
    """
    shown = {"mask": 0.8, **{token: 0.1 / (2 * K) for token in range(2 * K)}}
    likelihood = np.zeros((K, len(shown), len(shown)))  # token, seen in its place, seen in its partner's
    for token in range(K):
        own = np.array([p + 0.1 * (seen == token) for seen, p in shown.items()])
        partner = np.array(
            [chosen * (p + 0.1 * (seen == token)) + (1 - chosen) * (seen == token) for seen, p in shown.items()]
        )
        likelihood[token] = own[:, None] * partner[None, :]
    posterior = likelihood / likelihood.sum(axis=0)
    return float(-(likelihood * np.log(np.where(likelihood > 0, posterior, 1))).sum() / K)


def learned(ranks: Any) -> float:
    """Loss on windows that were not trained on. All windows begin with a pair's first token: one epoch is one cut."""
    from ds_gpt.engine.engine import Engine

    settings = [
        "model.context=8",
        "model.heads=2",
        "model.layers=1",
        "model.vocab_size=17",
        "batch.global_batch_size=128",
        "objective.name=masked",
        "objective.rate=0.25",
    ]
    composed = tiny("zero1", ranks.world_size, settings)
    train = Corrupted(paired_dataset().train, composed.run.objective, 8, 2 * K, composed.run.seed)
    engine, sampler = Engine(composed, ranks), train.sampler(8, 128, 1)
    loader = BatchLoader(train, sampler, ranks.rank, ranks.world_size, composed.micro_batch_size, "cpu")
    for step in range(STEPS):
        engine.step(step, loader.load(step), 0.006 * min(1, (STEPS - step) / 200))
    loss = engine.evaluate(
        [window_batch(train, sampler.windows(step), 8, IGNORE_INDEX) for step in range(STEPS + 100, STEPS + 140)]
    )
    loader.close()
    engine.close()
    return loss


STEPS = 350


def test_the_known_bound_is_reached() -> None:
    """Two of 8 tokens are chosen, and so the partner of a chosen one with probability 1/7. A model that does not see what
    follows pays ln K for most of the first tokens of pairs: about half of that on average."""
    bound = masked_bound(1 / 7)
    assert bound < 0.3 < 0.9 < 0.9 * math.log(K) / 2
    (loss,) = run_ranks(1, learned, deadline_s=200)
    assert bound - 0.03 < loss < bound + 0.05, (loss, bound)


def test_the_objective_scores_targets_alone() -> None:
    for objective in ("masked", "span_corruption"):
        run = tiny("zero1", 1, [f"objective.name={objective}", "model.vocab_size=520"]).run
        source = Corrupted(Split.of(TEXT), run.objective, 16, 500, 1)
        batch = window_batch(source, np.array([3, -1, 90]), 16, IGNORE_INDEX)
        model = GPT(run.model)
        found = objective_of(run)(model, True, *batch)
        inputs, targets, prefix = batch
        logits = model(inputs, prefix_B=prefix)
        counted = targets != IGNORE_INDEX
        assert not counted[1].any() and found.counted == counted.sum() == source.count(np.array([3, 90]))
        torch.testing.assert_close(
            found.loss_sum, torch.nn.functional.cross_entropy(logits[counted], targets[counted], reduction="sum")
        )
