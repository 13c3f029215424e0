"""A small text grammar: «one|other» chooses, nested if need be, and $word is filled in."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Mapping
from pathlib import Path

TEXTS = Path(__file__).parent / "texts"
_CHOICE = re.compile(r"«([^«»]*)»")


def expand(text: str, rng: random.Random, words: Mapping[str, object] | None = None) -> str:
    """Settle every choice, innermost first, then fill in the words. KeyError for a word that is missing."""
    while found := _CHOICE.search(text):
        text = text[: found.start()] + rng.choice(found.group(1).split("|")) + text[found.end() :]
    return string.Template(text).substitute(words) if words is not None else text


def blocks(name: str, separator: str = "\n\n") -> list[list[str]]:
    """The blocks of a file in texts/, each as its lines; the first block is a remark."""
    text = (TEXTS / name).read_text(encoding="utf-8")
    return [block.split("\n") for block in text.rstrip().split(separator)[1:]]


def paragraphs(name: str) -> list[str]:
    """The blocks of a file in texts/, each on one line."""
    return [" ".join(block) for block in blocks(name)]


def article(noun: str) -> str:
    """The noun with a or an."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def listing(words: list[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def sentence(text: str) -> str:
    """With a capital at its beginning."""
    return text[:1].upper() + text[1:]
