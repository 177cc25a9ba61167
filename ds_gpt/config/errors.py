"""Errors that a person has to see to, carrying every problem at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: what (with key names and values), why it matters, and what to do."""

    what: str
    why: str = ""
    fix: str = ""


class NeedsAttention(Exception):
    """What a person has to see to and no restart mends. Holds every problem found, so that nobody fixes them one run at a time."""

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__(self.render())

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        """Pickle by the problems, not by the text: worker processes raise it too."""
        return ConfigError, (self.problems,)

    def render(self) -> str:
        """The problems as text, numbered where there is more than one."""
        blocks = []
        for number, problem in enumerate(self.problems, 1):
            head = f"{number}. " if len(self.problems) > 1 else ""
            indent = " " * len(head)
            lines = [head + problem.what]
            if problem.why:
                lines.append(f"{indent}why: {problem.why}")
            if problem.fix:
                lines.append(f"{indent}do:  {problem.fix}")
            blocks.append("\n".join(lines))
        return "\n".join(blocks)


class ConfigError(NeedsAttention):
    """Bad input."""


class RunStopped(NeedsAttention):
    """A run that is ended rather than spoiled: it is sick, it cannot be saved, or what was restored is not what was saved."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A remedy for an unknown name: the nearest known one, or the list where nothing is near."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    if near:
        return f"did you mean '{near[0]}'?"
    return "known: " + ", ".join(names)
