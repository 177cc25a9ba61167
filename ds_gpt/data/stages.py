"""The data of a run, whatever its stage."""

from __future__ import annotations

from dataclasses import replace

from ds_gpt.config import ConfigError, Problem
from ds_gpt.config.run import RunConfig
from ds_gpt.data.corruption import Corrupted, added_tokens
from ds_gpt.data.examples import prepare_examples
from ds_gpt.data.split import Split
from ds_gpt.data.tokens import Dataset, prepare


def prepare_stage(run: RunConfig) -> Dataset:
    """What the run trains and validates on; needs no process group. Raises ConfigError."""
    if run.objective.name != "next_token" and (run.stage != "pretrain" or not run.data.attend_across_documents):
        raise ConfigError(
            Problem(
                f"objective.name = '{run.objective.name}' with stage = '{run.stage}', "
                f"data.attend_across_documents = {run.data.attend_across_documents}",
                "whole windows of text are corrupted, and only in pre-training",
                "set objective.name: next_token, or stage: pretrain and data.attend_across_documents: true",
            )
        )
    if run.stage != "pretrain":
        return prepare_examples(run)
    dataset = prepare(run.data, run.seed)
    if run.objective.name == "next_token":
        return dataset
    return replace(dataset, train=_corrupted(dataset.train, run, dataset), val=_corrupted(dataset.val, run, dataset))


def needed_vocabulary(run: RunConfig, dataset: Dataset) -> int:
    """Ids of the tokenizer, and those that the objective adds."""
    return dataset.tokenizer.vocab_size + added_tokens(run.objective, run.model.context)


def _corrupted(split: Split, run: RunConfig, dataset: Dataset) -> Corrupted:
    return Corrupted(split, run.objective, run.model.context, dataset.tokenizer.vocab_size, run.seed)
