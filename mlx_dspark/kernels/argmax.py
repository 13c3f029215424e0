"""transition_argmax: the best token under base logits plus transition bias; nothing of size V is written."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from .launch import Execute, Kernel, Launch
from .scan import ARGMAX, HEADER, STAGE_LATENT, W2, Geometry, constants, geometry, last_fold, scan
from .table import Table
from .text import NONE, THREADS, fold

PARTS = ("part_value", "part_index")

SCAN = Kernel("argmax", ("base", "slot", "latent", *W2), ("out_value", "out_index"),
              scan(STAGE_LATENT, ARGMAX), HEADER)
LAST = Kernel("fold", PARTS, ("token", "value"), last_fold(fold("group", "best")), HEADER)


def reference(base: mx.array, latent: mx.array, w2: Table) -> tuple[mx.array, mx.array]:
    """base [B, V], latent [B, R], w2 [rows >= V, R] -> token int32 [B], its corrected logit float32 [B].

    The lowest of equal tokens wins.
    """
    corrected = correct(base, latent, w2)
    token = best(corrected)  # [B]
    return token, mx.take_along_axis(corrected, token[:, None], axis=-1)[:, 0]


def best(logits: mx.array) -> mx.array:
    """The best token of logits [..., V], the lowest of equals: int32 [...]."""
    return mx.argmax(logits, axis=-1).astype(mx.int32)


def correct(base: mx.array, latent: mx.array, w2: Table) -> mx.array:
    """Corrected logits U + W2 latent in float32 [B, V]."""
    return base.astype(mx.float32) + w2.times(latent)[:, : base.shape[-1]].astype(mx.float32)


def run(execute: Execute, base: mx.array, latent: mx.array, w2: Table) -> tuple[mx.array, mx.array]:
    """`reference` in two launches: the pass over W2, and the fold of its partial maxima."""
    return fold_last(execute, scan_slot(execute, base[:, None], 0, latent, w2))


def scan_slot(execute: Execute, base: mx.array, slot: int, latent: mx.array, w2: Table) -> list[mx.array]:
    """Partial maxima (value, index) [B, P] of one slot; base [B, N, V], latent float32 [B, R]."""
    requests, slots, rows = base.shape
    cut = geometry(w2, rows, requests)
    launch = Launch(constants(w2, cut, rows), cut.grid, cut.threadgroup, *part_outputs(cut))
    return execute(SCAN, [base, numbers(slot, slots), latent.astype(mx.float32), *w2.arrays], launch)


def fold_last(execute: Execute, parts: list[mx.array]) -> tuple[mx.array, mx.array]:
    """Partial maxima [B, P] of the last pass -> token int32 [B], value float32 [B]."""
    requests, count = parts[0].shape
    launch = Launch((("NPART", count),), (THREADS * requests, 1, 1), (THREADS, 1, 1),
                    ((requests,), (requests,)), (mx.int32, mx.float32))
    token, value = execute(LAST, parts, launch)
    return token, value


def begin(anchor: mx.array, cut: Geometry) -> list[mx.array]:
    """Partial maxima [B, P] that fold to the anchor [B]: the first slot is then launched like every other."""
    rest = [(0, 0), (0, cut.parts - 1)]
    return [mx.pad(mx.zeros((len(anchor), 1)), rest, constant_values=-mx.inf),
            mx.pad(anchor.astype(mx.uint32)[:, None], rest, constant_values=NONE)]


def part_outputs(cut: Geometry) -> tuple[tuple[tuple[int, ...], ...], tuple[mx.Dtype, ...]]:
    """Shapes and dtypes of a pass's partial maxima."""
    return ((cut.requests, cut.parts), (cut.requests, cut.parts)), (mx.float32, mx.uint32)


@cache
def numbers(*values: int) -> mx.array:
    """A few small numbers as a kernel takes them: uint32 [count]."""
    return mx.array(values, dtype=mx.uint32)
