"""Requests for short Python programs, each with its code and what it does."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .grammar import blocks, expand

LISTS = ("numbers", "values", "items", "scores", "prices", "ages", "sizes", "counts", "points")
WORDS = ("words", "names", "lines", "cities", "titles", "tags", "keys")
ASKS = ("«Write|Please write|Give me|Show me» a «Python |»function that {task}.",
        "How do I write a function that {task}?",
        "I need «some|a bit of» Python that {task}.", "Can you write a function that {task}?")


@dataclass(frozen=True)
class Snippet:
    """The task, the code with $words, a call of it, and what it does."""

    task: str
    code: str
    example: str
    why: str



def _read(lines: list[str]) -> Snippet:
    call = next(i for i, line in enumerate(lines) if line.startswith("> "))
    return Snippet(lines[0], "\n".join(lines[1:call]), lines[call].removeprefix("> "),
                   " ".join(lines[call + 1 :]))


SNIPPETS = [_read(lines) for lines in blocks("snippets.txt", "\n\n= ")]


def snippet(rng: random.Random) -> tuple[str, str]:
    """A request and the code that meets it."""
    one = rng.choice(SNIPPETS)
    a, b = rng.choice((("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")))
    words = {"list": rng.choice(LISTS), "words": rng.choice(WORDS), "x": rng.choice(("x", "value", "item", "n")),
             "w": rng.choice(("word", "name", "w", "s")), "a": a, "b": b}
    task = expand(one.task, rng, words)
    code = _fill(one.code, words)
    why = expand(one.why, rng, words)
    parts = [f"```python\n{code}\n```", why]
    if rng.random() < 0.3:
        parts.reverse()
    if rng.random() < 0.5:
        parts.append(expand("«For example|An example|Try»:", rng) + f"\n\n```python\n{one.example}\n```")
    if rng.random() < 0.3:
        parts.insert(0, expand("«Here is one way|Here it is|This does it»:", rng))
    return expand(rng.choice(ASKS), rng).replace("{task}", task), "\n\n".join(parts)


def _fill(code: str, words: dict[str, str]) -> str:
    for word in sorted(words, key=len, reverse=True):
        code = code.replace(f"${word}", words[word])
    return code
