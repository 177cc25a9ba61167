"""``ds-gpt eval``: its numbers are those of training and of their definitions."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked_ranks import run_ranks

from ds_gpt.checkpoint.saved_model import SavedModel, find_saved_model
from ds_gpt.config import ConfigError
from ds_gpt.trainer.harness import run_tasks
from ds_gpt.trainer.quality import measure, validation_data

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
from launches import in_folder, launch  # noqa: E402

TEXT = "The quick brown fox jumps over the lazy dög.\n" * 100  # a character of two bytes


def train() -> str:
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    return launch("--run-dir", "run", "training.steps=20", "model.dropout=0.0", "data.cache_dir=cache").error


def trained(ranks: Any, folder: Path) -> str:
    return in_folder(ranks, folder, train)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eval") / "work"
    assert run_ranks(1, trained, path) == [""]
    return path


@pytest.fixture
def saved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> SavedModel:
    monkeypatch.chdir(folder)
    return find_saved_model("run")


def test_the_loss_is_that_of_training(saved: SavedModel) -> None:
    last = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    quality = measure(saved, validation_data(saved, None), torch.device("cpu"), saved.run.evaluation.sequences)
    assert quality.loss == pytest.approx(last["val_loss"], rel=1e-6) and quality.perplexity == pytest.approx(
        math.exp(last["val_loss"]), rel=1e-5
    )


def test_every_number_by_its_definition(saved: SavedModel) -> None:
    """The whole validation split, window by window."""
    quality = measure(saved, validation_data(saved, None), torch.device("cpu"), 10**6)
    validation = TEXT[int(len(TEXT) * 0.9) :]
    ids, context = torch.from_numpy(saved.tokenizer.encode(validation).astype(int)), saved.run.model.context
    model, losses, confidences, hits, size = saved.load(), [], [], [], 0
    count = (len(ids) - 1) // context
    for start in [i * (len(ids) - 1 - context) // (count - 1) for i in range(count)]:
        window = ids[start : start + context + 1]
        logits = model(window[None, :-1])[0]
        losses += F.cross_entropy(logits, window[1:], reduction="none").tolist()
        confidences += logits.softmax(-1).max(-1).values.tolist()
        hits += (logits.argmax(-1) == window[1:]).tolist()
        size += len(validation[start + 1 : start + context + 1].encode("utf-8"))
    assert quality.tokens == len(losses) and size > len(losses)
    assert quality.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert quality.bits_per_byte == pytest.approx(sum(losses) / math.log(2) / size, rel=1e-6)
    assert quality.accuracy == pytest.approx(sum(hits) / len(hits)) and quality.confidence == pytest.approx(
        sum(confidences) / len(confidences), rel=1e-5
    )
    assert 0 < quality.calibration_error < 1


def test_another_corpus_is_read_by_the_models_tokenizer(saved: SavedModel) -> None:
    Path("other.txt").write_text("jumps over the lazy fox. " * 40)
    other = measure(saved, validation_data(saved, "other.txt"), torch.device("cpu"), 8)
    assert other.loss != measure(saved, validation_data(saved, None), torch.device("cpu"), 8).loss
    apart = saved.run.data.model_copy(update={"attend_across_documents": False})  # a text has no documents
    trained_apart = replace(saved, run=saved.run.model_copy(update={"data": apart}))
    assert measure(trained_apart, validation_data(trained_apart, "other.txt"), torch.device("cpu"), 8) == other
    Path("digits.txt").write_text("0123" * 100)
    with pytest.raises(ConfigError, match="does not know: '0'"):
        validation_data(saved, "digits.txt")
    Path("text.txt").write_text(TEXT + "7", encoding="utf-8")  # the run's own corpus, changed
    try:
        with pytest.raises(ConfigError, match="another tokenizer than the model"):
            validation_data(saved, None)
    finally:
        Path("text.txt").write_text(TEXT, encoding="utf-8")


def test_the_commands(saved: SavedModel, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(verb: str, *words: str) -> str:
        import_module(f"ds_gpt.commands.{verb}").main(words)
        return capsys.readouterr().out

    numbers = json.loads(printed("eval", "run", "--json", "--sequences", "4"))
    assert (
        numbers["tokens"] == 64
        and numbers["validation_loss"] > 0
        and 0 <= numbers["calibration_error"] <= 1
        and numbers["tasks"] == {}
    )
    assert "bits per byte" in printed("eval", "run", "--device", "cpu")
    where = printed("export", "run", "--dtype", "bf16").strip().rpartition(": ")[2]
    assert where == "run/exports/step_0000020-hf-bf16" and (Path(where) / "model.safetensors").is_file()
    assert "--resume again" in printed("import_", where, "--run-dir", "again")
    assert find_saved_model("again").tokenizer.identity == saved.tokenizer.identity


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "run", "--max-shard-size", "5"], "--max-shard-size '5'"),
        (["eval", "run", "--limit", "0"], "--limit 0"),
        (["eval", "run", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["import", "run"], "no config.json"),
    ],
)
def test_bad_input_ends_with_status_2(words: list[str], message: str, saved: SavedModel) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-m", "ds_gpt", *words], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 2 and message in result.stderr


def test_without_the_harness_it_says_what_to_install(saved: SavedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"pip install 'ds_gpt\[eval\]'"):
        run_tasks(saved, ["hellaswag"], torch.device("cpu"), None, None)


def test_the_harness_measures_a_task(saved: SavedModel, tmp_path: Path) -> None:
    """A task of our own: which of two endings is likelier. The text that the model was trained on, against letters in disorder."""
    pytest.importorskip("lm_eval")
    documents = [
        {"text": "The quick brown", "good": " fox jumps", "bad": " xof spmuj"},
        {"text": "over the", "good": " lazy d", "bad": " yzal d"},
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    (tmp_path / "endings.yaml").write_text(
        f"task: endings\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/data.jsonl}}}}\ntest_split: test\noutput_type: multiple_choice\n"
        'doc_to_text: "{{text}}"\ndoc_to_choice: "{{[good, bad]}}"\ndoc_to_target: 0\ntarget_delimiter: ""\nmetric_list: [{metric: acc}]\n'
    )
    results = run_tasks(saved, ["endings"], torch.device("cpu"), None, tmp_path)
    assert results["endings"]["acc,none"] == 1.0
    with pytest.raises(ConfigError, match="does not know 'nonsense'"):
        run_tasks(saved, ["nonsense"], torch.device("cpu"), None, tmp_path)
