"""The log-softmax of every distribution here: drafting, accepting, and the trials of their kernels."""

from __future__ import annotations

import mlx.core as mx


def log_softmax(logits: mx.array) -> mx.array:
    """log(softmax(logits)) in float32 over the last axis; -inf stays -inf."""
    logits = logits.astype(mx.float32)
    return logits - logsumexp(logits)


def logsumexp(logits: mx.array, chunk: int = 512) -> mx.array:
    """log(sum(exp(logits))) over the last axis, kept as an axis of one.

    Over a large vocabulary it sums in two stages: mlx's single float32 sum drifts by 2e-4 at 150,000
    terms on the CPU, and the result must normalise a distribution.
    """
    size = logits.shape[-1]
    if size <= 8 * chunk:
        return mx.logsumexp(logits, axis=-1, keepdims=True)
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, -size % chunk)]
    chunks = mx.unflatten(mx.pad(logits, padding, constant_values=-mx.inf), -1, (-1, chunk))
    return mx.logsumexp(mx.logsumexp(chunks, axis=-1), axis=-1, keepdims=True)
