"""One text of the template-written corpus: a story as plain text, or a conversation of a few turns."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .answers import answer
from .snippets import snippet
from .stories import story
from .sums import sum_

END, USER, ASSISTANT = "<|endoftext|>", "<|user|>", "<|assistant|>"
MAKERS = (story, answer, sum_, snippet)
WEIGHTS = (0.35, 0.3, 0.2, 0.15)


@dataclass(frozen=True)
class Piece:
    """A text without its first END, and the words it opens with: the first request and the beginning of its answer."""

    opening: str
    text: str


def piece(rng: random.Random) -> Piece:
    """A story without a request one time in ten, otherwise a conversation of one to four turns."""
    if rng.random() < 0.1:
        _, text = story(rng)
        return Piece(" ".join(text.split()[:12]), text)
    turns = [rng.choices(MAKERS, WEIGHTS)[0](rng) for _ in range(rng.choices((1, 2, 3, 4), (5, 3, 1, 1))[0])]
    text = END.join(f"{USER}{question}{ASSISTANT}{reply}" for question, reply in turns)
    return Piece(f"{turns[0][0]} {turns[0][1][:60]}", text)
