"""From hidden states to loss terms and gradients, a chunk of rows at a time.

A row of logits is as wide as the vocabulary (152k for Qwen3), so the logits of all slots together would
be by far the largest thing of a training step. They never exist at once: each chunk is projected, turned
into its loss terms and into the gradient of its inputs, and forgotten. Because the weights of the rows are
known beforehand, the backward pass has nothing left to do.

Letters: N rows (slots that count), V vocabulary, D hidden size, R rank of the transition bias.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..backend import on_cpu
from ..kernels.argmax import correct
from ..kernels.table import Table
from .softmax import softmax

CHUNK_BYTES = 2**28  # float32 logits of one chunk
CPU_BYTES = 2**22  # on a CPU, so that its cache holds them
LEAST_ROWS = 32  # fewer make poor matrix products

Terms = tuple[mx.array, ...]


@dataclass(frozen=True)
class Head:
    """What turns rows into logits. table [V, D] is frozen; w2 [V, R] or None; cap: Gemma's, before the bias.

    shift [V]: added to all logits, the target's too; for columns that stand for others (see `columns.py`).
    """

    table: mx.array
    w2: mx.array | None = None
    cap: float | None = None
    shift: mx.array | None = None

    def base(self, hidden: mx.array) -> mx.array:
        """Hidden [N, D] -> capped base logits, float32 [N, V]."""
        logits = (hidden @ self.table.T).astype(mx.float32)
        return logits if self.cap is None else mx.tanh(logits / self.cap) * self.cap

    def corrected(self, base: mx.array, latent: mx.array | None) -> mx.array:
        """Base logits plus the bias of latents [N, R]."""
        logits = base if self.w2 is None else correct(base, latent, Table(self.w2))
        return logits if self.shift is None else logits + self.shift

    def target(self, last: mx.array) -> mx.array:
        """The target's logits from its last hidden states [N, D]."""
        base = self.base(last)
        return base if self.shift is None else base + self.shift


@dataclass(frozen=True)
class Goal:
    """What the rows are trained for. All arrays are constants.

    target: the target's last hidden states [N, D], None where it is not looked at.
    labels: tokens [N], None for Eagle3's soft cross entropy.
    ce_weights, tv_weights: what each row's cross entropy and total variation count in the loss [N].
    """

    target: mx.array | None
    labels: mx.array | None
    ce_weights: mx.array
    tv_weights: mx.array | None


def project(
    hidden: mx.array, latent: mx.array | None, head: Head, goal: Goal, chunk: int | None = None
) -> tuple[mx.array, mx.array, mx.array | None]:
    """Loss terms of rows: hidden [N, D], latent [N, R] or None.

    Returns the weighted sum of all terms (which has gradients for hidden, latent and w2), and without
    gradients each row's cross entropy [N] and its sum_v |q - p| [N] (None without a target).
    chunk: rows at a time; None takes what fits into CHUNK_BYTES, and at least LEAST_ROWS.
    """
    chunk = chunk or max(LEAST_ROWS, (CPU_BYTES if on_cpu() else CHUNK_BYTES) // (4 * head.table.shape[0]))
    inputs = [x for x in (hidden, latent, head.w2) if x is not None]

    @mx.custom_function
    def terms(*inputs: mx.array) -> Terms:
        rows, latents, w2 = (*inputs, None, None)[:3]
        return _all_chunks(rows, latents, Head(head.table, w2, head.cap, head.shift), goal, chunk)

    @terms.vjp
    def backward(primals: Any, cotangents: Terms, outputs: Terms) -> Any:
        found = [cotangents[0].astype(g.dtype) * g for g in outputs[-len(inputs):]]
        return tuple(found) if len(found) > 1 else found[0]  # as mlx hands over primals

    total, ce, *rest = terms(*inputs)
    variation = rest[0] if goal.target is not None else None
    return total, mx.stop_gradient(ce), None if variation is None else mx.stop_gradient(variation)


def _all_chunks(hidden: mx.array, latent: mx.array | None, head: Head, goal: Goal, chunk: int) -> Terms:
    """total, ce [N], (variation [N],) then the gradients of hidden, latent and w2."""
    rows, columns, w2_gradient = hidden.shape[0], [], None
    after: list[mx.array] = []
    for first in range(0, max(rows, 1), chunk):
        part = slice(first, first + chunk)
        (h, z), these = _part((hidden, latent), part, after), Goal(*_part(vars(goal).values(), part, after))
        ce, variation, slope, base = _chunk(h, z, head, these)
        d_hidden = _through_cap(slope, base, head).astype(h.dtype) @ head.table
        found = [ce] + ([] if variation is None else [variation]) + [d_hidden]
        if z is not None:
            slope = slope.astype(z.dtype)
            found.append(slope @ head.w2)
            here = (slope.T @ z).astype(mx.float32)
            w2_gradient = here if w2_gradient is None else w2_gradient + here
        columns.append(found)
        after = [*found, *([] if w2_gradient is None else [w2_gradient])]
    joined = [mx.concatenate(column) for column in zip(*columns, strict=True)]
    total = (joined[0] * goal.ce_weights).sum()
    if goal.tv_weights is not None:
        total = total + (joined[1] * goal.tv_weights).sum()
    return (total, *joined, *([] if w2_gradient is None else [w2_gradient.astype(head.w2.dtype)]))


def _part(arrays: Iterable[mx.array | None], part: slice, after: list[mx.array]) -> list[mx.array | None]:
    """Rows of arrays that wait for `after`: without that the graph may run all chunks side by side."""
    cut = [None if array is None else array[part] for array in arrays]
    return [None if array is None else mx.depends(array, after) if after else array for array in cut]


def _chunk(
    hidden: mx.array, latent: mx.array | None, head: Head, goal: Goal
) -> tuple[mx.array, mx.array | None, mx.array, mx.array]:
    """Cross entropy [n], variation [n] or None, gradient of the corrected logits [n, V], base logits [n, V].

    With q and p the distributions of draft and target: d CE / d logits = q - target, and
    d sum|q - p| / d logits = q (s - sum q s) with s = sign(q - p).
    """
    base = head.base(hidden)
    logits = head.corrected(base, latent)
    q = softmax(logits)
    p = None if goal.target is None else softmax(head.target(goal.target))
    log_norm = _log_norm(logits, q)
    weight = goal.ce_weights[:, None]
    if goal.labels is None:
        ce = log_norm - (p * logits).sum(axis=-1)
        return ce, mx.abs(q - p).sum(axis=-1), (q - p) * weight, base
    label = goal.labels[:, None]
    ce = log_norm - mx.take_along_axis(logits, label, axis=-1)[:, 0]
    variation, slope = None, weight
    if p is not None:
        difference = q - p
        variation = mx.abs(difference).sum(axis=-1)
        if goal.tv_weights is not None:
            sign, tv = mx.sign(difference), goal.tv_weights[:, None]
            slope = sign * tv + (weight - tv * (sign * q).sum(axis=-1, keepdims=True))
    slope = q * slope
    at_label = mx.take_along_axis(slope, label, axis=-1) - weight
    return ce, variation, mx.put_along_axis(slope, label, at_label, axis=-1), base


def _log_norm(logits: mx.array, q: mx.array) -> mx.array:
    """log sum exp of logits [n, V] -> [n], from the softmax that is there already: the largest share is never tiny."""
    return logits.max(axis=-1) - mx.log(q.max(axis=-1))


def _through_cap(slope: mx.array, base: mx.array, head: Head) -> mx.array:
    """Gradient of the uncapped base logits: d tanh(u / cap) cap = 1 - (base / cap)^2."""
    return slope if head.cap is None else slope * (1 - mx.square(base / head.cap))
