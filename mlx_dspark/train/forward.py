"""The training forward of a block draft: all blocks of a batch at once, over one copy of the context.

The draft's own modules do the work. A block is a row of the batch axis, so that RoPE takes one offset a
block; its attention has two parts, the context of its sequence and the block itself, under one softmax. A
block sees the positions before its anchor, not the anchor's own: its features do not exist yet when it proposes.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..draft.block import BlockDraft
from .anchors import Anchors, Blocks

SCORE_BYTES = 2**28  # attention scores alive at once; beyond, groups of anchors are computed again backwards
MOST_GROUPS = 4  # else; a group reads only the context that its last anchor sees


def block_hidden(draft: BlockDraft, taps: mx.array, blocks: Blocks) -> mx.array:
    """Hidden states after the final norm of all blocks [B, A, T, D], from taps [B, S, M*D]."""
    backbone = draft.backbone
    batch, count, slots = blocks.block_ids.shape
    context = backbone.fuse(taps.astype(draft.dtype))  # [B, S, D]
    rows = draft.tables.embed(mx.array(blocks.block_ids).reshape(batch, -1), draft.dtype)  # [B, A*T, D]
    rows = rows.reshape(batch * count, slots, -1)
    sight = _Sight(blocks.anchors, context.shape[1], slots)
    for layer in backbone.layers:
        normed = layer.input_layernorm(rows)  # the context skips this norm
        rows = layer.finish(rows, _attend(layer.self_attn, normed, context, sight))
    return backbone.norm(rows).reshape(batch, count, slots, -1)


class _Sight:
    """What the attention of all layers shares: offsets for RoPE and the mask of the context.

    Anchors ascend, so the first ones of a batch see a short context only: they form groups that each
    read no more of it than their last one sees.
    """

    def __init__(self, anchors: Anchors, length: int, slots: int):
        self.starts = mx.array(anchors.positions.reshape(-1))  # [B*A]
        self.keep = mx.array(anchors.keep)  # [B, A]
        self.hidden = mx.arange(length) >= mx.array(anchors.positions)[..., None]  # [B, A, S]
        self.shape = (*anchors.positions.shape, slots)
        self.ends = anchors.positions.max(axis=0)  # [A], the context an anchor column needs

    def groups(self, heads: int) -> tuple[list[tuple[slice, int]], bool]:
        """Runs of anchors, each with the context it needs; and whether keeping all their scores takes too much."""
        batch, count, slots = self.shape
        each = 4 * batch * heads * slots * (self.hidden.shape[-1] + slots)  # bytes of one anchor's scores
        size = max(1, min(-(-count // MOST_GROUPS), SCORE_BYTES // each))
        runs = [slice(first, min(first + size, count)) for first in range(0, count, size)]
        return [(run, max(1, int(self.ends[run].max()))) for run in runs], each * count > SCORE_BYTES


def _attend(attention: nn.Module, rows: mx.array, context: mx.array, sight: _Sight) -> mx.array:
    """Rows [B*A, T, D] over the context [B, S, D] and their own block -> [B*A, T, D]."""
    batch, count, slots = sight.shape
    keys, values = attention.keys_values(context, 0)  # [B, G, S, d]
    own_keys, own_values = (x.reshape(batch, count, *x.shape[1:]) for x in attention.keys_values(rows, sight.starts))
    queries = attention.queries(rows, sight.starts) * attention.scale  # [B*A, H, T, d]
    queries = queries.reshape(batch, count, keys.shape[1], -1, slots, queries.shape[-1])  # [B, A, G, H/G, T, d]
    groups, large = sight.groups(queries.shape[2] * queries.shape[3])
    attended = mx.checkpoint(_two_part) if large else _two_part
    out = [attended(queries[:, g], keys[:, :, :end], values[:, :, :end], own_keys[:, g], own_values[:, g],
                    sight.hidden[:, g, :end], sight.keep[:, g]) for g, end in groups]
    out = mx.concatenate(out, axis=1)  # [B, A, T, H*d]
    return attention.o_proj(out.reshape(batch * count, slots, -1))


def _two_part(
    queries: mx.array, keys: mx.array, values: mx.array, own_keys: mx.array, own_values: mx.array,
    hidden: mx.array, keep: mx.array,
) -> mx.array:
    """Queries [B, A, G, g, T, d] over context K/V [B, G, S, d] and block K/V [B, A, G, T, d] -> [B, A, T, H*d].

    hidden [B, A, S] is the context that a block does not see; blocks that are not kept see nothing and give 0.
    """
    batch, count, kv_heads, group, slots, width = queries.shape
    length = keys.shape[2]
    flat = queries.transpose(0, 2, 1, 3, 4, 5).reshape(batch, kv_heads, -1, width)  # [B, G, A*g*T, d]
    far = (flat @ keys.swapaxes(2, 3)).reshape(batch, kv_heads, count, -1, length)  # [B, G, A, g*T, S]
    far = mx.where(hidden[:, None, :, None], mx.array(mx.finfo(far.dtype).min, far.dtype), far)
    near = queries.reshape(batch, count, kv_heads, group * slots, width) @ own_keys.swapaxes(3, 4)  # [B, A, G, g*T, T]
    near = near.transpose(0, 2, 1, 3, 4)
    shares = mx.softmax(mx.concatenate([far, near], axis=-1), axis=-1, precise=True)
    out = (shares[..., :length].reshape(batch, kv_heads, -1, length) @ values).reshape(
        batch, kv_heads, count, group, slots, width)
    own = shares[..., length:].transpose(0, 2, 1, 3, 4) @ own_values  # [B, A, G, g*T, d]
    out = out.transpose(0, 2, 4, 1, 3, 5) + own.reshape(batch, count, kv_heads, group, slots, width).transpose(
        0, 1, 4, 2, 3, 5)  # [B, A, T, G, g, d]
    return out.reshape(batch, count, slots, -1) * keep[..., None, None]
