"""DFlash2's two additions to the Qwen3 block: dynamic convolutions and the candidate selector.

From z-lab's published source: every sublayer's input and output pass a short causal convolution over
the block whose kernel is a learned base plus a part computed from the rows; the selector re-scores
the top candidates of a row by the token chosen before it.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .qwen3 import MLP, Attention
from .spec import DraftSpec


class GroupedDynamicConv(nn.Module):
    """out[t] = sum_o (base[o] + dynamic[t, o]) * x[t - o]; `dynamic` is one number per channel group."""

    def __init__(self, spec: DraftSpec):
        super().__init__()
        self.kernel, self.group = spec.selector.conv_kernel, spec.selector.conv_group
        groups = spec.hidden_size // self.group
        self.base_kernel = mx.zeros((2, self.kernel, spec.hidden_size))  # before and after the sublayer
        self.kernel_projection = nn.Linear(spec.hidden_size, 2 * self.kernel * groups, bias=False)

    def before(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Convolve the sublayer's input [B, T, D]; also the dynamic kernel for its output [B, T, K, G]."""
        dynamic = mx.unflatten(self.kernel_projection(x), -1, (2, self.kernel, -1))  # [B, T, 2, K, G]
        return self._convolve(x, self.base_kernel[0], dynamic[:, :, 0]), dynamic[:, :, 1]

    def after(self, x: mx.array, dynamic: mx.array) -> mx.array:
        """Convolve the sublayer's output [B, T, D]."""
        return self._convolve(x, self.base_kernel[1], dynamic)

    def _convolve(self, x: mx.array, base: mx.array, dynamic: mx.array) -> mx.array:
        blocks = mx.unflatten(x, -1, (-1, self.group))  # [B, T, G, group]
        out = mx.zeros_like(blocks)
        for offset in range(self.kernel):
            shifted = mx.pad(blocks, [(0, 0), (offset, 0), (0, 0), (0, 0)])[:, : x.shape[1]]
            weight = mx.unflatten(base[offset], -1, (-1, self.group)).astype(x.dtype) + dynamic[:, :, offset, :, None]
            out = out + weight * shifted
        return out.flatten(2)


class Layer(nn.Module):
    """A Qwen3 layer whose attention and MLP sit between convolutions."""

    def __init__(self, spec: DraftSpec):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.self_attn = Attention(spec, spec.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.mlp = MLP(spec)
        self.attention_conv = GroupedDynamicConv(spec)
        self.mlp_conv = GroupedDynamicConv(spec)

    def finish(self, residual: mx.array, attended: mx.array) -> mx.array:
        """Add the attention's output and run the MLP: [B, T, D]."""
        hidden = residual + attended
        branch, dynamic = self.mlp_conv.before(self.post_attention_layernorm(hidden))
        return hidden + self.mlp_conv.after(self.mlp(branch), dynamic)


class CandidateSelector(nn.Module):
    """logits of the top_k candidates + <P[x_{k-1}] * W h_k, S[candidate]>; all others are impossible."""

    def __init__(self, spec: DraftSpec):
        super().__init__()
        self.top_k = min(spec.selector.top_k, spec.vocab_size)
        self.predecessor_codebook = nn.Embedding(spec.vocab_size, spec.selector.rank)
        self.successor_codebook = nn.Embedding(spec.vocab_size, spec.selector.rank)
        self.hidden_projection = nn.Linear(spec.hidden_size, spec.selector.rank, bias=False)

    def project(self, hidden: mx.array) -> mx.array:
        return self.hidden_projection(hidden)  # [B, N, rank]

    def start(self, requests: int) -> None:
        return None

    def embed(self, tokens: mx.array) -> mx.array:
        raise AssertionError("DFlash2 has no Markov embedding")

    def chain(self) -> None:
        return None

    def step(self, token: mx.array, projected: mx.array, base: mx.array, state: None) -> tuple[mx.array, None]:
        """Corrected logits [B, V] of the slot after `token` [B]."""
        candidates = mx.argpartition(-base, self.top_k - 1, axis=-1)[:, : self.top_k]  # [B, K]
        context = self.predecessor_codebook(token) * projected  # [B, rank]
        edges = (self.successor_codebook(candidates) @ context[..., None])[..., 0]  # [B, K]
        scores = mx.take_along_axis(base, candidates, axis=-1) + edges
        return mx.put_along_axis(mx.full(base.shape, -mx.inf, dtype=base.dtype), candidates, scores, axis=-1), None
