"""From token ids to text: streaming detokenisation and stop strings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Piece:
    """Text that may be shown, how many of the tokens just fed belong to the answer, and whether it ends."""

    text: str
    kept: int
    stopped: bool


class TextStream:
    """Detokenises one answer and ends it at the first stop string.

    Text that could be the beginning of a stop string is held back until it is decided. The stop
    string itself is not part of the text; the token that completed it is the last one kept. Ids that the
    tokenizer does not have (targets pad their vocabulary) are empty text.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], silent_ids: frozenset[int]):
        if any(not text for text in stop):
            raise ValueError("a stop string is empty: leave it out")
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer
        self._stop = tuple(stop)
        self._silent_ids = silent_ids  # stop tokens end the text and are not shown
        self._size: float = len(tokenizer) if hasattr(tokenizer, "__len__") else math.inf
        self._held = ""
        self._begun = self._stopped = False

    def feed(self, tokens: Sequence[int]) -> Piece:
        """Add tokens of one round."""
        shown = ""
        for kept, token in enumerate(tokens, start=1):
            if token in self._silent_ids or token >= self._size:
                continue
            self._detokenizer.add_token(token)
            text, stopped = self._release(self._segment())
            shown += text
            if stopped:
                return Piece(shown, kept, True)
        return Piece(shown, len(tokens), False)

    def finish(self) -> Piece:
        """Release everything held back; nothing after a stop string (its token may end in half a character)."""
        if self._stopped:
            return Piece("", 0, False)
        self._detokenizer.finalize()
        text, stopped = self._release(self._segment(last=True))
        return Piece(text if stopped else text + self._held, 0, stopped)

    def _segment(self, last: bool = False) -> str:
        """New text. mlx-lm's detokenizer drops a leading space, which belongs to a continued prompt."""
        segment: str = self._detokenizer.last_segment
        if not self._begun and (segment or last):
            self._begun = True
            if self._tokenizer.decode(self._detokenizer.tokens).startswith(" " + segment):
                return " " + segment
        return segment

    def _release(self, segment: str) -> tuple[str, bool]:
        text = self._held + segment
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self._held, self._stopped = "", True
            return text[: min(found)], True
        hold = overlap(text, self._stop)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], False


def overlap(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
