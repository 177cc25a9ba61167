"""Our loss of preferences against that of ``trl``: its trainer, on the same model, pairs and reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import tokenizers
import torch
import transformers
import trl
from made_examples import composed, pairs, settled, write

from ds_gpt.data.loader import window_batch
from ds_gpt.exchange.families import config_json, family_of
from ds_gpt.learning.loss import IGNORE_INDEX
from ds_gpt.learning.objectives import objective_of, sequence_log_probs
from ds_gpt.model.gpt import GPT

COUNT, BETA = 6, 0.3


def as_transformers_has_it(model: GPT) -> Any:
    """The same weights in the class that `ds-gpt export` exports them for."""
    family, ours = family_of(model.config), dict(model.named_parameters())
    config = transformers.GPT2Config.from_dict(config_json(model.config, family, "float32", {}))
    theirs = transformers.GPT2LMHeadModel(config)
    rules = family.layout(model.config).rules
    weights = {
        name: part
        for rule in rules
        for name, part in zip(rule.theirs, rule.outward(ours[rule.ours].detach()), strict=True)
    }
    assert theirs.load_state_dict(weights, strict=False).unexpected_keys == []
    return theirs


def trainer(model: Any, reference: Any, folder: Path) -> Any:
    """trl's trainer as its users build it; what it is to train on is given to it below."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2, "[E]": 3}, unk_token="[E]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[E]", pad_token="[E]")
    options = trl.DPOConfig(
        str(folder), beta=BETA, use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False
    )
    data = datasets.Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2)
    return trl.DPOTrainer(
        model=model, ref_model=reference, args=options, train_dataset=data, processing_class=tokenizer
    )


def as_trl_has_it(inputs_NT: torch.Tensor, targets_NT: torch.Tensor) -> dict[str, torch.Tensor]:
    """The pairs as its collator makes them: whole sequences, the preferred ones first, and where the answers are."""
    ids, answer = (
        torch.nn.functional.pad(inputs_NT, (0, 1)),
        torch.nn.functional.pad(targets_NT != IGNORE_INDEX, (1, 0)),
    )
    ids[answer] = targets_NT[targets_NT != IGNORE_INDEX]
    order = [*range(0, 2 * COUNT, 2), *range(1, 2 * COUNT, 2)]
    last = answer.shape[1] - answer.flip(-1).int().argmax(dim=-1)
    attended = torch.arange(answer.shape[1]) < last[:, None]
    return {"input_ids": ids[order], "attention_mask": attended[order].long(), "completion_mask": answer[order].long()}


@pytest.fixture
def case(tmp_path: Path) -> tuple[Any, Any, Any, tuple[torch.Tensor, ...]]:
    """The run, our model, trl's trainer of it, and pairs with the log-probabilities of the reference."""
    corpus = write(
        tmp_path / "pairs.jsonl",
        [{**pair, "chosen": pair["chosen"] * (1 + place % 3)} for place, pair in enumerate(pairs())],
    )
    run, dataset = settled(composed("dpo", corpus, [f"preference.beta={BETA}"]).run)
    torch.manual_seed(7)
    model, reference = GPT(run.model), GPT(run.model)
    inputs, targets, _ = window_batch(dataset.train, torch.arange(COUNT).numpy(), run.model.context, IGNORE_INDEX)
    with torch.no_grad():
        before = reference(inputs, loss=lambda x, weight: sequence_log_probs(x, weight, targets)).view(-1, 2)
    theirs = trainer(as_transformers_has_it(model), as_transformers_has_it(reference), tmp_path)
    return run, model, theirs, (inputs, targets, before)


def test_loss_rewards_and_gradients_are_those_of_trl(case: tuple[Any, Any, Any, tuple[torch.Tensor, ...]]) -> None:
    run, model, theirs, batch = case
    expected = theirs.compute_loss(theirs.model, as_trl_has_it(*batch[:2]))
    expected.backward()
    found = objective_of(run)(model, True, *batch)
    (found.loss_sum / COUNT).backward()
    torch.testing.assert_close(found.loss_sum / COUNT, expected, rtol=1e-5, atol=1e-6)
    said = {key: values[0] for key, values in theirs._metrics["train"].items()}
    for ours, name in (
        ("reward_chosen", "chosen"),
        ("reward_rejected", "rejected"),
        ("reward_margin", "margins"),
        ("accuracy", "accuracies"),
    ):
        assert found.metrics[ours].item() / COUNT == pytest.approx(said[f"rewards/{name}"], rel=1e-4, abs=1e-5), name
    gradients = {name: parameter.grad for name, parameter in theirs.model.named_parameters()}
    for rule in family_of(run.model).layout(run.model).rules:
        ours = dict(model.named_parameters())[rule.ours].grad
        for name, part in zip(rule.theirs, rule.outward(ours), strict=True):
            torch.testing.assert_close(part, gradients[name], rtol=1e-4, atol=1e-6)


def test_label_smoothing_is_the_expectation_over_which_answer_is_preferred(
    case: tuple[Any, Any, Any, tuple[torch.Tensor, ...]],
) -> None:
    """cDPO, which trl has no name for: its loss of the pairs as they are, and of the pairs the other way round."""
    run, model, theirs, (inputs, targets, before) = case
    smoothed = run.model_copy(update={"preference": run.preference.model_copy(update={"label_smoothing": 0.2})})
    found = objective_of(smoothed)(model, True, inputs, targets, before)
    swapped = [side.view(COUNT, 2, -1).flip(1).flatten(0, 1) for side in (inputs, targets)]
    as_is, turned = (theirs.compute_loss(theirs.model, as_trl_has_it(*pair)) for pair in ((inputs, targets), swapped))
    torch.testing.assert_close(found.loss_sum / COUNT, 0.8 * as_is + 0.2 * turned, rtol=1e-5, atol=1e-6)
