"""Chat: questions about the world, advice, small texts to write, lists, plans, rewriting."""

from __future__ import annotations

import random

from .slots import fill, lists, templates

WORDS = lists("chat.lists.txt")
MESSAGES = templates("messages.txt")


def chat(rng: random.Random) -> str:
    """One message."""
    return fill(rng.choice(MESSAGES), rng, WORDS)
