"""Where taps and last hidden states come from: the target, run inside the training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from ..target import Target


class Features(Protocol):
    """taps [B, S, M*D] and last hidden states [B, S, D] of padded sequences, evaluated constants."""

    def __call__(self, rows: Sequence[int], ids: np.ndarray) -> tuple[mx.array, mx.array]:
        """rows: their numbers in the corpus, ids [B, S]: the sequences themselves."""


@dataclass(frozen=True)
class Online:
    """A forward of the target for every batch: no disk, and the only choice for data that is seen once."""

    target: Target
    taps: tuple[int, ...]

    def __call__(self, rows: Sequence[int], ids: np.ndarray) -> tuple[mx.array, mx.array]:
        taps, last = self.target.features(mx.array(ids), self.taps)
        mx.eval(taps, last)  # the target's activations are free before the draft's begin
        return taps, last
