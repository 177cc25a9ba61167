"""Whatever a user gets wrong: one text on stderr that names key, value and remedy, soon, and nothing left running."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import CONFIGS, DEEPSPEED, PLAIN, TORCHRUN, TRAIN, Ended, ran, started

PLAIN_LIMIT_S = 20  # about 2 on an idle machine, 4 where DeepSpeed itself has to be asked
LAUNCHER_LIMIT_S = 40  # about 6; the launcher alone takes 3


def assert_refused(ended: Ended, limit_s: float, *words: str) -> None:
    """Ended with status 2 in time, having said `words` in the one text."""
    assert ended.status == 2, ended.out + ended.err
    assert ended.seconds < limit_s
    assert ended.err.count("ds_gpt: ") == 1, ended.err
    assert "attention" in ended.err and "\ndo:  " in ended.err
    assert "Traceback" not in ended.err + ended.out
    assert "rank 1" not in ended.err
    for word in words:
        assert word in ended.err, ended.err


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def zero1_with(folder: Path, **values: object) -> Path:
    return write(folder / "given.json", json.dumps(json.loads((CONFIGS / "zero1.json").read_text()) | values, indent=2))


# Arguments, given a folder; and what the error has to say.
CASES: dict[str, tuple[Callable[[Path], list[object]], list[str]]] = {
    "unknown option": (lambda _: ["--step", "3"], ["--step", "usage: train.py"]),
    "option without value": (lambda _: ["--config"], ["--config", "expected one argument"]),
    "unknown key": (lambda _: ["--set", "training.step=3"], ["training.step", "'steps'"]),
    "unknown DeepSpeed key": (lambda f: ["--deepspeed_config", zero1_with(f, gradient_cliping=0.3)], ["gradient_cliping", "given.json:", "'gradient_clipping'"]),
    "wrong type": (lambda _: ["--set", "training.steps=many"], ["training.steps", "'many'", "integer"]),
    "not key=value": (lambda _: ["--set", "training.steps"], ["training.steps", "key=value"]),
    "missing run config": (lambda f: ["--config", f / "none.yaml"], ["none.yaml", "does not exist"]),
    "missing DeepSpeed config": (lambda _: ["--deepspeed_config", CONFIGS / "zero4.json"], ["zero4.json", "does not exist", "did you mean 'zero"]),
    "corrupt JSON": (lambda f: ["--deepspeed_config", write(f / "x.json", '{"bf16": {"enabled": true},\n}')], ["x.json", "not valid JSON", "line 2"]),
    "corrupt YAML": (lambda f: ["--config", write(f / "x.yaml", "name: [")], ["x.yaml"]),
    "batch does not divide": (
        lambda _: ["--set", "batch.global_batch_size=16", "--set", "batch.micro_batch_size=5"],
        ["batch.global_batch_size = 16", "5", "batch.global_batch_size to 15 or 20", "batch.micro_batch_size to"],
    ),
    "context longer than the text": (lambda _: ["--set", "model.context=100000"], ["100001", "model.context", "longer data.corpus"]),
    "empty corpus": (lambda f: ["--set", f"data.corpus={write(f / 'empty.txt', '')}"], ["data.corpus", "empty.txt", "is empty"]),
    "corpus does not exist": (lambda f: ["--set", f"data.corpus={f}/no.txt"], ["data.corpus", "no.txt", "does not exist"]),
    "vocabulary too small": (lambda _: ["--set", "model.vocab_size=3"], ["model.vocab_size = 3", "needs 29 tokens", "or auto"]),
    "run folder not empty": (lambda f: ["--run-dir", write(f / "full" / "x", "").parent], ["--run-dir", "full", "not empty"]),
    "run folder cannot be made": (lambda f: ["--run-dir", write(f / "file", "").joinpath("run")], ["file/run", "cannot be written", "--run-dir"]),
    "only DeepSpeed refuses it": (lambda _: ["--set", "zero_optimization.reduce_bucket_size=big"], ["reduce_bucket_size", "big", "integer"]),
    "several at once": (
        lambda _: ["--set", "model.heads=3", "--set", "gradient_clipping=high"],
        ["1. ", "2. ", "model.heads = 3", "gradient_clipping = 'high'"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_process(case: str, tmp_path: Path, tiny: list[str]) -> None:
    (tmp_path / "full").mkdir()
    arguments, words = CASES[case]
    before = {path.name for path in tmp_path.iterdir()}
    ended = ran(tmp_path, *PLAIN, TRAIN, *tiny, *arguments(tmp_path))
    if case == "several at once":
        ended = Ended(ended.status, ended.out, ended.err.replace("\n   do:  ", "\ndo:  "), ended.seconds)
    assert_refused(ended, PLAIN_LIMIT_S, *words)
    assert ended.out == ""
    assert "runs" not in {path.name for path in tmp_path.iterdir()} - before, "a run that cannot start leaves no folder"


LAUNCHED: dict[str, tuple[int, list[str], list[str]]] = {
    "unknown option": (2, ["--step", "3"], ["--step"]),
    "only DeepSpeed refuses it": (2, ["--set", "zero_optimization.reduce_bucket_size=big"], ["reduce_bucket_size", "big"]),
    "more ranks than the batch": (4, ["--set", "batch.global_batch_size=2"], ["batch.global_batch_size = 2", "4 ranks", "number of ranks to 1 or 2"]),
    "context longer than the text": (2, ["--set", "model.context=100000"], ["100001", "model.context"]),
}


@pytest.mark.parametrize("case", LAUNCHED)
def test_under_the_launcher(case: str, tmp_path: Path, tiny: list[str]) -> None:
    ranks, arguments, words = LAUNCHED[case]
    assert_refused(ran(tmp_path, *DEEPSPEED, "--num_gpus", ranks, TRAIN, *tiny, *arguments), LAUNCHER_LIMIT_S, *words)
    assert not (tmp_path / "runs").exists()


def test_torchrun_ends_with_what_is_wrong(tmp_path: Path, tiny: list[str]) -> None:
    """It prints a traceback of its own after any rank that failed; what is below that is what a user reads."""
    ended = ran(tmp_path, *TORCHRUN, "--nproc-per-node", "2", TRAIN, *tiny, "--set", "model.layerz=3")
    assert ended.status == 1  # torchrun's, whatever the rank's
    cause = ended.err.partition("Root Cause")[2]
    assert "unknown key 'model.layerz'" in cause and "did you mean 'layers'?" in cause
    assert "To enable traceback" not in ended.err


def test_nodes_with_different_texts(tmp_path: Path, tiny: list[str]) -> None:
    """Both ranks refuse: one alone would leave the other waiting for it, then failing with a traceback of its own."""
    jobs = []
    for rank in range(2):
        home = tmp_path / f"node{rank}"
        home.mkdir()
        (home / "text.txt").write_text("The same letters in another order. "[:: 1 - 2 * rank] * 100)
        common = {"HOME": str(home), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 10000)}
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        jobs.append((home, common | place))
    command = (*PLAIN, TRAIN, *tiny, "--set", "data.corpus=~/text.txt", "--set", "data.cache_dir=~/cache")
    with started(jobs[0][0], *command, **jobs[0][1]) as first, started(jobs[1][0], *command, **jobs[1][1]) as second:
        assert_refused(first.wait(PLAIN_LIMIT_S), PLAIN_LIMIT_S, "data.corpus = '~/text.txt'", "1 of the 2 ranks", "same file")
        second.kill()  # as the launcher would; the second rank is silent until then
        assert second.err == ""
