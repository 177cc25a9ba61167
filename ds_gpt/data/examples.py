"""Examples for supervised fine-tuning, and pairs of answers, out of records. What is left out is counted and said."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ds_gpt.config import ConfigError, Problem
from ds_gpt.config.run import RunConfig
from ds_gpt.data.chat import Chat, Piece
from ds_gpt.data.records import Record, records
from ds_gpt.data.rows import Example, Rows, divided, packed, paired
from ds_gpt.data.tokenizer_choice import choose_tokenizer
from ds_gpt.data.tokens import Dataset

_VAL_FRACTION = 0.1


def prepare_examples(run: RunConfig) -> Dataset:
    """What the run's corpus of examples, or pairs, comes to. Every rank calls it, and comes to the same.

    Raises:
        ConfigError: the corpus cannot be read, no record of it is of use, or the tokenizer has no ids for its text.
    """
    found = [item for part in run.data.parts for item in records(part.corpus)]
    text = [str(value) for _, record in found for value in _strings(record)]
    tokenizer = choose_tokenizer(
        run.data.tokenizer, run.data.bpe_vocab_size, lambda: [*text, "UserAssistant: \n"], lambda: text
    )
    chat = Chat.of(tokenizer, run.examples.template)
    said: Counter[str] = Counter()
    fraction = _VAL_FRACTION if run.data.val_fraction == "auto" else run.data.val_fraction
    if run.stage == "sft":
        examples = [
            example
            for where, record in found
            if (example := _fitted(_example(chat, where, record), run, said)) is not None
        ]
        divide = divided(len(examples), fraction, run.seed, _what("examples", said))
        train, val = (
            packed([examples[index] for index in part], run.model.context, run.examples.packing) for part in divide
        )
        notes = (
            f"{len(examples):,} examples in {len(train.counted) + len(val.counted):,} sequences",
            f"{_share(train):.0%} of the tokens are answers",
            *_notes(said),
        )
    else:
        pairs = [pair for where, record in found if (pair := _pair(chat, where, record, run, said)) is not None]
        divide = divided(len(pairs), fraction, run.seed, _what("pairs", said))
        train, val = (paired([pairs[index] for index in part], whole=run.stage == "reward") for part in divide)
        notes = (f"{len(pairs):,} pairs", *_notes(said))
    return Dataset(train, val, tokenizer, _digest(tokenizer.identity, train, val), notes, _framed(chat, found))


def _example(chat: Chat, where: str, record: Record) -> Example:
    if "messages" in record:
        return chat.example(_explained(where, lambda: chat.pieces(record["messages"])))
    if "completion" in record and "prompt" in record:
        return chat.example(_explained(where, lambda: _answered(chat, record["prompt"], record["completion"])))
    raise _unknown(where, record, "'messages', or 'prompt' and 'completion'")


def _answered(chat: Chat, prompt: Any, answer: Any) -> list[Piece]:
    """Strings are joined as they are; lists of messages go through the template."""
    if isinstance(prompt, str) and isinstance(answer, str):
        return [(prompt, False), (answer, True)]
    if isinstance(prompt, list) and isinstance(answer, list):
        return chat.pieces([*prompt, *answer])
    raise ValueError("prompt and answer are neither two strings nor two lists of messages")


def _fitted(example: Example, run: RunConfig, said: Counter[str]) -> Example | None:
    """The example, cut to the context where it is longer; None where it is left out. The reason is counted."""
    longest = run.model.context + 1
    if len(example.ids) > longest:
        if run.examples.too_long == "drop":
            said[f"longer than {longest} tokens, left out"] += 1
            return None
        if example.answer[1:longest].any():
            said[f"longer than {longest} tokens, cut there"] += 1
        example = Example(example.ids[:longest], example.answer[:longest])
    if not example.answer[1:].any():
        said["without an answer that could be learned, left out"] += 1
        return None
    return example


def _pair(chat: Chat, where: str, record: Record, run: RunConfig, said: Counter[str]) -> tuple[Example, Example] | None:
    """Preferred and other answer to one prompt; None where they are left out. The reason is counted."""
    if not {"prompt", "chosen", "rejected"} <= record.keys():
        raise _unknown(where, record, "'prompt', 'chosen' and 'rejected'")
    prompt, answers = record["prompt"], [record["chosen"], record["rejected"]]
    if answers[0] == answers[1]:
        said["with identical answers, left out"] += 1
        return None
    if any(_is_empty(answer) for answer in answers):
        said["with an empty answer, left out"] += 1
        return None
    chosen, rejected = (
        chat.example(_explained(where, lambda answer=answer: _answered(chat, prompt, answer))) for answer in answers
    )
    longest = run.model.context + (run.stage != "reward")
    if max(len(chosen.ids), len(rejected.ids)) > longest:
        said[f"longer than {longest} tokens, left out"] += 1
        return None
    return chosen, rejected


def _is_empty(answer: Any) -> bool:
    texts = [answer] if isinstance(answer, str) else [message.get("content", "") for message in answer]
    return all(not text or text.isspace() for text in texts)


def _explained(where: str, make: Callable[[], list[Piece]]) -> list[Piece]:
    try:
        return make()
    except ValueError as error:
        raise ConfigError(
            Problem(f"{where}: {error}", "every record is trained on", "mend it, or leave it out")
        ) from error


def _unknown(where: str, record: Record, wanted: str) -> ConfigError:
    return ConfigError(
        Problem(
            f"{where} has {', '.join(map(repr, record))}, not {wanted}",
            "that is what this stage learns from",
            "rename its fields",
        )
    )


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def _framed(chat: Chat, found: list[tuple[str, Record]]) -> Callable[[str], str]:
    """How a prompt is put to the model: as the corpus puts it, in a conversation or as it is."""
    record = found[0][1] if found else {}
    if "messages" in record or isinstance(record.get("prompt"), list):
        return chat.ask
    return str


def _notes(said: Counter[str]) -> list[str]:
    return [f"{count:,} {reason}" for reason, count in said.items()]


def _what(what: str, said: Counter[str]) -> str:
    return what + "".join(f"; {note}" for note in _notes(said))


def _share(rows: Rows) -> float:
    inputs, targets, documents, _ = rows.arrays
    return float(rows.counted.sum() / max(1, (documents >= 0).sum()))


def _digest(identity: str, *splits: Rows) -> str:
    content = hashlib.sha256(identity.encode())
    for rows in splits:
        for array in rows.arrays:
            content.update(memoryview(np.ascontiguousarray(array)))
    return content.hexdigest()
