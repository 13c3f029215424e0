"""Code: small tasks, mostly in Python, snippets to read and to change, concepts to explain, some SQL, HTML, shell."""

from __future__ import annotations

import random

from .slots import fill, lists, templates

WORDS = lists("code.lists.txt")
TASKS, QUESTIONS, READINGS = (templates(name) for name in ("tasks.txt", "questions.txt", "readings.txt"))
SNIPPETS = templates("snippets.txt", "\n\n\n")


def code(rng: random.Random) -> str:
    """One request."""
    if (draw := rng.random()) < 0.45:
        return fill(rng.choice(TASKS), rng, WORDS)
    if draw < 0.65:
        return fill(f"{rng.choice(READINGS)}\n\n```python\n{rng.choice(SNIPPETS)}\n```", rng, WORDS)
    return fill(rng.choice(QUESTIONS), rng, WORDS)
