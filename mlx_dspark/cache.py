"""Rollback of the target's KV cache: one rule per mlx-lm cache class.

After n rejected drafts the cache must equal that of a run which never saw them. mlx-lm's own trim is
right for full and quantised caches. For a sliding window it is not: `trim` refuses once the window
is full. Right after a step of two or more rows, though, the window's buffer is in time order and
still holds everything the step pushed out of sight, so cutting the last n rows restores it exactly;
only steps of two or more rows can have a rejected draft.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from .errors import CacheError
from .structs import KVOptions


class TargetCache:
    """All layers' caches of one request. `offset` is the number of positions they hold."""

    def __init__(self, model: nn.Module, options: KVOptions):
        self.layers: list[Any] = make_prompt_cache(model)
        self.offset = 0
        self._options = options
        self._quantised = options.bits is None
        if not self._quantised:
            for layer in self.layers:
                if type(layer) is not KVCache:
                    raise CacheError(f"--kv-bits {options.bits} cannot quantise {type(layer).__name__}, which this "
                                     "model uses: leave --kv-bits out")

    def require_rollback(self) -> None:
        """Raise CacheError, naming the class, if a rejected draft could not be undone."""
        for layer in self.layers:
            for part in _parts(layer):
                if type(part) not in _ROLLBACK:
                    raise CacheError(f"this model keeps its state in {type(part).__name__}, which cannot be rolled "
                                     "back after a rejected draft: use --policy plain")

    def require_full(self) -> None:
        """Raise CacheError unless rows can be dropped at any time (a window only can right after a long step)."""
        for layer in self.layers:
            for part in _parts(layer):
                if _ROLLBACK.get(type(part)) is not _trim:
                    raise CacheError(f"a draft model that keeps its state in {type(part).__name__} cannot take back "
                                     "its drafts: use one with full attention")

    def room(self) -> int | None:
        """How many rows may run before the cache changes its kind (quantisation starts), None for any.

        Plain decoding would see the quantised cache from that position on, so no forward crosses it.
        """
        return None if self._quantised else max(1, self._options.start - self.offset)

    def advance(self, rows: int, keep: int) -> None:
        """Account for a forward of `rows` rows of which the first `keep` stay."""
        if keep < rows:
            for layer in self.layers:
                for part in _parts(layer):
                    _ROLLBACK[type(part)](part, rows - keep)
        self.offset += keep
        if not self._quantised and self.offset >= self._options.start:
            self.layers[:] = [layer.to_quantized(self._options.group_size, self._options.bits) for layer in self.layers]
            self._quantised = True

    @property
    def full(self) -> bool:
        """Every layer keeps all positions, so rows can be dropped at any time."""
        return all(_ROLLBACK.get(type(part)) is _trim for layer in self.layers for part in _parts(layer))

    def fill(self, run: Callable[[mx.array], Any], depth: int) -> None:
        """Bring an empty cache to `depth` positions of made-up K/V, for measuring.

        run: a forward of token rows [1, T] over this cache; two rows are run for the layers' shapes.
        """
        mx.eval(run(mx.zeros((1, 2), dtype=mx.int32)), self.arrays)
        self.offset = depth
        for layer in self.layers:
            for part in _parts(layer):
                if type(part) not in (KVCache, RotatingKVCache):
                    raise CacheError(f"costs cannot be measured over {type(part).__name__}: use --no-profile")
                rows = min(depth, getattr(part, "max_size", depth))
                part.keys = mx.repeat(part.keys[..., :1, :], rows, axis=2)
                part.values = mx.repeat(part.values[..., :1, :], rows, axis=2)
                part.offset = depth
                if type(part) is RotatingKVCache:
                    part._idx = rows
        mx.eval(self.arrays)

    def prefix(self, length: int) -> TargetCache | None:
        """A cache of the first `length` positions; both may grow, neither sees the other.

        None where they cannot be had: a window that has moved on only has its end, and positions that were
        quantised would not be so yet in a run of their own.
        """
        early = self._options.bits is not None and self._quantised and length < self._options.start
        if length > self.offset or early:
            return None
        cut = copy.copy(self)
        cut.layers, cut.offset = [], length
        for layer in self.layers:
            make = _PREFIX.get(type(layer))
            part = None if make is None else make(layer, length, self.offset)
            if part is None:
                return None
            cut.layers.append(part)
        return cut

    def compact(self, length: int) -> TargetCache | None:
        """`prefix` of at most `length` positions in memory of their own size (caches grow in steps of 256).

        None where there is nothing to be had. Lazy: once its `arrays` are evaluated, it holds no memory of this cache,
        but where a copy would save less than mlx thinks worth it (16 kB an array).
        """
        cut = self.prefix(min(length, self.offset)) if self.offset else None
        if cut is None:
            return None
        for layer in cut.layers:
            layer.keys, layer.values = tree_map(mx.contiguous, (layer.keys, layer.values))
        return cut

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that the layers' keys and values take."""
        return sum(x.nbytes for _, x in tree_flatten(self.arrays) if isinstance(x, mx.array))

    @property
    def arrays(self) -> list[mx.array]:
        """What must be evaluated to have the cache in memory."""
        return [layer.state for layer in self.layers]


def _parts(layer: Any) -> list[Any]:
    if type(layer) is CacheList:
        return [part for inner in layer.caches for part in _parts(inner)]
    return [layer]


def _trim(cache: Any, rows: int) -> None:
    trimmed = cache.trim(rows)
    assert trimmed == rows, f"asked to drop {rows} rows, {trimmed} were dropped"


def _cut_window(cache: RotatingKVCache, rows: int) -> None:
    assert cache.keys.shape[2] == cache._idx, "a window can only be cut right after a step of two or more rows"
    cache._idx -= rows
    cache.offset -= rows
    cache.keys = cache.keys[..., : cache._idx, :]
    cache.values = cache.values[..., : cache._idx, :]


# Exact classes, not isinstance: a subclass may keep more than the rule knows.
_ROLLBACK: dict[type, Callable[[Any, int], None]] = {
    KVCache: _trim,
    QuantizedKVCache: _trim,
    RotatingKVCache: _cut_window,
}


def _prefix_of_full(cache: Any, length: int, held: int) -> Any:
    """Keys and values (tuples of arrays where they are quantised) of the first positions."""
    cut = copy.copy(cache)
    cut.keys, cut.values = (tree_map(lambda x: x[..., :length, :], side) for side in (cache.keys, cache.values))
    cut.offset = length
    return cut


def _prefix_of_window(cache: RotatingKVCache, length: int, held: int) -> RotatingKVCache | None:
    """A window can only be had whole: rows that a round in flight wrote, or that it pushed out, are lost.

    Room to grow is left behind. Only a window that has not turned yet has any, behind its rows.
    """
    if length != held or cache.offset != held:
        return None
    cut = copy.copy(cache)
    rows = cache.offset if cache._idx == cache.offset else cache.keys.shape[2]
    cut.keys, cut.values = cache.keys[..., :rows, :], cache.values[..., :rows, :]
    return cut


_PREFIX: dict[type, Callable[[Any, int, int], Any]] = {
    KVCache: _prefix_of_full,
    QuantizedKVCache: _prefix_of_full,
    RotatingKVCache: _prefix_of_window,
}
