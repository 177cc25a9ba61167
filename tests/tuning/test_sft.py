"""Supervised fine-tuning: what is learned of an example, and that packing changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from forked_ranks import run_ranks
from made_examples import ASKED, composed, conversations, settled, write

from ds_gpt.config import ConfigError
from ds_gpt.data import CharTokenizer
from ds_gpt.data.chat import Chat
from ds_gpt.data.loader import BatchLoader, window_batch
from ds_gpt.data.records import records
from ds_gpt.data.rows import IGNORED, best_fit
from ds_gpt.data.stages import prepare_stage
from ds_gpt.learning.loss import IGNORE_INDEX
from ds_gpt.learning.objectives import answers, objective_of
from ds_gpt.model.gpt import GPT

ALPHABET = CharTokenizer("\n :+0123456789" + "".join(chr(c) for c in range(65, 123)))


def test_only_answers_are_targets(tmp_path: Path) -> None:
    corpus = write(tmp_path / "chat.jsonl", conversations())
    run, dataset = settled(composed("sft", corpus, ["data.val_fraction=0.1"]).run)
    inputs, targets, documents, positions = dataset.train.arrays
    assert IGNORED == IGNORE_INDEX
    learned = set()
    for row in range(len(inputs)):
        for number in range(documents[row].max() + 1):
            mine = documents[row] == number
            text = dataset.tokenizer.decode(inputs[row][mine])
            question, answer = text.removeprefix("User: ").split("\n\nAssistant: ")
            counted = targets[row][mine][targets[row][mine] != IGNORED]
            assert dataset.tokenizer.decode(counted) == f"{eval(question)}\n\n\n", (
                "the end of the answer is learned too"
            )
            assert positions[row][mine].tolist() == list(range(len(text)))
            learned.add(question)
    assert len(learned) == 90 and learned < set(ASKED)
    assert dataset.train.counted.sum() == (targets != IGNORED).sum()
    assert dataset.framed("1+2") == "User: 1+2\n\nAssistant: "


def test_parquet_prompt_and_completion_give_the_same_as_jsonl(tmp_path: Path) -> None:
    rows = [{"prompt": f"{asked}=", "completion": str(eval(asked))} for asked in ASKED]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = [
        prepare_stage(composed("sft", path).run) for path in (tmp_path / "a.parquet", write(tmp_path / "a.jsonl", rows))
    ]
    assert found[0].digest == found[1].digest
    chats = conversations()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), tmp_path / "b.parquet")
    found = [
        prepare_stage(composed("sft", path).run)
        for path in (tmp_path / "b.parquet", write(tmp_path / "b.jsonl", chats))
    ]
    assert found[0].digest == found[1].digest


def test_what_is_too_long_or_has_no_answer_is_counted(tmp_path: Path) -> None:
    long_answer, long_prompt = {"prompt": "1", "completion": "2" * 60}, {"prompt": "1" * 60, "completion": "2"}
    corpus = write(
        tmp_path / "a.jsonl",
        [*({"prompt": "1", "completion": "23"} for _ in range(6)), long_answer, long_answer, long_prompt],
    )
    notes = prepare_stage(composed("sft", corpus).run).notes
    assert notes[0].startswith("8 examples in ")
    assert notes[1].endswith("% of the tokens are answers")
    assert notes[2:] == ("2 longer than 49 tokens, cut there", "1 without an answer that could be learned, left out")
    assert prepare_stage(composed("sft", corpus, ["examples.too_long=drop"]).run).notes[2:] == (
        "3 longer than 49 tokens, left out",
    )


def test_best_fit_fills_rows() -> None:
    generator = np.random.default_rng(3)
    lengths = generator.integers(1, 65, 500).tolist()
    rows = best_fit(lengths, 64)
    assert sorted(index for row in rows for index in row) == list(range(500))
    assert max(sum(lengths[index] for index in row) for row in rows) <= 64
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // 64) + 1
    assert best_fit([3, 3, 2, 2, 2], 6) in ([[0, 1], [2, 3, 4]],)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_packed_equals_unpacked(tmp_path: Path, positions: str) -> None:
    corpus = write(tmp_path / "chat.jsonl", conversations())
    results = []
    for packing in ("true", "false"):
        run, dataset = settled(
            composed(
                "sft", corpus, [f"examples.packing={packing}", f"model.positions={positions}", "model.context=96"]
            ).run
        )
        torch.manual_seed(2)
        model = GPT(run.model)
        rows = np.arange(len(dataset.train.counted))
        found = objective_of(run)(model, True, *window_batch(dataset.train, rows, run.model.context, IGNORE_INDEX))
        (found.loss_sum / found.counted).backward()
        results.append(
            (
                len(rows),
                found.loss_sum,
                found.counted,
                {name: parameter.grad for name, parameter in model.named_parameters()},
            )
        )
    (packed, loss, counted, gradients), (alone, other_loss, other_counted, others) = results
    assert packed < alone / 1.8 and counted == other_counted
    torch.testing.assert_close(loss, other_loss, rtol=1e-5, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], rtol=1e-4, atol=1e-6)


def test_tokens_outside_of_the_answer_have_no_gradient(tmp_path: Path) -> None:
    run, dataset = settled(composed("sft", write(tmp_path / "chat.jsonl", conversations())).run)
    inputs, targets, documents, positions = window_batch(dataset.train, np.arange(3), run.model.context, IGNORE_INDEX)
    logits = torch.randn(*inputs.shape, run.model.vocabulary, requires_grad=True)
    weight = torch.eye(run.model.vocabulary)  # hidden states as wide as the vocabulary: they are the logits
    found = answers(
        run, lambda *args, loss, **kwargs: loss(logits, weight), True, inputs, targets, documents, positions
    )
    found.loss_sum.backward()
    assert torch.equal(logits.grad.abs().sum(-1) > 0, targets != IGNORE_INDEX)
    counted = targets != IGNORE_INDEX
    torch.testing.assert_close(found.loss_sum, F.cross_entropy(logits[counted], targets[counted], reduction="sum"))


def step_losses(ranks: Any, cases: list[tuple[Any, int]]) -> list[list[tuple[float, float]]]:
    from ds_gpt.engine.engine import Engine

    curves = []
    for case in cases:
        run, dataset = settled(case.run)
        engine = Engine(replace(case, run=run), ranks)
        sampler = dataset.train.sampler(run.model.context, run.batch.global_batch_size, run.seed)
        loader = BatchLoader(dataset.train, sampler, engine.grid.data_rank, engine.grid.data_ranks, case.micro_batch_size, "cpu")
        results = [engine.step(step, loader.load(step), 0.01) for step in range(4)]
        curves.append([(result.loss, result.grad_norm) for result in results])
        loader.close()
        engine.close()
    return curves


def test_every_answer_token_weighs_alike_over_ranks_and_micro_steps(tmp_path: Path) -> None:
    """Rows have answers of very different lengths; plain PyTorch takes the mean over all answer tokens of a step at once."""
    rows = [{"prompt": "1+", "completion": "2" * (1 + 40 * (index % 7 == 0))} for index in range(64)]
    corpus = write(tmp_path / "a.jsonl", rows)
    settings = ["examples.packing=false", "optimizer.name=sgd", "gradient_clipping=0", "model.layers=1"]
    ways = ("gradient_accumulation_steps=1", "gradient_accumulation_steps=4", "parallel.sequence=2", "parallel.tensor=2")
    cases = [composed("sft", corpus, [*settings, way], world_size=2) for way in ways]
    found = run_ranks(2, step_losses, cases)
    run, dataset = settled(cases[0].run)
    torch.manual_seed(run.seed)
    model = GPT(run.model)
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2]},
        ],
        lr=0.01,
    )
    sampler = dataset.train.sampler(run.model.context, run.batch.global_batch_size, run.seed)
    for step in range(4):
        inputs, targets, _, positions = window_batch(
            dataset.train, sampler.windows(step), run.model.context, IGNORE_INDEX
        )
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
        optimizer.step()
        for curve in found[0]:
            assert curve[step] == pytest.approx((loss.item(), norm.item()), rel=1e-5)


TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def test_a_template_decides_the_text_as_in_transformers(tmp_path: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [
        {"role": role, "content": text}
        for role, text in (("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    ]
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    chat = Chat.of(ALPHABET, str(tmp_path / "t.jinja"))
    assert chat.pieces(messages) == [
        ("<system>s<end><user>a<end><assistant>", False),
        ("b<end>", True),
        ("<user>c<end><assistant>", False),
        ("d<end>", True),
    ]
    for template in (TEMPLATE, Chat(ALPHABET).template):
        (expected,), _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True)
        assert Chat(ALPHABET, template).render(messages, answer_next=True) == expected
    assert (Chat(ALPHABET).ending, chat.ending) == ("\n\n", "<end>")


@pytest.mark.parametrize(
    ("record", "template", "wrong"),
    [
        ({"text": "1"}, None, "has 'text', not 'messages', or 'prompt' and 'completion'"),
        ({"messages": [{"role": "user"}]}, None, "a message has no 'role' and 'content'"),
        ({"prompt": "1", "completion": [1]}, None, "neither two strings nor two lists of messages"),
        (conversations()[0], "{{ messages | length }}", "changes what it wrote of earlier messages"),
        (conversations()[0], "{% if %}", "is no template that can be read"),
        (conversations()[0], "{{ raise_exception('no') }}", "the template fails: no"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(
    tmp_path: Path, record: dict[str, Any], template: str | None, wrong: str
) -> None:
    corpus, settings = write(tmp_path / "a.jsonl", [record]), []
    if template is not None:
        (tmp_path / "t.jinja").write_text(template)
        settings = [f"examples.template={tmp_path / 't.jinja'}"]
    with pytest.raises(ConfigError, match=wrong):
        prepare_stage(composed("sft", corpus, settings).run)


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [record for _, record in records(str(tmp_path / "a.jsonl"))] == [{"prompt": "a"}, {"prompt": "b"}]


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "1"}) + "\n{")
    (tmp_path / "a.parquet").write_text("no")
    for name, wrong in (("a.jsonl", "is not JSONL"), ("a.parquet", "is not a Parquet file"), ("b.jsonl", "is no file")):
        with pytest.raises(ConfigError, match=wrong):
            prepare_stage(composed("sft", tmp_path / name).run)
