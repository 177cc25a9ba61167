"""Two corpora that need no file: questions with answers in two styles, and pairs that prefer the short ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_NUMBERS = 1000


def _messages(number: int, short: bool) -> list[dict[str, str]]:
    even = "Yes" if number % 2 == 0 else "No"
    odd_or_even = "even" if number % 2 == 0 else "odd"
    answer = f"{even}." if short else f"{even}, it is {odd_or_even}."
    return [{"role": "user", "content": f"Is {number} even?"}, {"role": "assistant", "content": answer}]


def toy_chat() -> Iterator[dict[str, Any]]:
    """Whether numbers are even: half of the answers are one word, the others a sentence."""
    return ({"messages": _messages(number, short=number // 2 % 2 == 0)} for number in range(_NUMBERS))


def toy_pairs() -> Iterator[dict[str, Any]]:
    """The same questions; of two right answers the shorter one is preferred."""
    for number in range(_NUMBERS):
        (asked, chosen), (_, rejected) = _messages(number, short=True), _messages(number, short=False)
        yield {"prompt": [asked], "chosen": [chosen], "rejected": [rejected]}


TOYS = {"toy_chat": toy_chat, "toy_pairs": toy_pairs}
