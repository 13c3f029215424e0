"""The Qwen3 block backbone: bidirectional block rows over injected context K/V (paper, section 3.1.1).

Context rows are never queries. Their K/V in every layer are a function of the fused taps alone, so
they are computed once and kept; only the block's rows pass through attention and MLP.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from .context import ContextCache
from .spec import DraftSpec


class Attention(nn.Module):
    """Block queries over context and block; per-head norms on q and k, RoPE at sequence positions."""

    def __init__(self, spec: DraftSpec):
        super().__init__()
        width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.head_dim = spec.head_dim
        self.theta = spec.rope_theta
        self.q_proj = nn.Linear(spec.hidden_size, width, bias=spec.attention_bias)
        self.k_proj = nn.Linear(spec.hidden_size, kv_width, bias=spec.attention_bias)
        self.v_proj = nn.Linear(spec.hidden_size, kv_width, bias=spec.attention_bias)
        self.o_proj = nn.Linear(width, spec.hidden_size, bias=spec.attention_bias)
        self.q_norm = nn.RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)
        self.k_norm = nn.RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)

    def keys_values(self, x: mx.array, start: int) -> tuple[mx.array, mx.array]:
        """x [B, T, D] at positions start.. -> keys and values [B, H_kv, T, head_dim]."""
        keys = self._rope(self.k_norm(self._heads(self.k_proj(x))), start)
        return keys, self._heads(self.v_proj(x))

    def __call__(self, block: mx.array, context: mx.array | None, cache: ContextCache) -> mx.array:
        """block [B, T, D] attends to the cache, new context rows [B, C, D] and itself -> [B, T, D]."""
        start, new = cache.length, 0 if context is None else context.shape[1]
        rows = block if context is None else mx.concatenate([context, block], axis=1)  # [B, C + T, D]
        keys, values = cache.write(*self.keys_values(rows, start), keep=new)
        queries = self._rope(self.q_norm(self._heads(self.q_proj(block))), start + new)  # [B, H, T, head_dim]
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.head_dim**-0.5)
        return self.o_proj(out.swapaxes(1, 2).flatten(2))  # [B, T, D]

    def _heads(self, x: mx.array) -> mx.array:
        return mx.unflatten(x, -1, (-1, self.head_dim)).swapaxes(1, 2)  # [B, H, T, head_dim]

    def _rope(self, x: mx.array, start: int) -> mx.array:
        return mx.fast.rope(x, self.head_dim, traditional=False, base=self.theta, scale=1.0, offset=start)


class MLP(nn.Module):
    def __init__(self, spec: DraftSpec):
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, spec: DraftSpec):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.mlp = MLP(spec)

    def __call__(self, block: mx.array, context: mx.array | None, cache: ContextCache) -> mx.array:
        block = block + self.self_attn(self.input_layernorm(block), context, cache)  # context skips this norm
        return block + self.mlp(self.post_attention_layernorm(block))


class Qwen3Backbone(nn.Module):
    """fuse() turns taps into context rows, extend() stores them, __call__ runs one block."""

    def __init__(self, spec: DraftSpec):
        super().__init__()
        self.fc = nn.Linear(len(spec.taps) * spec.hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.layers = [Layer(spec) for _ in range(spec.num_layers)]
        self.norm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)

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
        for layer, cache in zip(self.layers, caches, strict=True):
            block = layer(block, context, cache)
        return self.norm(block)
