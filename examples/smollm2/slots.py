"""Templates with slots: «one|other» chooses, $thing draws from a list, $thing2 another of it, #3-40 a number.

A slot keeps its word through the text, and $thing2 differs from $thing; every # draws again, in steps where it says so
(#100-900/50). texts/ holds the templates and the lists.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

TEXTS = Path(__file__).parent / "texts"
_CHOICE = re.compile(r"«([^«»]*)»")
_SLOT = re.compile(r"\$([a-z]+)(\d?)")
_NUMBER = re.compile(r"#(\d+)-(\d+)(?:/(\d+))?")

Lists = Mapping[str, Sequence[str]]


def templates(name: str, between: str = "\n") -> list[str]:
    """The templates of a file in texts/, one a line or with something else between them."""
    return (TEXTS / name).read_text(encoding="utf-8").rstrip("\n").split(between)


def lists(name: str) -> Lists:
    """The lists of a file in texts/: in each block a slot's name, then lines of words with | between."""
    blocks = (block.split("\n") for block in templates(name, "\n\n"))
    return {slot: "".join(lines).split("|") for slot, *lines in blocks}


def fill(text: str, rng: random.Random, words: Lists) -> str:
    """One text out of a template. KeyError names a slot without a list."""
    while found := _CHOICE.search(text):
        text = text[: found.start()] + rng.choice(found.group(1).split("|")) + text[found.end() :]
    drawn: dict[str, str] = {}

    def word(found: re.Match[str]) -> str:
        if found[0] not in drawn:
            taken = {value for slot, value in drawn.items() if slot.rstrip("0123456789") == f"${found[1]}"}
            drawn[found[0]] = rng.choice([value for value in words[found[1]] if value not in taken])
        return drawn[found[0]]

    def number(found: re.Match[str]) -> str:
        return str(rng.randrange(int(found[1]), int(found[2]) + 1, int(found[3] or 1)))

    text = _NUMBER.sub(number, _SLOT.sub(word, text)).strip()
    return text[:1].upper() + text[1:]
