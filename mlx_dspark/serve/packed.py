"""One verify forward for several requests, each with a cache of its own, through an unmodified mlx-lm model.

Two layouts of the same rows:

    packed       [R, 1]: every row is a batch entry with a position of its own, so matrix products run over
                 the true number of rows; attention is done request by request over its owner's keys.
    rectangular  [B, T]: requests x widest rows; attention is one call over the owners' keys side by side.

Where only the device knows whose the rows of a packed forward are (`Shares`), matrix products still run over the true
number of rows, which the host knows. Attention and caches need shapes: there every request has all the rows it may get,
the last ones being filling that no row of its own sees, for it comes later, and that is cut off with rejected drafts.

The caches are those of the single stream, one per request, so rollback, quantised caches and sliding
windows need no second rule, and a request's attention is the very computation it would run alone.

How an unmodified model is made to do this: its layers are given a cache whose `offset` is an array (mlx's
rotary embedding takes one position per batch entry), whose `update_and_fetch` files the new rows with their
owners, and the attention function in the model's modules is wrapped for the time of the forward. A model
that does anything else with its cache or its keys shows in `check_sharing` and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from ..cache import TargetCache
from ..errors import CacheError, first_line
from ..structs import KVOptions, Verified
from ..target import Target

PACKED, RECTANGULAR = "packed", "rectangular"
LAYOUTS = (PACKED, RECTANGULAR)
TOLERANCE = 2e-2  # of the largest logit: half types round differently by shape; a wrong position is far outside


@dataclass(frozen=True)
class Shares:
    """How many of its rows each request really runs, where only the device knows.

    rows: int32 [B], at least 1 each and at most what there are. total: their sum.
    """

    rows: mx.array
    total: int


def forward_many(
    target: Target, tokens: Sequence[mx.array], caches: Sequence[TargetCache], taps: Sequence[int] = (),
    layout: str = PACKED, shares: Shares | None = None,
) -> list[Verified]:
    """Run rows [1, n_b] of each request behind its cache; the caller accounts for them with `cache.advance`.

    shares: only the first so many rows of each are run, packed; what comes back for the others is meaningless.
    Rectangular needs caches that keep plain keys of all positions (`can_be_rectangular`).
    """
    if len(tokens) == 1:
        return [target.forward(tokens[0], caches[0], taps)]
    counts = [own.shape[1] for own in tokens]
    rows = _LAYOUTS[layout](counts) if shares is None else _Chosen(counts, shares)
    layers = [_SharedLayer(own, rows) for own in zip(*(cache.layers for cache in caches), strict=True)]
    with _shared_attention(target, rows):
        verified = target.run(rows.join_tokens(tokens), layers, taps)
    logits = rows.split(verified.logits)
    seen = [None] * len(tokens) if verified.taps is None else rows.split(verified.taps)
    return [Verified(own, own_taps) for own, own_taps in zip(logits, seen, strict=True)]


def can_be_rectangular(caches: Sequence[TargetCache]) -> bool:
    """Whether all keys lie in memory in order, unquantised, from position 0 on."""
    return all(type(layer).__name__ == "KVCache" for cache in caches for layer in cache.layers)


def layouts_of(target: Target, options: KVOptions | None = None) -> Sequence[str]:
    """The layouts that this target's caches can be run in."""
    options = options or KVOptions()
    return LAYOUTS if options.bits is None and can_be_rectangular([target.start(options)]) else (PACKED,)


def check_sharing(target: Target, options: KVOptions | None = None) -> None:
    """Run two short requests together and alone, one and several rows; raise CacheError where they differ."""
    prompts, steps = ([1, 2, 3, 1, 2], [3, 1, 2]), ([2, 1], [3])
    ids = min(target.vocab_size or 4, 4)
    alone, together = [], []
    for kept in (alone, together):
        caches = [target.start(options or KVOptions()) for _ in prompts]
        for prompt, cache in zip(prompts, caches, strict=True):
            target.forward(_row(prompt, ids), cache)
            cache.advance(len(prompt), len(prompt))
        rows = [_row(step, ids) for step in steps]
        if kept is alone:
            kept += [target.forward(own, cache).logits for own, cache in zip(rows, caches, strict=True)]
            continue
        try:
            kept += [verified.logits for verified in forward_many(target, rows, caches)]
            mx.eval(kept)
        except Exception as error:  # a model may do anything with keys that are not what it expects
            raise CacheError(f"{target.name} cannot run several requests in one forward ({first_line(error)}): use "
                             "mlx_dspark.generate") from None
    for own, shared in zip(alone, together, strict=True):
        largest = mx.abs(own).max().item()
        if not mx.abs(own - shared).max().item() <= TOLERANCE * largest:
            raise CacheError(f"{target.name} gives other logits when several requests share a forward: use "
                             "mlx_dspark.generate")


class _Rows(Protocol):
    """How rows of several requests lie in one array."""

    counts: Sequence[int]

    def join_tokens(self, tokens: Sequence[mx.array]) -> mx.array:
        """[1, n_b] each -> what the model is given."""

    def split(self, out: mx.array) -> list[mx.array]:
        """What the model returns -> [1, n_b, X] each."""

    def positions(self, offsets: Sequence[int]) -> mx.array:
        """The position of every batch entry's first row."""

    def owned(self, heads: mx.array) -> list[mx.array]:
        """Queries, keys or values of the whole -> [1, H, n_b, head_dim] each."""

    def attend(self, queries: mx.array, own: Sequence[_Own], attention: Callable[..., mx.array]) -> mx.array:
        """Attention of every row over its owner's keys, in the layout of `queries`."""


@dataclass(frozen=True)
class _Own:
    """One request's part of an attention call. cache: of its layer, None where keys came from another one."""

    keys: Any
    values: Any
    mask: Any
    cache: Any


class _Packed:
    """[R, 1, ...]: rows one behind the other."""

    def __init__(self, counts: Sequence[int]):
        self.counts = counts
        ends = [sum(counts[: b + 1]) for b in range(len(counts))]
        self._slices = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]

    def join_tokens(self, tokens: Sequence[mx.array]) -> mx.array:
        return mx.concatenate(list(tokens), axis=1).swapaxes(0, 1)  # [R, 1]

    def split(self, out: mx.array) -> list[mx.array]:
        return [out[own].swapaxes(0, 1) for own in self._slices]

    def positions(self, offsets: Sequence[int]) -> mx.array:
        return mx.array([offset + row for offset, count in zip(offsets, self.counts, strict=True)
                         for row in range(count)], dtype=mx.int32)

    def owned(self, heads: mx.array) -> list[mx.array]:
        return [heads[own].swapaxes(0, 2) for own in self._slices]

    def attend(self, queries: mx.array, own: Sequence[_Own], attention: Callable[..., mx.array]) -> mx.array:
        out = [attention(q, part.keys, part.values, cache=part.cache, mask=part.mask)
               for q, part in zip(self.owned(queries), own, strict=True)]
        return mx.concatenate([part.swapaxes(0, 2) for part in out], axis=0)  # [R, H, 1, head_dim]


class _Chosen:
    """[R, 1, ...]: rows one behind the other, the first ones of every request; only the device knows how many each.

    `split`, `owned` and `attend` work on all rows there are, of which those that are not run repeat the last that is.
    """

    def __init__(self, counts: Sequence[int], shares: Shares):
        self.counts, self._all = counts, _Packed(counts)
        owner = mx.array([b for b, count in enumerate(counts) for _ in range(count)])
        row = mx.array([row for count in counts for row in range(count)])
        self._place = mx.cumsum((row < shares.rows[owner]).astype(mx.int32)) - 1  # of every row among those that run
        self._taken = (self._place < mx.arange(shares.total)[:, None]).sum(axis=1)  # [R]: those that run, among all

    def join_tokens(self, tokens: Sequence[mx.array]) -> mx.array:
        return self._all.join_tokens(tokens)[self._taken]  # [R, 1]

    def split(self, out: mx.array) -> list[mx.array]:
        return self._all.split(out[self._place])

    def positions(self, offsets: Sequence[int]) -> mx.array:
        return self._all.positions(offsets)[self._taken]

    def owned(self, heads: mx.array) -> list[mx.array]:
        return self._all.owned(heads[self._place])

    def attend(self, queries: mx.array, own: Sequence[_Own], attention: Callable[..., mx.array]) -> mx.array:
        return self._all.attend(queries[self._place], own, attention)[self._taken]  # [R, H, 1, head_dim]


class _Rectangular:
    """[B, T, ...]: short requests are filled with rows that nobody reads and no cache keeps."""

    def __init__(self, counts: Sequence[int]):
        self.counts = counts
        self._widest = max(counts)

    def join_tokens(self, tokens: Sequence[mx.array]) -> mx.array:
        return mx.concatenate([mx.pad(own, [(0, 0), (0, self._widest - own.shape[1])]) for own in tokens])  # [B, T]

    def split(self, out: mx.array) -> list[mx.array]:
        return [out[b : b + 1, :count] for b, count in enumerate(self.counts)]

    def positions(self, offsets: Sequence[int]) -> mx.array:
        return mx.array(offsets, dtype=mx.int32)

    def owned(self, heads: mx.array) -> list[mx.array]:
        return [heads[b : b + 1, :, :count] for b, count in enumerate(self.counts)]

    def attend(self, queries: mx.array, own: Sequence[_Own], attention: Callable[..., mx.array]) -> mx.array:
        if any(isinstance(part.mask, mx.array) for part in own):
            raise CacheError("this model has attention windows: use the packed layout")
        longest = max(part.keys.shape[2] for part in own)
        keys, values = ([mx.pad(x, [(0, 0), (0, 0), (0, longest - x.shape[2]), (0, 0)]) for x in side]
                        for side in ([part.keys for part in own], [part.values for part in own]))
        rows, columns = mx.arange(self._widest), mx.arange(longest)
        starts = mx.array([part.keys.shape[2] - count for part, count in zip(own, self.counts, strict=True)])
        visible = columns <= (starts[:, None] + rows)[..., None]  # [B, T, S]; a filling row sees zeros besides
        return attention(queries, mx.concatenate(keys), mx.concatenate(values), cache=None, mask=visible[:, None])


_LAYOUTS: dict[str, Callable[[Sequence[int]], _Rows]] = {PACKED: _Packed, RECTANGULAR: _Rectangular}


class _SharedLayer:
    """One layer's cache, as a model sees it, over the caches of several requests."""

    def __init__(self, caches: Sequence[Any], rows: _Rows):
        self._caches, self._rows = caches, rows
        self._offsets: mx.array | None = None

    @property
    def offset(self) -> mx.array:
        """Asked twice (queries, keys) before the rows are added."""
        if self._offsets is None:
            self._offsets = self._rows.positions([cache.offset for cache in self._caches])
        return self._offsets

    def make_mask(self, rows: int, return_array: bool = False, window_size: int | None = None) -> _Masks:
        """Every owner's mask for its own rows; read back by the wrapped attention."""
        return _Masks([cache.make_mask(count, return_array=False, window_size=window_size)
                       for cache, count in zip(self._caches, self._rows.counts, strict=True)])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[_Keys, _Keys]:
        """File the new rows with their owners."""
        found = [cache.update_and_fetch(k, v) for cache, k, v in zip(
            self._caches, self._rows.owned(keys), self._rows.owned(values), strict=True)]
        return _Keys([k for k, _ in found], self._caches), _Keys([v for _, v in found], self._caches)


@dataclass(frozen=True)
class _Masks:
    each: Sequence[Any]


@dataclass(frozen=True)
class _Keys:
    """Every owner's keys or values, and the caches they lie in (layers may share another layer's keys)."""

    each: Sequence[Any]
    caches: Sequence[Any]


@contextmanager
def _shared_attention(target: Target, rows: _Rows) -> Iterator[None]:
    """Let the attention of this model's modules take keys of several owners, for the forwards run inside."""
    wrapped = [module for module in target.modules
               if getattr(module, _ATTENTION, None) is scaled_dot_product_attention]
    for module in wrapped:
        setattr(module, _ATTENTION, partial(_attend, rows))
    try:
        yield
    finally:
        for module in wrapped:
            setattr(module, _ATTENTION, scaled_dot_product_attention)


_ATTENTION = "scaled_dot_product_attention"


def _attend(
    rows: _Rows, queries: mx.array, keys: Any, values: Any, cache: Any = None, scale: float = 1.0, mask: Any = None,
    **more: Any,
) -> mx.array:
    if not isinstance(keys, _Keys):
        return scaled_dot_product_attention(queries, keys, values, cache=cache, scale=scale, mask=mask, **more)
    masks = mask.each if isinstance(mask, _Masks) else [mask] * len(keys.each)
    own = [_Own(*parts) for parts in zip(keys.each, values.each, masks, keys.caches, strict=True)]
    return rows.attend(queries, own, partial(scaled_dot_product_attention, scale=scale, **more))


def _row(tokens: Sequence[int], ids: int) -> mx.array:
    return mx.array([[token % ids for token in tokens]], dtype=mx.int32)
