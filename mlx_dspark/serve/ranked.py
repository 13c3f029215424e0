"""The device's part in sharing out rows: the best slots of all requests, by confidences that the host has not seen.

It does what `schedule.ranking.top` does, after the corrections of `schedule.scaling` and `schedule.refine`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from ..schedule import refine, scaling
from ..schedule.lines import Ranked


def share_out(logits: Sequence[mx.array], ranked: Ranked) -> mx.array:
    """Drafts of each request when the best slots of all are verified, int32 [B]; they add up to `ranked.further`.

    logits: confidence logits of each request's proposal [1, n_b]. Equal survivals go by slot, then by request.
    Survivals count by their request's worth. Whatever the logits are (also NaN), a request's slots are a prefix and the
    sum is right.
    """
    lengths, requests = [own.shape[1] for own in logits], len(logits)
    slots = max(lengths)
    raw = mx.concatenate([mx.pad(own, [(0, 0), (0, slots - n)]) for own, n in zip(logits, lengths, strict=True)])
    there = mx.arange(slots) < mx.array(lengths)[:, None]  # [B, N]
    survival = survivals(raw, ranked) * mx.array(ranked.worths or (1.0,))[:, None]  # [B, N]
    survival = mx.where(there, survival, -1).T.flatten()  # [N * B], slot by slot
    place = mx.arange(slots * requests)
    ahead = (survival > survival[:, None]) | ((survival == survival[:, None]) & (place < place[:, None]))
    admitted = ahead.sum(axis=1) < ranked.further
    return admitted.reshape(slots, requests).sum(axis=0).astype(mx.int32)


def survivals(logits: mx.array, ranked: Ranked) -> mx.array:
    """a_1..a_N of confidence logits [B, N], corrected, float32; never rising, as sums in another order might be."""
    return mx.cummin(_number(mx.cumprod(mx.sigmoid(_corrected(logits, ranked)), axis=1)), axis=1)


def _corrected(logits: mx.array, ranked: Ranked) -> mx.array:
    slots, known = logits.shape[1], len(ranked.temperatures)
    logits = logits.astype(mx.float32)
    if known:
        temperatures = mx.array([*ranked.temperatures, *[1.0] * (slots - known)][:slots])
        limits = mx.array([_most(scaling.CLAMP) if slot < known else math.inf for slot in range(slots)])
        logits = mx.clip(logits, -limits, limits) / temperatures
    most = _most(refine.CLAMP)
    logits = mx.clip(logits, -most, most) * ranked.scale
    return mx.clip(logits, -most, most) + mx.array(ranked.shifts)[:, None] if ranked.shifts else logits


def _most(clamp: float) -> float:
    """The logit of a confidence that is as close to 1 as it may be."""
    return math.log((1 - clamp) / clamp)


def _number(values: mx.array) -> mx.array:
    """0 where a broken draft gives no number."""
    return mx.where(values >= 0, values, 0)
