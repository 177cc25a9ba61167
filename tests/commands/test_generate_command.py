"""``ds-gpt generate`` as it is typed."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from saved_run import save_run

from ds_gpt.commands.arguments import torch_device
from ds_gpt.commands.generate import generate, parser, place
from ds_gpt.config import ConfigError
from ds_gpt.config.run import ModelConfig
from ds_gpt.data import CharTokenizer
from ds_gpt.data.byte_pairs import BpeTokenizer
from ds_gpt.data.tokenizer_json import end_name
from ds_gpt.generation.decoding import generate as decode
from ds_gpt.generation.options import Sampling
from ds_gpt.generation.prompts import read_prompts
from ds_gpt.model.gpt import GPT

REPOSITORY = Path(__file__).resolve().parents[2]
TOKENIZER = CharTokenizer("".join(sorted("abcdefghijklmnopqrstuvwxyz ,.\n€")))
CONTEXT = 24


def random_model(vocab_size: int) -> GPT:
    torch.manual_seed(0)
    model = GPT(ModelConfig(layers=1, width=32, heads=2, context=CONTEXT, vocab_size=vocab_size)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("runs") / "made", random_model(TOKENIZER.vocab_size + 9), TOKENIZER)


def command(*arguments: object) -> tuple[str, ...]:
    return (sys.executable, "-m", "ds_gpt", "generate", *map(str, arguments))


def texts(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, str]:
    """What goes to stdout and to stderr."""
    generate(parser().parse_args([str(argument) for argument in arguments]))
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_a_prompt_is_continued_as_decoding_it_says(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = texts(
        capsys, run, "--prompt", "the cat", "--seed", 4, "--max-new-tokens", 50, "--temperature", 0.9, "--top-k", 20
    )
    prompt = TOKENIZER.encode("the cat").tolist()
    model = random_model(TOKENIZER.vocab_size + 9)
    (expected,) = decode(model, [prompt], 50, Sampling(0.9, top_k=20), seed=4, vocab_size=TOKENIZER.vocab_size)
    assert out == "the cat" + TOKENIZER.decode(expected) + "\n"
    assert f"a text went past the context of {CONTEXT} tokens: the model sees the last 19 to 24" in err
    assert "50 tokens in " in err and "tokens/s, seed 4" in err


def test_a_checkpoint_folder_will_do_and_streaming_changes_nothing(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--prompt", "the cat", "--seed", 4, "--max-new-tokens", 10)
    whole, err = texts(capsys, run, *arguments)
    assert "context" not in err
    assert texts(capsys, run / "checkpoints" / "step_0000001", *arguments, "--stream")[0] == whole


def test_greedy_needs_no_seed_and_seeds_make_the_difference(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def out(*arguments: object) -> str:
        return texts(capsys, run, "--prompt", "a", *arguments)[0]

    assert out("--temperature", 0) == out("--temperature", 0)
    assert out("--seed", 1) == out("--seed", 1) != out("--seed", 2)
    assert out() != out()


def test_samples_are_numbered_and_do_not_depend_on_the_batch(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (run, "--prompt", "a", "--num-samples", 3, "--seed", 1, "--max-new-tokens", 5)
    out, _ = texts(capsys, *arguments)
    assert [line for line in out.splitlines() if line.startswith("---")] == ["--- 1 of 3", "--- 2 of 3", "--- 3 of 3"]
    assert texts(capsys, *arguments, "--batch-size", 2)[0] == out
    assert len({line for line in out.splitlines() if line.startswith("a")}) == 3


def test_a_file_of_prompts_is_answered_in_json_lines(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "the cat", "id": 7}\n\n"a"\n{"prompt": "\\n", "completion": "old"}\n'
    )
    arguments = ("--seed", 3, "--max-new-tokens", 30, "--num-samples", 2, "--batch-size", 4)
    out, err = texts(capsys, run, "--batch-file", tmp_path / "prompts.jsonl", *arguments)
    answers = [json.loads(line) for line in out.splitlines()]
    assert [(answer["prompt"], answer["sample"], answer.get("id")) for answer in answers] == [
        ("the cat", 0, 7), ("the cat", 1, 7), ("a", 0, None), ("a", 1, None), ("\n", 0, None), ("\n", 1, None)]  # fmt: skip
    assert all(
        answer["tokens"] == 30 and answer["finish"] == "length" and answer["completion"] != "old" for answer in answers
    )
    assert "180 tokens in" in err and "6 texts went past the context" in err
    (tmp_path / "prompts.txt").write_text("the cat\n\na\n")
    lines = texts(capsys, run, "--batch-file", tmp_path / "prompts.txt", *arguments)[0].splitlines()
    assert [json.loads(line)["completion"] for line in lines] == [answer["completion"] for answer in answers[:4]]


def test_only_a_line_feed_ends_a_line_of_json(tmp_path: Path) -> None:
    """JSON may hold other line ends of Unicode as they are; a byte order mark, which some editors write, is no text."""
    prompts = ["a\u2028b", "c\u0085d"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n" for text in prompts]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "".join(lines))
    tokenizer = CharTokenizer.from_text("".join(prompts))
    assert [prompt.text for prompt in read_prompts(tmp_path / "a.jsonl", tokenizer)] == prompts


def test_stop_strings(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("the cat\na\nq\n")
    arguments = (run, "--batch-file", tmp_path / "prompts.txt", "--seed", 3, "--max-new-tokens", 40)
    whole = [json.loads(line)["completion"] for line in texts(capsys, *arguments)[0].splitlines()]
    stop = whole[0][20:22]  # two tokens
    for line, full in zip(
        texts(capsys, *arguments, "--stop", stop, "--stop", "never")[0].splitlines(), whole, strict=True
    ):
        answer, before, found = json.loads(line), *full.partition(stop)[:2]
        assert answer["completion"] == before
        assert answer["finish"] == ("stop" if found else "length")
        assert answer["tokens"] == (len(before) + 2 if found else 40)


def test_byte_pairs_end_at_the_separator_and_begin_at_it_without_a_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = BpeTokenizer.train(["the cat sat on the mat, the cat. " * 20], 290)
    run = save_run(tmp_path / "bpe", random_model(tokenizer.vocab_size), tokenizer)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": ""}\n' * 40)
    arguments = ("--batch-file", tmp_path / "prompts.jsonl", "--seed", 3, "--max-new-tokens", 60, "--temperature", 3)
    answers = [json.loads(line) for line in texts(capsys, run, *arguments)[0].splitlines()]
    model, sampling = random_model(tokenizer.vocab_size), Sampling(3.0)
    continued = decode(model, [[tokenizer.separator]] * 40, 60, sampling, seed=3)
    for answer, tokens in zip(answers, continued, strict=True):
        ended = tokenizer.separator in tokens
        kept = tokens[: tokens.index(tokenizer.separator)] if ended else tokens
        assert answer["completion"] == tokenizer.decode(kept)
        assert (answer["finish"], answer["tokens"]) == (("end", len(kept) + 1) if ended else ("length", 60))
    assert {answer["finish"] for answer in answers} == {"end", "length"}


def test_a_text_ends_where_a_foreign_tokenizer_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Llama 2 begins texts with <s>, our separator then, and ends them with </s>: neither is text."""
    trained = BpeTokenizer.train(["the cat sat on the mat, the cat. " * 20], 290)
    fields, end = trained.to_dict(), trained.vocab_size
    begin = fields["model"]["vocab"].pop("<|endoftext|>")
    fields["model"]["vocab"]["<s>"] = begin
    named = {"<s>": begin, "</s>": end}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    fields["added_tokens"] = [{"id": i, "content": name, **flags} for name, i in named.items()]
    tokenizer = BpeTokenizer.from_dict(fields)
    assert (tokenizer.separator, tokenizer.ends, end_name(tokenizer)) == (begin, (begin, end), "</s>")
    run = save_run(tmp_path / "foreign", random_model(tokenizer.vocab_size), tokenizer)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": ""}\n' * 40)
    arguments = ("--batch-file", tmp_path / "prompts.jsonl", "--seed", 3, "--max-new-tokens", 60, "--temperature", 3)
    answers = [json.loads(line) for line in texts(capsys, run, *arguments)[0].splitlines()]
    continued = decode(random_model(tokenizer.vocab_size), [[begin]] * 40, 60, Sampling(3.0), seed=3)
    ended_by = set()
    for answer, tokens in zip(answers, continued, strict=True):
        places = [place for place, token in enumerate(tokens) if token in named.values()]
        assert answer["finish"] == ("end" if places else "length")
        assert answer["tokens"] == (places[0] + 1 if places else 60) and "s>" not in answer["completion"]
        ended_by |= {tokens[place] for place in places[:1]}
    assert ended_by == {begin, end}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--prompt", "a", "--temperature", "-1", "--max-new-tokens", "0", "--top-p", "2"],
            r"1\. --max-new-tokens 0[\s\S]*2\. temperature -1[\s\S]*3\. top-p 2",
        ),
        (["--prompt", "a", "--seed", "-1"], "--seed -1 is negative"),
        (["--prompt", "a", "--stop", ""], "--stop ''"),
        (["--prompt", "a", "--stream", "--num-samples", "2"], "--stream shows one text"),
        (["--interactive", "--num-samples", "2"], "--interactive gives one answer"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "aé"], r"'é' \(U\+00E9\)"),
        (["--batch-file", "nowhere.txt"], "'nowhere.txt' cannot be read"),
        ([], "--prompt --batch-file --interactive is required"),
        (["--prompt", "a", "--interactive"], "not allowed with"),
        (["--prompt", "a", "--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_bad_input_is_told(run: Path, arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        generate(parser().parse_args([str(run), *arguments]))


def test_bad_lines_of_a_file_are_told_together(run: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"promp": "a"}\nthe\n{"prompt": ""}\n"é"\n')
    with pytest.raises(ConfigError) as caught:
        generate(parser().parse_args([str(run), "--batch-file", str(tmp_path / "prompts.jsonl")]))
    assert [problem.what.split(": ")[0] for problem in caught.value.problems] == [
        f"prompts.jsonl:{line}" for line in (2, 3, 4, 5)
    ]
    (tmp_path / "prompts.txt").write_text("é\n" * 30)
    with pytest.raises(ConfigError, match=r"11\. prompts.txt has 20 more lines"):
        generate(parser().parse_args([str(run), "--batch-file", str(tmp_path / "prompts.txt")]))
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        generate(parser().parse_args([str(run), "--batch-file", str(tmp_path / "empty.txt")]))


def test_precision_is_fp32_on_a_cpu_unless_bf16_is_asked_for() -> None:
    def chosen(*arguments: str) -> torch.dtype:
        return place(parser().parse_args(["run", "--prompt", "a", "--device", "cpu", *arguments]), "bf16")[1]

    assert chosen() == chosen("--precision", "fp32") == torch.float32
    assert chosen("--precision", "bf16") == torch.bfloat16


def test_a_gpu_that_is_not_there_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch_device("auto") == torch_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="PyTorch finds no GPU"):
        torch_device("cuda")


def test_the_command_itself(run: Path) -> None:
    """Its status, its two streams, and a reader that has seen enough."""
    result = subprocess.run(
        command(run, "--prompt", "the cat", "--max-new-tokens", 5),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0 and result.stdout.startswith("the cat") and "tokens/s" in result.stderr
    result = subprocess.run(
        command(run.parent / "mode", "--prompt", "a"), cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert (
        result.returncode == 2
        and result.stdout == ""
        and "does not exist" in result.stderr
        and "Traceback" not in result.stderr
    )


class Terminal:
    """A command at a terminal."""

    def __init__(self, *arguments: object) -> None:
        self.terminal, inside = pty.openpty()
        self.process = subprocess.Popen(
            command(*arguments),
            cwd=REPOSITORY,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(inside)
        self.seen = ""

    def until(self, text: str, deadline_s: float = 90) -> str:
        """What is shown up to and with `text`."""
        end = time.monotonic() + deadline_s
        while text not in self.seen:
            ready, _, _ = select.select([self.terminal], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"'{text}' never came: {self.seen!r}"
            self.seen += os.read(self.terminal, 4096).decode(errors="replace").replace("\r", "")
        shown, _, self.seen = self.seen.partition(text)
        return shown + text

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())


@contextmanager
def terminal(*arguments: object) -> Iterator[Terminal]:
    session = Terminal(*arguments)
    try:
        yield session
    finally:
        session.process.kill()
        session.process.wait()
        os.close(session.terminal)


def test_a_conversation_at_a_terminal(run: Path) -> None:
    with terminal(run, "--interactive", "--max-new-tokens", 1_000_000, "--stop", "\n") as session:
        session.until("Ctrl-D leaves\n> ")
        session.type("the é\n")
        assert "U+00E9" in session.until("\n> "), (
            "a prompt that cannot be continued is told, and the next one asked for"
        )
        session.type("\n")
        session.until("\n> ")
        session.type("half a prom")
        session.until("half a prom")
        session.process.send_signal(signal.SIGINT)
        session.until("> ")
        session.type("\x04")
        session.process.wait(timeout=30)
        assert session.process.returncode == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(run: Path) -> None:
    with terminal(run, "--interactive", "--max-new-tokens", 1_000_000, "--temperature", 0) as session:
        session.until("Ctrl-D leaves\n> ")
        for prompt in ("the cat", "a dog"):
            session.type(f"{prompt}\n")
            session.until(f"{prompt}\n{prompt}")  # what was typed, then the text
            select.select([session.terminal], [], [], 30)  # more of it
            session.process.send_signal(signal.SIGINT)
            session.until("\n> ")
        session.type("\x04")
        session.process.wait(timeout=30)
        assert session.process.returncode == 0
