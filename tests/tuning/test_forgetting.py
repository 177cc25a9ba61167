"""What a tuned model loses of its pre-training is measured and diagnosed; what it is can be generated from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_gpt.trainer.diagnosis import diagnose
from ds_gpt.trainer.metrics_history import History


def ds_gpt(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ds_gpt", *arguments], capture_output=True, text=True, timeout=150, env=os.environ
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(folder: Path, name: str, *settings: str) -> list[dict[str, float]]:
    shape = (
        "model.layers=2",
        "model.width=32",
        "model.heads=2",
        "model.context=64",
        "sample.tokens=4",
        "logging.tensorboard=false",
        "logging.every=1",
    )
    ds_gpt(
        "train",
        "--run-dir",
        str(folder / name),
        *(part for setting in (*shape, *settings) for part in ("--set", setting)),
    )
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def test_a_learning_rate_that_is_too_high_is_seen_on_the_text_of_the_pretraining(folder: Path) -> None:
    lines = train(
        folder,
        "base",
        "training.steps=80",
        "evaluation.sequences=64",
        "evaluation.every=80",
        "schedule.warmup_steps=5",
        "optimizer.lr=0.005",
    )
    tuning = (
        "stage=sft",
        "data.corpus=toy_chat",
        f"init_from={folder / 'base'}",
        "training.steps=12",
        "evaluation.every=6",
        "schedule.name=constant",
        "schedule.warmup_steps=0",
    )
    gentle = train(folder, "gentle", *tuning, "optimizer.lr=0.0001")
    harsh = train(folder, "harsh", *tuning, "optimizer.lr=0.1", "health.enabled=false")
    assert (
        gentle[0]["pretraining_loss_before"]
        == harsh[0]["pretraining_loss_before"]
        == pytest.approx(lines[-1]["val_loss"], rel=1e-5)
    )
    assert [line["step"] for line in gentle if "val_pretraining_loss" in line] == [6, 12]
    assert "forgetting" not in {finding.kind for finding in diagnose(History.of(gentle))}
    (found,) = [finding for finding in diagnose(History.of(harsh)) if finding.kind == "forgetting"]
    assert "it forgets" in found.what and "optimizer.lr" in found.remedy


def test_a_run_of_adapters_is_generated_from_merged(folder: Path) -> None:
    from ds_gpt.checkpoint.saved_model import find_saved_model

    settings = (
        "stage=sft",
        "data.corpus=toy_chat",
        f"init_from={folder / 'base'}",
        "lora.rank=4",
        "training.steps=12",
        "evaluation.every=12",
    )
    train(folder, "adapters", *settings, "schedule.warmup_steps=0", "schedule.name=constant", "optimizer.lr=0.05")
    saved = find_saved_model(folder / "adapters")
    weight, base = (
        find_saved_model(folder / name).load().blocks[0].attention.qkv.weight for name in ("adapters", "base")
    )
    assert (
        saved.load()
        .blocks[0]
        .feed_forward.up.weight.equal(find_saved_model(folder / "base").load().blocks[0].feed_forward.up.weight)
    )
    assert (weight - base).abs().max() > 0.01
    text = ds_gpt("generate", str(folder / "adapters"), "--chat", "--prompt", "Is 36 even?", "--max-new-tokens", "50", "--temperature", "0")
    assert text.startswith("User: Is 36 even?\n\nAssistant: ")
    assert "\n\n" not in text.partition("Assistant: ")[2], "it ends where the template ends an answer"
