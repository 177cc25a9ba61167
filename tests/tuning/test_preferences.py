"""Direct preference optimization and reward models."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import run_ranks
from made_examples import composed, pairs, settled, write

from ds_gpt.config import ConfigError
from ds_gpt.data.loader import BatchLoader, window_batch
from ds_gpt.data.stages import prepare_stage
from ds_gpt.learning.loss import IGNORE_INDEX
from ds_gpt.learning.objectives import objective_of
from ds_gpt.model.gpt import GPT

PREFERENCE = ["preference.beta=0.3", "preference.label_smoothing=0.1"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write(tmp_path / "pairs.jsonl", pairs())


def made(corpus: Path, stage: str, settings: list[str]) -> tuple[Any, Any, GPT, tuple[torch.Tensor, ...]]:
    run, dataset = settled(composed(stage, corpus, settings).run)
    torch.manual_seed(7)
    model = GPT(run.model)
    return run, dataset, model, window_batch(dataset.train, np.arange(6), run.model.context, IGNORE_INDEX)


def log_prob(model: GPT, dataset: Any, prompt: str, answer: str) -> torch.Tensor:
    """Log-probability of an answer, and the end, given its prompt, token by token."""
    asked, said = (dataset.tokenizer.encode(text).tolist() for text in (prompt, answer))
    said.append(dataset.tokenizer.separator)
    total = torch.zeros(())
    for number, token in enumerate(said):
        logits = model(torch.tensor([[*asked, *said[:number]]]))[0, -1]
        total = total + logits.log_softmax(-1)[token]
    return total


def test_dpo_is_the_formula_and_so_are_its_gradients(corpus: Path) -> None:
    run, dataset, model, (inputs, targets, _) = made(corpus, "dpo", PREFERENCE)
    reference_B2 = torch.randn(6, 2)
    found = objective_of(run)(model, True, inputs, targets, reference_B2)
    found.loss_sum.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    losses, accurate = [], 0
    for row in range(6):
        text = dataset.tokenizer.decode(inputs[2 * row][:6])
        record = next(record for record in pairs() if text.startswith(record["prompt"]))
        chosen, rejected = (log_prob(model, dataset, record["prompt"], record[side]) for side in ("chosen", "rejected"))
        h = 0.3 * ((chosen - reference_B2[row, 0]) - (rejected - reference_B2[row, 1]))
        losses.append(-0.9 * torch.log(torch.sigmoid(h)) - 0.1 * torch.log(torch.sigmoid(-h)))
        accurate += int(h > 0)
    torch.stack(losses).sum().backward()
    torch.testing.assert_close(found.loss_sum, torch.stack(losses).sum(), rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)
    assert found.counted == 6 and found.metrics["accuracy"] == accurate and 0 < accurate < 6
    rewards = found.metrics["reward_chosen"] - found.metrics["reward_rejected"]
    torch.testing.assert_close(found.metrics["reward_margin"], rewards, rtol=1e-4, atol=1e-5)


def test_at_equal_policies_the_loss_is_ln_2(corpus: Path) -> None:
    run, _, model, (inputs, targets, _) = made(corpus, "dpo", [])
    reference = objective_of(run)(model, True, inputs, targets, torch.zeros(6, 2))
    assert reference.metrics["reward_chosen"] != 0
    from ds_gpt.learning.objectives import sequence_log_probs

    log_probs = model(inputs, loss=lambda x, weight: sequence_log_probs(x, weight, targets)).view(-1, 2)
    found = objective_of(run)(model, True, inputs, targets, log_probs.detach())
    assert found.loss_sum.item() / 6 == pytest.approx(math.log(2), abs=1e-7)


@pytest.mark.parametrize("stage", ["dpo", "reward"])
def test_padding_adds_nothing(corpus: Path, stage: str) -> None:
    run, dataset, model, whole = made(corpus, stage, [])
    if stage == "reward":
        model.score()
    padded = window_batch(dataset.train, np.array([0, 1, 2, 3, 4, 5, -1]), run.model.context, IGNORE_INDEX)
    found, expected = (objective_of(run)(model, True, *batch) for batch in (padded, whole))
    assert found.counted == expected.counted == 6
    for ours, theirs in zip([found.loss_sum, *found.metrics.values()], [expected.loss_sum, *expected.metrics.values()]):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_bad_pairs_are_counted_and_left_out(tmp_path: Path) -> None:
    bad = [
        {"prompt": "1", "chosen": "2", "rejected": "2"},
        {"prompt": "1", "chosen": " ", "rejected": "2"},
        {"prompt": "1", "chosen": "2" * 60, "rejected": "2"},
    ]
    dataset = prepare_stage(composed("dpo", write(tmp_path / "a.jsonl", [*bad, *pairs()[:5], *bad[:1]])).run)
    assert dataset.notes == (
        "5 pairs",
        "2 with identical answers, left out",
        "1 with an empty answer, left out",
        "1 longer than 49 tokens, left out",
    )
    with pytest.raises(ConfigError, match="has 0 usable pairs; 1 with identical answers(.|\n)*give more of them"):
        prepare_stage(composed("dpo", write(tmp_path / "b.jsonl", bad[:1])).run)
    with pytest.raises(ConfigError, match="has 'text', not 'prompt', 'chosen' and 'rejected'"):
        prepare_stage(composed("dpo", write(tmp_path / "c.jsonl", [{"text": "1"}])).run)


@pytest.mark.parametrize(("stage", "longest"), [("dpo", 5), ("reward", 6)])
def test_a_row_has_both_sequences_each_as_long_as_the_longest(corpus: Path, stage: str, longest: int) -> None:
    """Of "a+b=", two digits and the end: a reward model reads all of it, the others predict its last from those before."""
    dataset = prepare_stage(composed(stage, corpus).run)
    assert dataset.train.item_tokens == dataset.val.item_tokens == 2 * (longest + 1)


def test_a_reward_is_the_heads_number_at_the_last_token(corpus: Path) -> None:
    run, dataset, model, (inputs, targets) = made(corpus, "reward", [])
    model.score()
    assert model.head.weight.shape == (1, 32) and model.embedding.tokens.weight.shape[0] == run.model.vocabulary
    losses = []
    for row in range(6):
        texts = [dataset.tokenizer.decode(inputs[2 * row + side]).split("\n")[0] + "\n" for side in (0, 1)]
        record = next(record for record in pairs() if texts[0].startswith(record["prompt"]))
        assert texts == [f"{record['prompt']}{record[side]}\n" for side in ("chosen", "rejected")]
        scores = [
            model(torch.from_numpy(dataset.tokenizer.encode(text).astype(np.int64))[None])[0, -1, 0] for text in texts
        ]
        losses.append(-torch.log(torch.sigmoid(scores[0] - scores[1])))
    found = objective_of(run)(model, True, inputs, targets)
    torch.testing.assert_close(found.loss_sum, torch.stack(losses).sum(), rtol=1e-5, atol=1e-6)


TRAINING = [
    "model.layers=2",
    "model.width=64",
    "schedule.name=constant",
    "schedule.warmup_steps=0",
    "evaluation.every=30",
    "logging.every=10",
    "logging.tensorboard=false",
    "training.steps=90",
]


def trained(ranks: Any, corpus: Path, folder: Path) -> None:
    from ds_gpt.engine.engine import Engine
    from ds_gpt.trainer.loop import Trainer
    from ds_gpt.trainer.run_folder import RunFolder

    for stage, deepspeed, settings in (
        ("dpo", "zero2", ["optimizer.lr=0.001", "preference.beta=0.5"]),
        ("reward", "zero3", ["optimizer.lr=0.002"]),
    ):
        case = composed(stage, corpus, [*TRAINING, *settings], deepspeed, ranks.world_size)
        run, dataset = settled(case.run)
        case = replace(case, run=run)
        (folder / stage).mkdir(exist_ok=True)
        engine = Engine(case, ranks)
        Trainer(case, dataset, engine, RunFolder(folder / stage), None).train()
        engine.close()


def test_a_toy_preference_is_learned_and_holds_for_pairs_that_were_not_trained_on(tmp_path: Path) -> None:
    records = [{"prompt": f"{n:02d}=", "chosen": f"{n % 5}!", "rejected": f"{n % 5}?"} for n in range(100)]
    run_ranks(2, trained, write(tmp_path / "toy.jsonl", records), tmp_path, deadline_s=200)
    for stage in ("dpo", "reward"):
        lines = [json.loads(line) for line in (tmp_path / stage / "metrics.jsonl").read_text().splitlines()]
        last = lines[-1]
        assert last["accuracy"] >= 0.95 and last["val_accuracy"] >= 0.95, last
        assert last["reward_margin"] > 1 and last["loss"] < 0.4
        if stage == "dpo":
            assert last["reward_chosen"] - last["reward_rejected"] == pytest.approx(
                last["reward_margin"], rel=1e-4, abs=1e-4
            )


def curves(ranks: Any, cases: list[Any]) -> list[list[tuple[float, float]]]:
    from ds_gpt.engine.engine import Engine
    from ds_gpt.trainer.reference import remember_reference

    found = []
    for case in cases:
        run, dataset = settled(case.run)
        engine = Engine(replace(case, run=run), ranks)
        if run.stage == "dpo":
            remember_reference(engine, dataset)
        sampler = dataset.train.sampler(run.model.context, run.batch.global_batch_size, run.seed)
        share = engine.grid.data_rank, engine.grid.data_ranks, case.micro_batch_size
        loader = BatchLoader(dataset.train, sampler, *share, "cpu")
        results = [engine.step(step, loader.load(step), 0.01) for step in range(3)]
        found.append([(result.loss, result.grad_norm) for result in results])
        loader.close()
        engine.close()
    return found


def test_ranks_that_share_matrices_prefer_alike(corpus: Path) -> None:
    ways = [(stage, way) for stage in ("dpo", "reward") for way in ([], ["parallel.tensor=2"])]
    cases = [composed(stage, corpus, [*way, "optimizer.name=sgd", "model.layers=1"], world_size=2) for stage, way in ways]
    for found in run_ranks(2, curves, cases):
        for data_parallel, tensor_parallel in (found[:2], found[2:]):
            torch.testing.assert_close(torch.tensor(tensor_parallel), torch.tensor(data_parallel), rtol=1e-5, atol=1e-7)
