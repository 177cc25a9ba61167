"""From files to shards to a trained run that goes on, by the commands that a user types."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from jobs import DEEPSPEED, DS_GPT, PLAIN, TRAIN, metrics, ran
from pydoc_data.topics import topics

from ds_gpt.checkpoint.saved_model import find_saved_model
from ds_gpt.data import load_tokenizer
from ds_gpt.data.prepared import open_prepared
from ds_gpt.exchange.exporting import export
from ds_gpt.generation.decoding import generate
from ds_gpt.generation.options import Sampling
from ds_gpt.trainer.quality import measure, validation_data

ENGLISH = [topics[name] for name in sorted(topics)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two corpora of one trained BPE: `docs` from JSONL, `text` from text with separators."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "docs.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in ENGLISH[:40]))
    (folder / "a.txt").write_text("<end>".join(ENGLISH[40:80]))
    of_docs = ("docs.jsonl", "--tokenizer", "bpe", "--bpe-vocab-size", 500, "--field", "body")
    ended = ran(folder, *DS_GPT, "prepare", "docs", *of_docs, "--val-fraction", 0.2, "--processes", 2)
    assert ended.status == 0, ended.err
    assert ended.out.startswith("docs: ")
    assert "of a vocabulary of 500, 40 documents" in ended.out and "MB/s" in ended.out and "--set data.corpus=docs" in ended.out
    of_text = ("*.txt", "--document-separator", "<end>", "--tokenizer", "docs/tokenizer.json")
    ended = ran(folder, *DS_GPT, "prepare", "text", *of_text, "--val-fraction", 0.2, "--processes", 1)
    assert ended.status == 0 and ", 39 documents" in ended.out, ended.err
    return folder


def test_again_and_verify(prepared: Path) -> None:
    ended = ran(prepared, *DS_GPT, "prepare", "docs", "--verify")
    assert ended.status == 0 and ended.out.endswith(": intact\n")


def test_a_run_on_a_mixture_of_shards(prepared: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained by two ranks with documents kept apart, then resumed by one; then evaluated and exported."""
    corpus = "data.corpus=[{corpus: docs, weight: 3}, {corpus: text, weight: 1}]"
    mixture = [*tiny, "--set", corpus, "--set", "data.attend_across_documents=false", "--set", "logging.every=1"]
    ended = ran(prepared, *DEEPSPEED, "--num_gpus", 2, TRAIN, *mixture, "--run-dir", "run")
    assert ended.status == 0, ended.err
    assert "0.75 x docs + 0.25 x text: " in ended.out and "vocabulary 500" in ended.out
    assert metrics(prepared / "run")[-1]["val_loss"] < 6.3  # ln 500 is 6.2
    ended = ran(prepared, *PLAIN, TRAIN, *mixture, "--set", "training.steps=6", "--resume", "run")
    assert ended.status == 0 and [line["step"] for line in metrics(prepared / "run")] == [1, 2, 3, 4, 5, 6], ended.err
    tokenizer = load_tokenizer(prepared / "run" / "tokenizer.json")
    assert tokenizer.identity == open_prepared(prepared / "text").tokenizer.identity
    text = ENGLISH[3] + "漢字"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    monkeypatch.chdir(prepared)
    check_evaluation_and_export()


def check_evaluation_and_export() -> None:
    """Its validation loss again, documents kept apart; and transformers continues a prompt with the same text."""
    saved = find_saved_model("run")
    quality = measure(saved, validation_data(saved, None), torch.device("cpu"), saved.run.evaluation.sequences)
    assert quality.loss == pytest.approx(metrics(Path("run"))[-1]["val_loss"], rel=1e-6)
    assert quality.bits_per_byte is not None and 0.5 < quality.bits_per_byte / quality.loss < 1.2  # a token is some 2 bytes
    # Of all windows some hold a boundary between documents: there it matters that a token sees its own only.
    across = saved.run.model_copy(update={"data": saved.run.data.model_copy(update={"attend_across_documents": True})})
    dataset = validation_data(saved, None)
    apart, together = (measure(model, dataset, torch.device("cpu"), 10**6) for model in (saved, replace(saved, run=across)))
    assert apart.tokens == together.tokens and abs(apart.loss - together.loss) > 1e-6
    export(saved, Path("out"), "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained("out").eval()
    ids = tokenizer("a string", return_tensors="pt").input_ids
    assert ids[0].tolist() == saved.tokenizer.encode("a string").tolist()
    text = tokenizer.decode(theirs.generate(ids, max_new_tokens=8, do_sample=False)[0])
    (continued,) = generate(saved.load(), ids.tolist(), 8, Sampling(temperature=0))
    assert text == saved.tokenizer.decode([*ids[0].tolist(), *continued]) and text.startswith("a string")


def test_what_was_never_prepared_is_not_verified(tmp_path: Path) -> None:
    ended = ran(tmp_path, *DS_GPT, "prepare", "out", "--verify")
    assert ended.status == 2 and "'out' is not a folder that ds-gpt prepare made" in ended.err


def test_bad_input_is_told_at_once(tmp_path: Path) -> None:
    ended = ran(tmp_path, *DS_GPT, "prepare", "out", "nothing*.txt", "--val-fraction", 2, "--processes", 0, "--bpe-vocab-size", 9)
    assert ended.status == 2 and not (tmp_path / "out").exists()
    for part in ("--val-fraction 2.0", "--processes 0", "--bpe-vocab-size 9"):
        assert part in ended.err
    ended = ran(tmp_path, *DS_GPT, "prepare", "out", "nothing*.txt")
    assert ended.status == 2 and "'nothing*.txt' is no file" in ended.err
    ended = ran(tmp_path, *DS_GPT, "prepare", "out")
    assert ended.status == 2 and "--verify" in ended.err
