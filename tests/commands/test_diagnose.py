"""``ds-gpt diagnose`` on files of every kind, and on real runs with known faults."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from jobs import DS_GPT, PLAIN, TRAIN, Ended, ran

LINES = [
    {"step": step, "tokens": 64 * step, "loss": 3.0 * step**-0.2 + 0.01 * math.sin(step), "lr": 1e-3 * min(1, step / 20), "grad_norm": 1.0, "tokens_per_s": 1000.0}
    for step in range(1, 201)
]
LINES[99]["val_loss"], LINES[199]["val_loss"] = 2.0, 1.9
TEXT = "".join(json.dumps(line) + "\n" for line in LINES)


def written(folder: Path, text: str, name: str = "metrics.jsonl") -> Path:
    (folder / name).write_text(text)
    return folder / name


def diagnosed(folder: Path, *arguments: object) -> Ended:
    ended = ran(folder, *DS_GPT, "diagnose", *arguments)
    assert ended.status == 0 and ended.err == "", ended.out + ended.err
    return ended


def found(folder: Path, *arguments: object) -> list[str]:
    """The kinds of findings; those of throughput are left out, since on a shared machine they may well be true."""
    findings = json.loads(diagnosed(folder, *arguments, "--json").out)["findings"]
    return [finding["kind"] for finding in findings if finding["kind"] not in ("slower", "throughput_dips")]


def test_a_file_alone(tmp_path: Path) -> None:
    path = written(tmp_path, TEXT, "any.jsonl")
    ended = diagnosed(tmp_path, path)
    assert f"step 200, 12,800 tokens, loss {LINES[0]['loss']:.5g} -> {LINES[-1]['loss']:.5g}, " in ended.out and "best validation loss 1.9 at step 200" in ended.out
    assert "Nothing wrong was found." in ended.out and f"curves in {tmp_path / 'diagnosis.png'}" in ended.out
    assert (tmp_path / "diagnosis.png").read_bytes()[:4] == b"\x89PNG"
    diagnosed(tmp_path, path, "--plot", tmp_path / "other.svg")
    assert (tmp_path / "other.svg").exists()


def test_a_spike_is_told_with_evidence_and_remedy(tmp_path: Path) -> None:
    lines = [line | {"loss": 9.0} if 120 <= line["step"] < 130 else line for line in LINES]
    ended = diagnosed(tmp_path, written(tmp_path, "".join(json.dumps(line) + "\n" for line in lines)))
    assert "1. warning: 1 loss spike: step 120 (1.2" in ended.out and "-> 9, back at step 130)" in ended.out and "   do: " in ended.out
    assert "Nothing wrong was found" not in ended.out


def test_a_file_that_is_being_written_and_was_cut_off(tmp_path: Path) -> None:
    written(tmp_path, TEXT + '{"step": 201, "lo')
    assert "Nothing wrong was found." in diagnosed(tmp_path, tmp_path).out
    written(tmp_path, TEXT.replace('{"step": 50,', '{"step": 49, "lo{"step": 50,') + '\n{"step": 201, "loss": null}\n')
    ended = diagnosed(tmp_path, tmp_path)
    assert "1 lines of the metrics cannot be read" in ended.out and "NaN or infinity in the loss in 1 of 200 lines: step 201" in ended.out


def test_events_of_the_run_folder_are_read(tmp_path: Path) -> None:
    written(tmp_path, TEXT)
    written(tmp_path, '{"step": 90, "event": "rollback", "to_step": 50}\n{"step": 95, "ev', "events.jsonl")
    ended = diagnosed(tmp_path, tmp_path)
    assert "Nothing wrong was found. Worth a note:" in ended.out and "rolled back 1 time: from step 90 to 50" in ended.out


def test_events_tell_what_the_lines_missed(tmp_path: Path) -> None:
    written(tmp_path, TEXT)
    written(tmp_path, '{"step": 90, "event": "gradient_spike", "since": 88, "text": "gradient norm 22.5 at step 90"}\n', "events.jsonl")
    ended = diagnosed(tmp_path, tmp_path)
    assert "1. warning: health saw, at every step: gradient norm 22.5" in ended.out and "Nothing wrong was found" not in ended.out


def test_json_is_strict(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    written(tmp_path, '{"step": 1, "loss": null, "grad_norm": null, "lr": 1e-3}\n')
    content = json.loads(diagnosed(tmp_path, tmp_path, "--json").out, parse_constant=refuse)
    assert content["loss_end"] is None and content["last_step"] == 1
    assert [finding["kind"] for finding in content["findings"]] == ["non_finite"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["does not exist"]),
        ("", ["is empty"]),
        ("\n\n", ["is empty"]),
        ("hello\nworld\n", ["is no metrics file", "0 of its lines"]),
        ('{"step": 1}\n', ["is no metrics file"]),
        ('[1, 2]\n3\n"x"\n{"loss": 2.0}\n{"step": true, "loss": 1.0}\n', ["is no metrics file"]),
        ("\x00\x01\x02\n" * 9, ["is no metrics file"]),
        ('{"step": 1' + "0" * 25 + ', "loss": 2.0}\n', ["is no metrics file"]),
    ],
)
def test_what_is_no_metrics_is_refused(tmp_path: Path, content: str | None, words: list[str]) -> None:
    if content is not None:
        written(tmp_path, content, "given.jsonl")
    ended = ran(tmp_path, *DS_GPT, "diagnose", tmp_path / "given.jsonl")
    assert ended.status == 2 and "attention" in ended.err and "\ndo:  give" in ended.err and "Traceback" not in ended.err
    assert all(word in ended.err for word in [*words, "given.jsonl"]), ended.err
    assert not (tmp_path / "diagnosis.png").exists()


def test_a_folder_without_metrics_and_a_mistyped_one(tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert "holds no metrics.jsonl" in ran(tmp_path, *DS_GPT, "diagnose", "runs/mine").err
    written(tmp_path / "runs" / "mine", TEXT)
    ended = ran(tmp_path, *DS_GPT, "diagnose", "runs/min")
    assert ended.status == 2 and "'runs/min' does not exist" in ended.err and "give one of runs/mine" in ended.err


@pytest.mark.parametrize("name", ["none/x.png", "x.doc"])
def test_a_plot_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    ended = ran(tmp_path, *DS_GPT, "diagnose", written(tmp_path, TEXT), "--plot", name)
    assert ended.status == 2 and f"--plot '{name}' cannot be written" in ended.err and "Traceback" not in ended.err


def test_no_torch_is_imported(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        f"sys.argv[1:] = ['diagnose', {str(written(tmp_path, TEXT))!r}]\n"
        "from ds_gpt.__main__ import main\n"
        "main()\n"
        "print('heavy:', sorted({'torch', 'deepspeed'} & set(sys.modules)))\n"
    )
    ended = ran(tmp_path, sys.executable, "-c", program)
    assert ended.out.endswith("heavy: []\n"), ended.out + ended.err


def trained(folder: Path, tiny: list[str], *settings: str, steps: int = 300) -> Path:
    """A real run, every step logged."""
    every = ("logging.level=DEBUG", "logging.tensorboard=false", f"training.steps={steps}", "evaluation.every=30", "schedule.warmup_steps=20")
    words = [word for setting in (*every, "health.enabled=false", *settings) for word in ("--set", setting)]
    ended = ran(folder, *PLAIN, TRAIN, *tiny, *words, "--run-dir", folder / "run", deadline_s=120)
    assert ended.status == 0, ended.out + ended.err
    return folder / "run"


SYNTHETIC = ("data.corpus=synthetic", "data.synthetic.tokens=50000", "data.synthetic.vocab_size=32", "optimizer.lr=1e-2")


def test_a_real_run_that_is_well(tmp_path: Path, tiny: list[str]) -> None:
    assert found(tmp_path, trained(tmp_path, tiny, *SYNTHETIC)) == []


def test_a_real_run_that_learns_nothing(tmp_path: Path, tiny: list[str]) -> None:
    assert found(tmp_path, trained(tmp_path, tiny, *SYNTHETIC, "optimizer.lr=1e-8", "schedule.min_lr=0.0", steps=100)) == ["never_learned"]


def test_a_real_run_that_overfits(tmp_path: Path, tiny: list[str]) -> None:
    """A Markov source of which it sees too few tokens: it learns them by heart."""
    settings = ("data.synthetic.tokens=700", "model.width=64", "model.layers=2", "data.val_fraction=0.3", "optimizer.weight_decay=0.0")
    assert found(tmp_path, trained(tmp_path, tiny, *SYNTHETIC, *settings)) == ["overfitting"]


def test_a_real_run_that_blows_up(tmp_path: Path, tiny: list[str]) -> None:
    """Plain gradient descent without clipping, its learning rate rising until the very end."""
    settings = ("optimizer.name=sgd", "optimizer.lr=400.0", "schedule.warmup_steps=200", "gradient_clipping=1000000000.0")
    kinds = found(tmp_path, trained(tmp_path, tiny, *SYNTHETIC, *settings, steps=200))
    assert {"divergence", "never_warmed_up"} <= set(kinds), kinds
