"""A loss over part of the vocabulary: the tokens that matter in a batch, and some that stand for the rest.

Always in: the labels, and the target's likeliest token of every position. The rest is drawn evenly; a column that is
drawn with chance pi stands for 1/pi tokens, which adds -log(pi) to its logit in draft and target alike. Sums over the
vocabulary, and so both normalisers, then have the right expectation.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .projection import Head

ROWS = 256  # of the target's logits at once


@dataclass(frozen=True)
class Columns:
    """Ascending token ids [K], and what their logits are shifted by [K]."""

    ids: np.ndarray
    shift: np.ndarray

    def head(self, head: Head) -> Head:
        """The part of `head` that these columns are."""
        index = mx.array(self.ids)
        return Head(head.table[index], None if head.w2 is None else head.w2[index], head.cap, mx.array(self.shift))

    def labels(self, labels: np.ndarray) -> np.ndarray:
        """Token ids as columns; they must be among them."""
        return np.searchsorted(self.ids, labels)


def choose_columns(head: Head, last: mx.array, labels: np.ndarray, size: int, rng: np.random.Generator) -> Columns:
    """Columns for a batch with the target's last hidden states [N, D] and labels [N].

    size: how many are drawn beside those that must be in.
    """
    likeliest = [mx.argmax(head.base(last[first : first + ROWS]), axis=-1) for first in range(0, last.shape[0], ROWS)]
    vocabulary = head.table.shape[0]
    needed = np.zeros(vocabulary, dtype=bool)
    needed[labels] = True
    for part in likeliest:
        needed[np.array(part)] = True
    rest = np.flatnonzero(~needed)
    drawn = rng.choice(rest, min(size, len(rest)), replace=False)
    shift = np.zeros(vocabulary, dtype=np.float32)
    shift[drawn] = np.log(len(rest) / max(1, len(drawn)))
    ids = np.sort(np.concatenate([np.flatnonzero(needed), drawn]))
    return Columns(ids.astype(np.int32), shift[ids])
