"""The block backbone: block rows over injected context K/V (paper, section 3.1.1), for every family."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from . import dflash2, gemma4, qwen3
from .context import ContextCache
from .spec import DraftSpec


class Backbone(nn.Module):
    """fuse() turns taps into context rows, extend() stores them, __call__ runs one block."""

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

    def __call__(self, block: mx.array, context: mx.array | None, caches: Sequence[ContextCache]) -> mx.array:
        """Block embeddings [B, T, D], new context rows [B, C, D] or None -> normed hidden states [B, T, D]."""
        for layer, cache, sight in zip(self.layers, caches, self._sight, strict=True):
            block = _run(layer, block, context, cache, *sight)
        return self.norm(block)


def _run(
    layer: nn.Module, block: mx.array, context: mx.array | None, cache: ContextCache, window: int | None, causal: bool
) -> mx.array:
    rows = layer.input_layernorm(block)  # context skips this norm
    convolved = layer.attention_conv.before(rows) if "attention_conv" in layer else None
    rows = rows if convolved is None else convolved[0]
    new = 0 if context is None else context.shape[1]
    both = rows if context is None else mx.concatenate([context, rows], axis=1)  # one projection serves both
    keys, values = cache.write(*layer.self_attn.keys_values(both, cache.length), keep=new)
    start, end = cache.length, keys.shape[2]
    first = 0 if window is None else max(0, start - window + 1)  # no row sees further back
    attended = layer.self_attn.attend(
        rows, keys[..., first:, :], values[..., first:, :], start, _mask(start, end, first, window, causal)
    )
    attended = attended if convolved is None else layer.attention_conv.after(attended, convolved[1])
    return layer.finish(block, attended)


def _mask(start: int, end: int, first: int, window: int | None, causal: bool) -> mx.array | None:
    """Which keys first..end-1 block rows start..end-1 see [T, S]; None is all of them."""
    if not causal and (window is None or end <= window):
        return None
    rows, keys = mx.arange(start, end)[:, None], mx.arange(first, end)[None]
    visible = keys <= rows if causal else keys >= 0
    if window is not None:
        visible = visible & (rows - keys < window) & (keys - rows < window)
    return visible
