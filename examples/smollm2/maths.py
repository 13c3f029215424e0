"""Maths: word problems of one to three steps, sums and algebra without a story, words to explain."""

from __future__ import annotations

import random

from .slots import fill, lists, templates

WORDS = lists("maths.lists.txt")
STORIES, SUMS, IDEAS = (templates(name) for name in ("stories.txt", "sums.txt", "ideas.txt"))


def maths(rng: random.Random) -> str:
    """One question."""
    if (draw := rng.random()) < 0.55:
        return fill(rng.choice(STORIES) + " $ask", rng, WORDS)
    return fill(rng.choice(SUMS if draw < 0.87 else IDEAS), rng, WORDS)
