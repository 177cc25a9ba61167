"""Prompts as token ids, one or a file of them, with every problem at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_gpt.config import ConfigError, Problem
from ds_gpt.data import Tokenizer

_TOLD = 10  # bad lines of a file that an error names one by one


@dataclass(frozen=True)
class Prompt:
    """What is to be continued.

    Attributes:
        text: as it was given.
        tokens: its ids, one or more.
        fields: what else a line of JSON held, to be repeated beside the answer.
    """

    text: str
    tokens: list[int]
    fields: dict[str, Any]


def encode_prompt(text: str, tokenizer: Tokenizer, fields: dict[str, Any] | None = None) -> Prompt:
    """The prompt; an empty one is the beginning of a document, where the vocabulary has a token between documents.

    Raises:
        ConfigError: there is nothing in the prompt, or something that the tokenizer does not know.
    """
    tokens = tokenizer.encode(text).tolist()
    if not tokens:
        tokens = [end for end in tokenizer.ends if end == tokenizer.separator]
    if not tokens:
        raise ConfigError(
            Problem(
                "the prompt is empty",
                "a model continues text, and there is none",
                "give at least one character; a line feed will do",
            )
        )
    return Prompt(text, tokens, fields or {})


def read_prompts(path: str | Path, tokenizer: Tokenizer) -> list[Prompt]:
    """A file of prompts: a ``.jsonl`` holds an object with ``prompt`` (or a string) a line, any other a prompt a line.

    Raises:
        ConfigError: the file cannot be read, or lines of it cannot be used; these are named together.
    """
    path = Path(path)
    try:
        # Not splitlines: JSON may hold other line ends as they are, U+2028 for one.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            Problem(
                f"--batch-file '{path}' cannot be read: {error}",
                fix="give a text file in UTF-8 with a prompt a line, or a .jsonl",
            )
        ) from None
    found: list[Prompt] = []
    problems: list[Problem] = []
    for number, line in _filled(lines):
        try:
            text, fields = _parsed(line) if path.suffix == ".jsonl" else (line, {})
            found.append(encode_prompt(text, tokenizer, fields))
        except ConfigError as error:
            problems += [
                Problem(f"{path.name}:{number}: {problem.what}", problem.why, problem.fix) for problem in error.problems
            ]
    if len(problems) > _TOLD:
        problems[_TOLD:] = [Problem(f"{path.name} has {len(problems) - _TOLD} more lines that cannot be used")]
    if not found and not problems:
        problems = [Problem(f"--batch-file '{path}' holds no prompt", fix="write one a line")]
    if problems:
        raise ConfigError(problems)
    return found


def _filled(lines: list[str]) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _parsed(line: str) -> tuple[str, dict[str, Any]]:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise ConfigError(Problem(f"not JSON: {error}", fix='write {"prompt": "..."}')) from None
    fields = {"prompt": content} if isinstance(content, str) else content
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
        raise ConfigError(Problem("no object with a text under 'prompt'", fix='write {"prompt": "..."}'))
    return fields["prompt"], {key: value for key, value in fields.items() if key != "prompt"}
