"""Bytes of one slot of the walk: what must move, and what the kernel asks for by its own access pattern."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from .scan import geometry
from .text import THREADS
from .walk import Chain

PART = 8  # bytes of a partial maximum: a float32 value and a uint32 index


@dataclass(frozen=True)
class Traffic:
    """minimum: every input read once and every output written once. kernel: all loads and stores it issues.

    The kernel's loads count each time a threadgroup asks, though most of the repeated ones are served by
    a cache: partial maxima and the W1 row, which every threadgroup reads for itself.
    """

    minimum: int
    kernel: int

    @property
    def ratio(self) -> float:
        return self.kernel / self.minimum


def slot_traffic(chain: Chain, size: int, base: mx.Dtype, requests: int = 1, sampled: bool = False) -> Traffic:
    """Of one slot of the vanilla walk over `size` tokens, base logits of dtype `base`."""
    cut = geometry(chain.w2, size, requests)
    row1, row2 = chain.w1.nbytes // chain.w1.rows, chain.w2.nbytes // chain.w2.rows
    passes = -(-requests // cut.tile)
    asked = passes * cut.tile  # requests that the passes ask for: the last pass repeats the last request
    read = cut.parts * cut.steps * THREADS  # rows of W2 in one pass: the last threadgroup repeats the last row
    written = 4 * size * requests if sampled else 0
    folds = cut.parts * (cut.parts * PART + row1) * asked  # each threadgroup: all partial maxima, one W1 row
    kernel = passes * read * row2 + size * base.size * asked + folds + cut.parts * PART * requests + written
    return Traffic(size * row2 + size * base.size * requests + written + requests * row1, kernel)
