"""transition_sample: a draw from softmax(corrected / temperature); the corrected logits are written once."""

from __future__ import annotations

import mlx.core as mx

from .argmax import correct, fold_last, number, part_outputs
from .launch import Execute, Kernel, Launch
from .scan import HEADER, SAMPLE, STAGE_LATENT, W2, constants, geometry, scan
from .table import Table

SCAN = Kernel("sample", ("base", "slot", "latent", *W2, "keys", "scale"), ("out_value", "out_index", "corrected"),
              scan(STAGE_LATENT, SAMPLE), HEADER)


def reference(
    base: mx.array, latent: mx.array, w2: Table, keys: mx.array, scale: mx.array
) -> tuple[mx.array, mx.array]:
    """Gumbel-max: argmax(corrected * scale + noise), which is a draw from softmax(corrected * scale).

    base [B, V]; latent [B, R]; keys: a random key a request [B, 2]; scale: 1 / temperature, float32 [1].
    Returns token int32 [B] and corrected logits float32 [B, V].
    """
    corrected = correct(base, latent, w2)
    return draw(corrected, keys, scale), corrected


def draw(corrected: mx.array, keys: mx.array, scale: mx.array) -> mx.array:
    """The Gumbel-max draw itself: corrected logits [B, V] -> token int32 [B]."""
    return mx.argmax(corrected * scale + noise(keys, corrected.shape[-1]), axis=-1).astype(mx.int32)


def noise(keys: mx.array, size: int) -> mx.array:
    """Gumbel noise float32 [B, size], each request's from its own key [B, 2]."""
    return mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(keys)


def run(
    execute: Execute, base: mx.array, latent: mx.array, w2: Table, keys: mx.array, scale: mx.array
) -> tuple[mx.array, mx.array]:
    """`reference` in two launches; the kernel makes the bits of `mx.random.gumbel` itself."""
    *parts, corrected = scan_slot(execute, base[:, None], 0, latent, w2, keys[:, None], scale)
    return fold_last(execute, parts)[0], corrected


def scan_slot(
    execute: Execute, base: mx.array, slot: int, latent: mx.array, w2: Table, keys: mx.array, scale: mx.array
) -> list[mx.array]:
    """Partial maxima (value, index) [B, P] and corrected logits [B, V] of one slot; keys [B, N, 2]."""
    requests, slots, rows = base.shape
    cut = geometry(w2, rows, requests)
    shapes, dtypes = part_outputs(cut)
    launch = Launch(constants(w2, cut, rows, slots), cut.grid, cut.threadgroup,
                    (*shapes, (requests, rows)), (*dtypes, mx.float32))
    return execute(SCAN, [base, number(slot), latent.astype(mx.float32), *w2.arrays, keys, scale], launch)
