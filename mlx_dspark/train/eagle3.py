"""Training-time test of Eagle3: the layer runs on its own output for several steps over a whole sequence.

Step s pairs the hidden state of position i with the token of position i + 1 + s, at RoPE position i + s. Keys of
step 0 are seen causally; those of later steps only by their own position, as in a chain of drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..draft.eagle3 import Eagle3Draft
from .losses import head_of
from .projection import Goal, project


@dataclass(frozen=True)
class Eagle3Batch:
    """Whole sequences: ids and loss mask [B, S] with their lengths [B] (numpy), taps [B, S, M*D], last [B, S, D]."""

    ids: np.ndarray
    loss_mask: np.ndarray
    lengths: np.ndarray
    taps: mx.array
    last: mx.array


def shifted(array: np.ndarray, by: int) -> np.ndarray:
    """[B, S] moved left by `by` positions, zeros behind."""
    moved = np.zeros_like(array)
    moved[:, : max(0, array.shape[1] - by)] = array[:, by:]
    return moved


def step_masks(batch: Eagle3Batch, steps: int) -> np.ndarray:
    """Positions that each step is trained on [steps, B, S]: the loss mask without each sequence's last token, moved."""
    mask = batch.loss_mask.astype(bool).copy()
    mask[np.arange(len(mask)), batch.lengths - 1] = False
    return np.stack([shifted(mask, step) for step in range(steps)])


def step_hidden(draft: Eagle3Draft, batch: Eagle3Batch, steps: int) -> list[mx.array]:
    """Output of the layer at each step, before the final norm [B, S, D] each."""
    layer, hidden = draft.layers[0], draft.fc(batch.taps.astype(draft.dtype))
    keys: list[mx.array] = []
    values: list[mx.array] = []
    found = []
    for step in range(steps):
        rows = draft.pair(hidden, mx.array(shifted(batch.ids, step + 1)))  # [B, S, 2D]
        k, v = layer.self_attn.keys_values(rows, step)  # [B, G, S, d]
        keys.append(k)
        values.append(v)
        queries = layer.self_attn.queries(rows, step) * layer.self_attn.scale  # [B, H, S, d]
        hidden = layer.finish(hidden, layer.self_attn.o_proj(_attend(queries, keys, values)))
        found.append(hidden)
    return found


def eagle3_loss(
    draft: Eagle3Draft, batch: Eagle3Batch, step_decay: float = 0.8, divisor: float | None = None,
    chunk: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Sum of step losses times step_decay^s, and the values of its `Sums`, a step being a position.

    A step's loss is the soft cross entropy of its positions over `divisor`: all positions of the batch (B * S), as in
    DeepSeek's code, unless another one is given. The steps are draft.gamma.
    """
    masks, divisor = step_masks(batch, draft.gamma), divisor or batch.ids.size
    losses, accept = [], []
    for step, hidden in enumerate(step_hidden(draft, batch, draft.gamma)):
        loss, chances = _step_loss(draft, batch, np.flatnonzero(masks[step]), step, hidden, divisor, chunk)
        losses.append(loss)
        accept.append(chances)
    total = sum(step_decay**step * loss for step, loss in enumerate(losses))
    return total, mx.stop_gradient(_sums(total * divisor, mx.stack(accept), masks))


def _step_loss(
    draft: Eagle3Draft, batch: Eagle3Batch, rows: np.ndarray, step: int, hidden: mx.array, divisor: float,
    chunk: int | None,
) -> tuple[mx.array, mx.array]:
    """One step's loss, and c* of every position [B * S], 0 where the step is not trained."""
    empty = mx.zeros((batch.ids.size,))
    if not len(rows):
        return mx.zeros(()), empty
    index = mx.array(rows)
    last = batch.last.reshape(-1, batch.last.shape[-1])[index + 1 + step]  # a counted position's goal exists
    flat = draft.norm(hidden).reshape(-1, hidden.shape[-1])[index]
    goal = Goal(last, None, mx.full((len(rows),), 1 / divisor), None)
    loss, _, variation = project(flat, None, head_of(draft), goal, chunk)
    return loss, empty.at[index].add(mx.clip(1 - 0.5 * variation, 0, 1))


def _sums(total: mx.array, accept: mx.array, masks: np.ndarray) -> mx.array:
    """The values of `Sums`: the loss as cross entropy over all positions, no other terms. accept [steps, B * S]."""
    blocks, positions, zero = mx.array(float(masks[0].sum())), mx.array(float(accept.shape[1])), mx.zeros(())
    tokens = mx.cumprod(accept, axis=0).sum() + blocks
    scalars = [total, zero, zero, positions, tokens, blocks, zero, zero, zero]
    counted = mx.array(masks.reshape(len(masks), -1).sum(axis=1).astype(np.float32))
    return mx.concatenate([mx.stack(scalars), accept.sum(axis=1), counted])


def _attend(queries: mx.array, keys: list[mx.array], values: list[mx.array]) -> mx.array:
    """Queries [B, H, S, d] over step 0 causally and later steps at their own position -> [B, S, H*d]."""
    batch, heads, length, width = queries.shape
    kv_heads = keys[0].shape[1]
    q = queries.reshape(batch, kv_heads, -1, length, width)  # [B, G, g, S, d]
    first = q @ keys[0][:, :, None].swapaxes(3, 4)  # [B, G, g, S, S]
    unseen = mx.arange(length)[None] > mx.arange(length)[:, None]
    first = mx.where(unseen, mx.array(mx.finfo(first.dtype).min, first.dtype), first)
    own = [(q * k[:, :, None]).sum(axis=-1, keepdims=True) for k in keys[1:]]  # [B, G, g, S, 1] each
    shares = mx.softmax(mx.concatenate([first, *own], axis=-1), axis=-1, precise=True)
    out = shares[..., :length] @ values[0][:, :, None]  # [B, G, g, S, d]
    for step, v in enumerate(values[1:]):
        out = out + shares[..., length + step, None] * v[:, :, None]
    return out.reshape(batch, heads, length, width).swapaxes(1, 2).flatten(2)
