"""Qwen3 layers for drafts: per-head norms, RoPE, gated SiLU MLP.

Context rows are never queries. Their K/V in every layer are a function of the fused taps alone, so
they are computed once and kept; only a block's rows pass through attention and MLP.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope

from .spec import DraftSpec


class Attention(nn.Module):
    """width: of the input rows; the hidden size, or twice that for Eagle3."""

    def __init__(self, spec: DraftSpec, width: int):
        super().__init__()
        heads, kv_heads, bias = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.attention_bias
        self.head_dim, self.scale = spec.head_dim, spec.head_dim**-0.5
        self.q_proj = nn.Linear(width, heads, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads, bias=bias)
        self.o_proj = nn.Linear(heads, spec.hidden_size, bias=bias)
        self.q_norm = nn.RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)
        self.k_norm = nn.RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)
        self._rope = initialize_rope(spec.head_dim, spec.rope.theta, spec.rope.interleaved, spec.rope.scaling)

    def keys_values(self, x: mx.array, start: int | mx.array) -> tuple[mx.array, mx.array]:
        """Rows [B, T, width] at positions start.. (one for all or [B]) -> keys and values [B, H_kv, T, head_dim]."""
        keys = self._rope(self.k_norm(split_heads(self.k_proj(x), self.head_dim)), offset=start)
        return keys, split_heads(self.v_proj(x), self.head_dim)

    def queries(self, x: mx.array, start: int | mx.array) -> mx.array:
        """Rows [B, T, width] at positions start.. -> queries [B, H, T, head_dim]."""
        return self._rope(self.q_norm(split_heads(self.q_proj(x), self.head_dim)), offset=start)

    def mix(self, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None) -> mx.array:
        """Queries [B, H, T, head_dim] over keys [B, H_kv, S, head_dim] -> [B, T, H * head_dim], before o_proj."""
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)
        return out.swapaxes(1, 2).flatten(2)


class MLP(nn.Module):
    def __init__(self, spec: DraftSpec):
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm residual layer. The caller owns the cache: see `backbone.py` and `eagle3.py`."""

    def __init__(self, spec: DraftSpec, width: int | None = None):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.self_attn = Attention(spec, width or spec.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.mlp = MLP(spec)

    def finish(self, residual: mx.array, attended: mx.array) -> mx.array:
        """Add the attention's output and run the MLP: [B, T, D]."""
        hidden = residual + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def split_heads(x: mx.array, head_dim: int) -> mx.array:
    """[B, T, H * head_dim] -> [B, H, T, head_dim]."""
    return mx.unflatten(x, -1, (-1, head_dim)).swapaxes(1, 2)
