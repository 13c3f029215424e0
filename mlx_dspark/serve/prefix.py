"""What finished requests leave behind for those that begin alike: the target's K/V and the draft's context.

A restored position has no taps any more, so the draft's own K/V are stored with the target's. Both are
copied without their room to grow, so that an entry takes the memory of its tokens. It is not used up: every
hit gets its first positions as a cache of its own. Entries are dropped least recently used first, by bytes;
one that begins like a newer, longer one goes with its arrival.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..cache import TargetCache
from ..draft import Resumable


@dataclass(frozen=True)
class Entry:
    """tokens: those at the cache's positions. context: what the draft kept, None without a draft."""

    tokens: tuple[int, ...]
    cache: TargetCache
    context: Any
    nbytes: int


@dataclass(frozen=True)
class Hit:
    """A cache that holds the first `length` tokens of a prompt, and the draft's state behind them."""

    length: int
    cache: TargetCache
    state: Any


class PrefixCache:
    """Finished conversations by their tokens, at most `limit` bytes of them."""

    def __init__(self, draft: Resumable | None, limit: int):
        self._draft, self._limit = draft, limit
        self._ahead: int = getattr(draft, "looks_ahead", 0)
        self._entries: OrderedDict[tuple[int, ...], Entry] = OrderedDict()  # oldest first
        self.nbytes = self.hits = self.misses = self.reused_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, prompt: Sequence[int]) -> Hit | None:
        """The longest stored beginning of a prompt, at least one token short of it."""
        by_length = sorted(((common(key, prompt) - self._ahead, key) for key in self._entries), reverse=True)
        for length, key in by_length:
            hit = self._cut(self._entries[key], min(length, len(prompt) - 1))
            if hit is not None:
                self._entries.move_to_end(key)
                self.hits += 1
                self.reused_tokens += hit.length
                return hit
        self.misses += 1
        return None

    def store(self, tokens: Sequence[int], cache: TargetCache, state: Any) -> None:
        """Keep the cache of a request that is over; `tokens` are those known to be at its first positions.

        One of which nothing could be had (a window that a round in flight has moved on, a draft model that has not run)
        is not kept.
        """
        kept = tuple(tokens[: cache.offset])
        own = cache.compact(len(kept)) if kept else None
        context = None if self._draft is None else _compact(self._draft.keep(state), len(kept))
        if own is None or (context is None and self._draft is not None):
            return
        nbytes = own.nbytes + sum(part.nbytes for part in _parts(context))
        if nbytes > self._limit:
            return
        for key, entry in self._entries.items():
            if common(key, kept) == len(kept) and entry.cache.prefix(len(kept)) is not None:
                self._entries.move_to_end(key)  # a longer one holds it already
                return
        mx.eval(own.arrays, [part.arrays for part in _parts(context)])  # unevaluated, copies hold their sources
        for key in list(self._entries):
            if common(key, kept) == len(key) and own.prefix(len(key)) is not None:
                self._drop(key)
        self._entries[kept] = Entry(kept, own, context, nbytes)
        self.nbytes += nbytes
        self.shrink(self._limit)

    def shrink(self, limit: int) -> None:
        """Drop entries, least recently used first, until they take at most `limit` bytes."""
        while self._entries and self.nbytes > limit:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: tuple[int, ...]) -> None:
        self.nbytes -= self._entries.pop(key).nbytes

    def _cut(self, entry: Entry, length: int) -> Hit | None:
        if length < 1:
            return None
        cache = entry.cache.prefix(length)
        if cache is None:
            return None
        state = None if self._draft is None else self._draft.resume(entry.context, length)
        return None if self._draft is not None and state is None else Hit(length, cache, state)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts share at the beginning."""
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return min(len(a), len(b))


def _parts(context: Any) -> list[Any]:
    """The caches of what a draft kept: one, one a layer, or none."""
    return [] if context is None else context if isinstance(context, list) else [context]


def _compact(context: Any, length: int) -> Any:
    """What a draft kept, of the first `length` tokens (it may know fewer) and without room to grow."""
    parts = [part.compact(length) for part in _parts(context)]
    return parts if isinstance(context, list) else parts[0]  # None: a draft model that has not run
