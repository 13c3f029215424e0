"""Gemma4 layers for drafts: sandwich norms, unscaled attention, normed values, proportional RoPE.

All layers use the full-attention geometry of the target (`global_head_dim`), see no window, and end
with `layer_scalar`, which multiplies the whole residual stream.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import ProportionalRoPE, initialize_rope

from .qwen3 import split_heads
from .spec import DraftSpec


class Attention(nn.Module):
    """With `keys_are_values` there is no v_proj: values are the raw k_proj output, before norm and RoPE."""

    def __init__(self, spec: DraftSpec, width: int):
        super().__init__()
        heads, kv_heads, bias = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.attention_bias
        self.head_dim, self.scale, self.eps = spec.head_dim, 1.0, spec.rms_norm_eps
        self.q_proj = nn.Linear(width, heads, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads, bias=bias)
        if not spec.keys_are_values:
            self.v_proj = nn.Linear(width, kv_heads, bias=bias)
        self.o_proj = nn.Linear(heads, spec.hidden_size, bias=bias)
        self.q_norm = nn.RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)
        self.k_norm = nn.RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)
        self._rope = _make_rope(spec)

    def keys_values(self, x: mx.array, start: int | mx.array) -> tuple[mx.array, mx.array]:
        """Rows [B, T, width] at positions start.. (one for all or [B]) -> keys and values [B, H_kv, T, head_dim]."""
        raw = split_heads(self.k_proj(x), self.head_dim)
        values = split_heads(self.v_proj(x), self.head_dim) if "v_proj" in self else raw
        return self._rope(self.k_norm(raw), offset=start), mx.fast.rms_norm(values, None, self.eps)

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
        return self.down_proj(nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Sandwich norms: each branch is normed before and after. The caller owns the cache."""

    def __init__(self, spec: DraftSpec, width: int | None = None):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.self_attn = Attention(spec, width or spec.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.mlp = MLP(spec)
        self.post_feedforward_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.layer_scalar = mx.ones((1,))

    def finish(self, residual: mx.array, attended: mx.array) -> mx.array:
        """Add the attention's output and run the MLP: [B, T, D]."""
        hidden = residual + self.post_attention_layernorm(attended)
        branch = self.mlp(self.pre_feedforward_layernorm(hidden))
        return (hidden + self.post_feedforward_layernorm(branch)) * self.layer_scalar


def _make_rope(spec: DraftSpec) -> nn.Module:
    """Proportional: the rotated share's frequencies have the full head as denominator, the rest are 0."""
    scaling = spec.rope.scaling or {}
    if scaling.get("rope_type") != "proportional":
        return initialize_rope(spec.head_dim, spec.rope.theta, spec.rope.interleaved, spec.rope.scaling)
    rotated = 2 * int(scaling.get("partial_rotary_factor", 1.0) * spec.head_dim // 2)
    return ProportionalRoPE(spec.head_dim, rotated, spec.rope.interleaved, spec.rope.theta, scaling.get("factor", 1.0))
