"""Conversations as text, and text as tokens of which it is known whether the model is to learn them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ds_gpt.config import ConfigError, Problem
from ds_gpt.data.rows import Example
from ds_gpt.data.tokenizer import Tokenizer

# Plain text, so that any vocabulary has it: a role and a colon, and a blank line after each message.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)

Message = dict[str, str]
Piece = tuple[str, bool]  # text, and whether it is an answer


@dataclass(frozen=True)
class Chat:
    """A chat template in Jinja, with the variables that the templates of ``transformers`` have.

    Attributes:
        tokenizer: of the model.
        template: `messages`, `add_generation_prompt`, `bos_token` (empty) and `eos_token` (empty) are known in it.
    """

    tokenizer: Tokenizer
    template: str = DEFAULT_TEMPLATE

    @classmethod
    def of(cls, tokenizer: Tokenizer, path: str | None) -> Chat:
        """With the template in a file. Raises ConfigError where there is none, or it is no template."""
        if path is None:
            return cls(tokenizer)
        import jinja2

        try:
            chat = cls(tokenizer, Path(path).expanduser().read_text(encoding="utf-8"))
            _ = chat._compiled
        except (OSError, UnicodeError, jinja2.TemplateError) as error:
            raise ConfigError(
                Problem(
                    f"examples.template = '{path}' is no template that can be read: {error}",
                    "it turns messages into text",
                    "correct it, or leave it out",
                )
            ) from error
        return chat

    @cached_property
    def _compiled(self) -> Any:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)  # as transformers has it
        environment.globals["raise_exception"] = _refuse
        return environment.from_string(self.template)

    def render(self, messages: Sequence[Message], answer_next: bool = False) -> str:
        """The messages as text; with `answer_next`, up to where the assistant's next answer begins.

        Raises:
            ValueError: the template fails.
        """
        import jinja2

        try:
            return self._compiled.render(
                messages=messages, add_generation_prompt=answer_next, bos_token="", eos_token=""
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the template fails: {error}") from error

    def ask(self, prompt: str) -> str:
        """What a user says, as text up to where the answer begins. Raises ValueError where the template fails."""
        return self.render([{"role": "user", "content": prompt}], answer_next=True)

    @property
    def ending(self) -> str:
        """What the template writes after an answer. Raises ValueError where the template fails."""
        (_, _), (answer, _) = self.pieces([{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])
        return answer.partition("!")[2]

    def pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """A conversation, the assistant's messages marked as answers: what the template adds after one belongs to it.

        Raises:
            ValueError: it has other than messages, or the template does not write one message after the other.
        """
        for message in messages:
            if not isinstance(message, dict) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise ValueError("a message has no 'role' and 'content'")
        found: list[Piece] = []
        text = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            for upto, answer in (
                (self.render(messages[:number], True), False),
                (self.render(messages[: number + 1]), True),
            ):
                if not upto.startswith(text):
                    raise ValueError(
                        "the template changes what it wrote of earlier messages, so that answers cannot be found"
                    )
                found.append((upto[len(text) :], answer))
                text = upto
        return found

    def example(self, pieces: Sequence[Piece]) -> Example:
        """The pieces as tokens, each tokenized by itself; the last answer ends with its separator, if it has one.

        Raises:
            ConfigError: text that the tokenizer has no ids for.
        """
        parts = [(self.tokenizer.encode(text).astype(np.int64), answer) for text, answer in pieces if text]
        if parts and parts[-1][1] and self.tokenizer.separator is not None:
            parts.append((np.array([self.tokenizer.separator]), True))
        if not parts:
            return Example(np.empty(0, dtype=np.int64), np.empty(0, dtype=bool))
        return Example(
            np.concatenate([ids for ids, _ in parts]),
            np.concatenate([np.full(len(ids), answer) for ids, answer in parts]),
        )


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
