"""Rows of token ids for training, chosen by seed and step alone: a resumed run sees the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from .corpora import KINDS
from .tokenizer import stream_path


@dataclass(frozen=True)
class Streams:
    """Token streams by kind, and the share of rows that each gets."""

    ids: dict[str, np.ndarray]
    shares: dict[str, float]

    @classmethod
    def load(cls, out: Path, split: str, shares: dict[str, float]) -> Streams:
        """Memory-mapped from the files of tiny.tokenizer; ValueError if they are missing."""
        ids = {}
        for kind in KINDS:
            path = stream_path(out, kind, split)
            if not path.exists():
                raise ValueError(f"{path} does not exist: run python -m tiny.tokenizer first")
            ids[kind] = np.load(path, mmap_mode="r")
        return cls(ids, shares)

    def rows(self, seed: int, step: int, count: int, context: int) -> mx.array:
        """`count` windows of context + 1 ids from anywhere in the streams."""
        rng = np.random.default_rng((seed, step))
        kinds = list(self.shares)
        weights = np.array([self.shares[kind] for kind in kinds])
        chosen = rng.choice(len(kinds), count, p=weights / weights.sum())
        return mx.array(np.stack([self._window(kinds[i], rng, context) for i in chosen]).astype(np.int32))

    def _window(self, kind: str, rng: np.random.Generator, context: int) -> np.ndarray:
        stream = self.ids[kind]
        if len(stream) <= context:
            raise ValueError(f"the {kind} stream has {len(stream)} tokens: a window needs {context + 1}")
        start = int(rng.integers(len(stream) - context))
        return stream[start : start + context + 1]

    def evenly(self, kind: str, count: int, context: int) -> Iterator[mx.array]:
        """Windows spread over one stream, always the same, one row each: for validation."""
        stream = self.ids[kind]
        for start in np.linspace(0, max(len(stream) - context - 1, 0), count).astype(int):
            yield mx.array(np.asarray(stream[start : start + context + 1]).astype(np.int32))[None]
