"""How many bytes a request will need, before it is admitted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..backend import memory_bytes
from ..load import Pair
from ..sampling import ArgmaxPick
from ..structs import KVOptions

STEP = 256  # positions by which caches grow
SHARE = 0.7  # of what the weights leave of the device's memory
MOST = 2**40  # positions: more than anybody will wait for
SLACK = 1.25  # a draft's context grows by a quarter


@dataclass(frozen=True)
class Footprint:
    """Bytes a position, by how many positions are kept at most (None: all), as (bytes, most)."""

    layers: Sequence[tuple[float, int | None]]

    def bytes(self, positions: int) -> int:
        """Of one request with so many positions, room to grow included."""
        return int(sum(size * (positions if most is None else min(positions, most + STEP)) + size * STEP
                       for size, most in self.layers))

    def positions(self, limit: int) -> int:
        """How many positions one request can have in `limit` bytes; MOST where they take no more from some point on."""
        return max(0, bisect_right(range(MOST + 1), limit, key=self.bytes) - 1)


def footprint(pair: Pair, kv: KVOptions) -> Footprint:
    """Measured on two made-up positions; a cache that will be quantised counts as if it never were."""
    cache = pair.target.start(kv)
    taps = () if pair.draft is None else pair.draft.taps
    tokens = mx.zeros((1, 2), dtype=mx.int32)
    verified = pair.target.forward(tokens, cache, taps)
    mx.eval(verified.logits)
    cache.advance(2, 2)
    layers = [(_bytes(layer.state), getattr(layer, "max_size", None)) for layer in cache.layers]
    if pair.draft is not None:
        layers.append((SLACK * _context_bytes(pair, tokens, verified.taps), None))
    return Footprint(layers)


def default_limit() -> int:
    """Bytes that caches may take when nobody says otherwise."""
    return int(SHARE * max(0, memory_bytes() - mx.get_active_memory()))


def _context_bytes(pair: Pair, tokens: mx.array, taps: mx.array | None) -> float:
    state = pair.draft.start()
    pair.draft.observe(state, tokens, taps)
    mx.eval(pair.draft.propose(state, tokens[:, 0], 1, ArgmaxPick()).tokens)
    kept = pair.draft.keep(state)
    parts = kept if isinstance(kept, list) else kept.layers if hasattr(kept, "layers") else [kept]
    return sum(_bytes(part.arrays if hasattr(part, "arrays") else part.state) for part in parts)


def _bytes(state: Any) -> float:
    """Bytes a position of arrays [1, H, capacity, ...]."""
    arrays = [array for _, array in tree_flatten(state) if isinstance(array, mx.array)]
    return sum(array.nbytes / array.shape[2] for array in arrays if array.ndim == 4)
