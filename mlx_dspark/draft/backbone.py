"""The block backbone: block rows over injected context K/V (paper, section 3.1.1), for every family.

One pass serves several requests whose contexts differ in length: rows are multiplied together, attention
is each request's own over its own K/V.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from . import dflash2, gemma4, qwen3
from .context import ContextCache
from .spec import DraftSpec

Contexts = Sequence[mx.array | None]  # new context rows of each request [1, C_b, D]


class Backbone(nn.Module):
    """fuse() turns taps into context rows, extend() stores them, __call__ runs one block of each request."""

    def __init__(self, spec: DraftSpec):
        super().__init__()
        layer = dflash2.Layer if spec.selector else {"qwen3": qwen3.Layer, "gemma4": gemma4.Layer}[spec.family]
        self.fc = nn.Linear(spec.tap_width, spec.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.layers = [layer(spec) for _ in range(spec.num_layers)]
        self.norm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self._sight = list(zip(spec.windows, spec.causal, strict=True))

    def make_cache(self) -> list[ContextCache]:
        return [ContextCache() for _ in self.layers]

    def fuse(self, taps: mx.array) -> mx.array:
        """taps [B, C, M*D] -> context rows [B, C, D], shared by all layers."""
        return self.hidden_norm(self.fc(taps))

    def extend(self, context: mx.array, caches: Sequence[ContextCache]) -> None:
        """Store context rows [B, C, D] without running a block."""
        for layer, cache in zip(self.layers, caches, strict=True):
            cache.write(*layer.self_attn.keys_values(context, cache.length), keep=context.shape[1])

    def __call__(self, block: mx.array, contexts: Contexts, caches: Sequence[Sequence[ContextCache]]) -> mx.array:
        """Block embeddings [B, T, D] and every request's new context rows -> normed hidden states [B, T, D].

        caches: of each request, one a layer. With a single request everything may have one more leading axis B.
        """
        for layer, own, sight in zip(self.layers, zip(*caches, strict=True), self._sight, strict=True):
            block = _run(layer, block, contexts, own, *sight)
        return self.norm(block)


def _run(
    layer: nn.Module, block: mx.array, contexts: Contexts, caches: Sequence[ContextCache], window: int | None,
    causal: bool,
) -> mx.array:
    attention = layer.self_attn
    rows = layer.input_layernorm(block)  # context skips this norm
    convolved = layer.attention_conv.before(rows) if "attention_conv" in layer else None
    rows = rows if convolved is None else convolved[0]
    blocks = _split(rows, len(caches))
    both = [own if context is None else mx.concatenate([context, own], axis=1)  # one projection serves both
            for own, context in zip(blocks, contexts, strict=True)]
    stored = _store(attention, both, contexts, caches)
    queries = _split(attention.queries(rows, _positions([cache.length for cache in caches])), len(caches))
    attended = attention.o_proj(_joined([
        _attend(attention, *own, cache.length, window, causal)
        for own, cache in zip(zip(queries, stored, strict=True), caches, strict=True)
    ]))
    attended = attended if convolved is None else layer.attention_conv.after(attended, convolved[1])
    return layer.finish(block, attended)


def _store(
    attention: nn.Module, rows: Sequence[mx.array], contexts: Contexts, caches: Sequence[ContextCache]
) -> list[tuple[mx.array, mx.array]]:
    """Write K/V of each request's rows behind its context; returns what each request then sees."""
    starts = [cache.length for cache in caches]
    if len(rows) == 1:
        found = [attention.keys_values(rows[0], starts[0])]
    else:
        found = _keys_values_of_many(attention, rows, starts)
    return [cache.write(*own, keep=0 if context is None else context.shape[1])
            for own, context, cache in zip(found, contexts, caches, strict=True)]


def _keys_values_of_many(
    attention: nn.Module, rows: Sequence[mx.array], starts: Sequence[int]
) -> list[tuple[mx.array, mx.array]]:
    """Rows of different counts [1, n_b, D], every row a batch entry with a position of its own."""
    counts = [own.shape[1] for own in rows]
    positions = mx.concatenate([mx.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    flat = mx.concatenate(list(rows), axis=1).swapaxes(0, 1)  # [R, 1, D]
    keys, values = (x.swapaxes(0, 2) for x in attention.keys_values(flat, positions))  # [1, H_kv, R, head_dim]
    found, first = [], 0
    for count in counts:
        own = slice(first, first + count)
        found.append((keys[:, :, own], values[:, :, own]))
        first += count
    return found


def _attend(
    attention: nn.Module, queries: mx.array, stored: tuple[mx.array, mx.array], start: int, window: int | None,
    causal: bool,
) -> mx.array:
    keys, values = stored
    end = keys.shape[2]
    first = 0 if window is None else max(0, start - window + 1)  # no row sees further back
    mask = _mask(start, end, first, window, causal)
    return attention.mix(queries, keys[..., first:, :], values[..., first:, :], mask)


def _split(rows: mx.array, requests: int) -> list[mx.array]:
    return [rows] if requests == 1 else [rows[b : b + 1] for b in range(requests)]


def _joined(parts: Sequence[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=0)


def _positions(starts: Sequence[int]) -> int | mx.array:
    return starts[0] if len(starts) == 1 else mx.array(starts, dtype=mx.int32)


def _mask(start: int, end: int, first: int, window: int | None, causal: bool) -> mx.array | None:
    """Which keys first..end-1 block rows start..end-1 see [T, S]; None is all of them."""
    if not causal and (window is None or end <= window):
        return None
    rows, keys = mx.arange(start, end)[:, None], mx.arange(first, end)[None]
    visible = keys <= rows if causal else keys >= 0
    if window is not None:
        visible = visible & (rows - keys < window) & (keys - rows < window)
    return visible
