"""The loop: what it computes, what it writes, how it ends."""

from __future__ import annotations

import io
import math
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_ranks
from rich.console import Console as RichConsole
from tiny import tiny, train_curve
from trainer_bench import KEYS, STRAGGLER, Ran, TinyDataset, metrics, scalars, train

from ds_gpt.config import Composed
from ds_gpt.config.run import SampleConfig
from ds_gpt.data import CharTokenizer, Dataset, SyntheticTokenizer, synthetic_entropy
from ds_gpt.data.corpora import synthetic_tokens
from ds_gpt.learning.schedule import schedule

SHORT = ("training.steps=9", "evaluation.every=4", "evaluation.sequences=8", "logging.every=3", "sample.tokens=5")


# Starting ranks and importing what DeepSpeed imports late takes longer than these runs, so they share their ranks.

SYNTHETIC = (
    "data.corpus=synthetic", "data.synthetic.vocab_size=16", "data.synthetic.branching=2", "data.synthetic.tokens=200000", "model.vocab_size=16",
    "model.layers=1", "training.steps=300", "schedule.warmup_steps=20", "evaluation.every=1000", "evaluation.sequences=512", "sample.tokens=0", "logging.every=50",
)  # fmt: skip
# A constant learning rate, so that the harness's loop and the trainer's take the same steps.
CONSTANT = (*SHORT, "logging.level=DEBUG", "schedule.name=constant", "schedule.warmup_steps=0", "gradient_accumulation_steps=2")
ACCUMULATION = (1, 8)


@dataclass(frozen=True)
class Pair:
    """What two ranks came to: `curve` is the harness's own, for the settings of the run "constant"."""

    folder: Path
    short: Ran
    synthetic: Ran
    curve: list[tuple[float, float]]


def on_two_ranks(ranks: Any, folder: Path) -> Pair:
    constant, synthetic = tiny("zero2", 2, CONSTANT), tiny("zero2", 2, SYNTHETIC)
    tokens = synthetic_tokens(synthetic.run.data.synthetic, synthetic.run.seed)
    short = train(ranks, tiny("zero1", 2, SHORT), TinyDataset(), folder / "short")
    train(ranks, constant, TinyDataset(), folder / "constant")
    learned = train(ranks, synthetic, Dataset.cut(tokens, 0.1, SyntheticTokenizer(16), "synthetic"), folder / "synthetic")
    return Pair(folder, short, learned, train_curve(ranks, constant, constant.run.training.steps, constant.run.optimizer.lr))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Three runs on two ranks."""
    first, other = run_ranks(2, on_two_ranks, tmp_path_factory.mktemp("pair"))
    assert (other.curve, other.short.val_loss, other.synthetic.val_loss) == (first.curve, first.short.val_loss, first.synthetic.val_loss)
    assert other.short.console == "", "rank 1 is silent"
    return first


@pytest.fixture(scope="module")
def short(pair: Pair) -> tuple[Ran, Path]:
    """Nine steps of the tiny run on two ranks, with TensorBoard."""
    return pair.short, pair.folder / "short"


def on_one_rank(ranks: Any, folder: Path) -> None:
    every_step = (*SHORT, "logging.level=DEBUG")
    jobs = {f"accumulation{n}": tiny("zero1", 1, [*every_step, f"gradient_accumulation_steps={n}", "training.steps=4"]) for n in ACCUMULATION}
    jobs["fp16"] = tiny("fp16", 1, [*every_step, "training.steps=3", "fp16.initial_scale_power=32", "fp16.hysteresis=1"])
    jobs["checkpoints"] = tiny("zero1", 1, [*SHORT, "checkpoints.every=4", "logging.tensorboard=false"])
    for name, composed in jobs.items():
        train(ranks, composed, TinyDataset(), folder / name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of several runs on one rank."""
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(1, on_one_rank, folder)
    return folder


def test_metrics_file(short: tuple[Ran, Path]) -> None:
    ran, folder = short
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [3, 4, 6, 8, 9], "every third, every evaluation, and the last"
    for line in lines:
        evaluated = line["step"] in (4, 8, 9)
        assert list(line) == KEYS + ["val_loss"] * evaluated + STRAGGLER
        assert line["tokens"] == line["step"] * 16 * 16
        assert line["mfu"] is None, "a CPU's peak is not known"
        assert 0 < line["step_s"] < 30
        assert line["tokens_per_s"] == pytest.approx(16 * 16 / line["step_s"])
        assert 50 << 20 < line["peak_bytes"] < 8 << 30
    assert (ran.step, ran.tokens, ran.interrupted) == (9, 9 * 256, False)
    assert ran.val_loss == lines[-1]["val_loss"]


def test_learning_rate_is_the_schedule_s(short: tuple[Ran, Path]) -> None:
    rate = schedule(tiny("zero1", 2, SHORT).run, 2)
    assert [line["lr"] for line in metrics(short[1])] == [rate(line["step"] - 1) for line in metrics(short[1])]


def test_tensorboard_holds_the_same_numbers(short: tuple[Ran, Path]) -> None:
    found, lines = scalars(short[1]), metrics(short[1])
    unsaid = set() if any(line["straggler"] is not None for line in lines) else {"train/straggler"}  # no scalar where it is null
    assert set(found) == {f"train/{key}" for key in [*KEYS, *STRAGGLER] if key not in ("step", "mfu")} - unsaid | {"validation/loss", "validation/perplexity"}
    for key in KEYS:
        if f"train/{key}" in found:
            assert found[f"train/{key}"] == pytest.approx({line["step"]: line[key] for line in lines}, rel=1e-6)
    losses = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}
    assert found["validation/loss"] == pytest.approx(losses, rel=1e-6)
    assert found["validation/perplexity"] == pytest.approx({step: math.exp(loss) for step, loss in losses.items()}, rel=1e-5)


def test_log_of_a_run(short: tuple[Ran, Path]) -> None:
    ran, folder = short
    lines = [line for line in ran.console.splitlines() if line.startswith("step")]
    assert len(lines) == 5
    for line, numbers in zip(lines, metrics(folder), strict=True):
        assert line.split()[1] == f"{numbers['step']}/9"
        assert f"loss {numbers['loss']:.4f}" in line and "ETA 0:00:" in line
        assert ("validation loss" in line) == ("val_loss" in numbers)
    assert "\x1b" not in ran.console
    sample = (folder / "sample.txt").read_text()
    assert ran.console.endswith(f"sample:\n{sample}\n")


def test_curve_is_the_harness_s_and_debug_logs_every_step(pair: Pair) -> None:
    lines = metrics(pair.folder / "constant")
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert [(line["loss"], line["grad_norm"]) for line in lines] == pair.curve, "to the last bit: evaluating and logging change nothing"


def test_the_synthetic_corpus_is_learned_to_its_entropy(pair: Pair) -> None:
    """A loss with a right answer. Each of 16 tokens has 2 equally likely successors: no model gets below ln 2, this one gets there."""
    entropy = synthetic_entropy(tiny("zero2", 2, SYNTHETIC).run.data.synthetic)
    assert entropy == pytest.approx(math.log(2))
    # Over 512 windows x 16 tokens, none of which can be predicted better; the rest is what 300 steps have not learned.
    assert entropy - 0.001 < pair.synthetic.val_loss < entropy + 0.02
    assert metrics(pair.folder / "synthetic")[0]["loss"] > entropy + 0.02


def test_learning_rate_does_not_depend_on_accumulation(alone: Path) -> None:
    once, often = ([line["lr"] for line in metrics(alone / f"accumulation{n}")] for n in ACCUMULATION)
    assert once == often and len(set(once)) == 4


def test_fp16_writes_its_scale_and_its_skipped_steps(alone: Path) -> None:
    """A scale of 2^32 overflows: those steps are skipped and their norms are no numbers, yet every line is JSON."""
    lines = metrics(alone / "fp16")
    for line in lines:
        assert set(line) - {"val_loss", "skipped"} == {*KEYS, "loss_scale"}
        assert line.get("skipped", 1) == 1
        assert line["loss"] is not None
    assert lines[0]["skipped"] == 1
    scales = [line["loss_scale"] for line in lines]
    assert scales == sorted(scales, reverse=True) and scales[-1] < 2**32
    assert [line["step"] for line in lines] == [1, 2, 3], "a skipped step is a step"


def test_checkpoints_when_due_and_at_the_end(alone: Path) -> None:
    folder = alone / "checkpoints"
    assert {path.name for path in (folder / "checkpoints").glob("step_*")} == {"step_0000004", "step_0000008", "step_0000009"}
    assert (folder / "checkpoints" / "latest").read_text().strip() == "step_0000009"
    assert not (folder / "tensorboard").exists()


def interrupted_rank(ranks: Any, composed: Composed, folder: Path) -> tuple[Ran, bool]:
    """A run in which rank 1 alone is asked to stop, in its third step, as the launcher does it."""
    from ds_gpt.engine import engine

    take_step, before = engine.Engine.step, signal.getsignal(signal.SIGTERM)

    def step(self: Any, number: int, *args: Any) -> Any:
        result = take_step(self, number, *args)
        if ranks.rank == 1 and number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    engine.Engine.step = step  # type: ignore[method-assign]  # this process is only this rank
    ran = train(ranks, composed, TinyDataset(), folder)
    return ran, signal.getsignal(signal.SIGTERM) is before


def test_all_ranks_stop_after_the_same_step(tmp_path: Path) -> None:
    for ran, handlers_are_back in run_ranks(2, interrupted_rank, tiny("zero3", 2, [*SHORT, "training.steps=100000"]), tmp_path):
        assert (ran.step, ran.interrupted, handlers_are_back) == (4, True, True)
    assert metrics(tmp_path)[-1]["step"] == 4 and "val_loss" not in metrics(tmp_path)[-1], "who asks to stop may give seconds: they are for saving"
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step_0000004"
    assert not (tmp_path / "sample.txt").exists()


def fails_in_its_third_step(ranks: Any, composed: Composed, folder: Path) -> None:
    from ds_gpt.engine.engine import Engine
    from ds_gpt.trainer.console import Console
    from ds_gpt.trainer.loop import Trainer
    from ds_gpt.trainer.run_folder import RunFolder

    stderr = sys.stderr
    console = Console(composed.run.training.steps, RichConsole(file=io.StringIO(), force_terminal=True, width=80))
    trainer = Trainer(composed, TinyDataset(), Engine(composed, ranks), RunFolder(folder), console)
    load = trainer.loader.load
    trainer.loader.load = lambda step: load(step) if step < 2 else 1 / 0  # type: ignore[method-assign,return-value,assignment]
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert sys.stderr is stderr, "the bar took stderr's place: the error's text would be drawn above it, on stdout"
    with pytest.raises(RuntimeError):
        load(0)  # closed
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_failure_closes_what_was_open(tmp_path: Path) -> None:
    run_ranks(1, fails_in_its_third_step, tiny("zero1", 1, [*SHORT, "logging.level=DEBUG"]), tmp_path)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]
    assert set(scalars(tmp_path)["train/loss"]) == {1, 2}, "flushed"


# Samples


def samples(ranks: Any, jobs: list[tuple[Composed, Dataset, SampleConfig]]) -> list[str]:
    from ds_gpt.engine.engine import Engine
    from ds_gpt.trainer.evaluation import sample_text

    texts = []
    for composed, dataset, sample in jobs:
        engine = Engine(composed, ranks)
        texts.append(sample_text(engine, dataset, sample))
        engine.close()
    return texts


def test_a_sample_is_the_same_on_all_ranks_and_at_every_stage() -> None:
    sample = SampleConfig(prompt="1 2 3", tokens=30, temperature=1.0, top_k=None)
    found = []
    for ranks, names in ((1, ["zero0"]), (2, ["zero0", "zero3"])):
        by_rank = run_ranks(ranks, samples, [(tiny(name, ranks), TinyDataset(), sample) for name in names])
        assert all(texts == by_rank[0] for texts in by_rank)
        found += by_rank[0]
    assert found[0].startswith("1 2 3 ") and len(found[0].split()) == 33
    assert len(set(found)) == 1


def test_a_prompt_that_the_corpus_cannot_spell_does_not_end_the_run() -> None:
    characters = CharTokenizer("".join(chr(ord("A") + i) for i in range(37)))
    cases = [
        (SyntheticTokenizer(37), "ROMEO:"),
        (SyntheticTokenizer(37), "36 37"),
        (SyntheticTokenizer(37), ""),
        (characters, "ROMEO: \N{SNOWMAN}"),
        (characters, ""),
        (characters, "A" * 100),  # longer than the context
    ]
    jobs = [(tiny("zero1", 1), TinyDataset(tokenizer), SampleConfig(prompt=prompt, tokens=4)) for tokenizer, prompt in cases]
    (texts,) = run_ranks(1, samples, jobs)
    assert [len(text.split()) for text in texts[:3]] == [5, 5, 5], "one token to start from, four more"
    assert [len(text) for text in texts[3:]] == [5, 5, 104]


def beside_ballast(ranks: Any, folder: Path) -> int:
    """A run in which rank 1 holds 300 MB more than rank 0; the peak before it."""
    import torch

    from ds_gpt.trainer.measurements import peak_bytes

    ballast = torch.ones(75_000_000 * ranks.rank)
    before = peak_bytes(ballast.device)
    train(ranks, tiny("zero1", 2, ("training.steps=2", "sample.tokens=0")), TinyDataset(), folder)
    return before


def test_peak_memory_is_that_of_the_fullest_rank(tmp_path: Path) -> None:
    first, fullest = run_ranks(2, beside_ballast, tmp_path)
    assert fullest > first + 250_000_000
    assert metrics(tmp_path)[-1]["peak_bytes"] >= fullest
