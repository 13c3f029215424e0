"""Exponentials for training on a CPU: mlx's own take 12 ns a number there, these take 3.5.

The wheel's CPU kernels call libm number by number. Range reduction and a polynomial are plain multiplications
and additions, which are bound by memory; exact to 3e-7, that is float32 rounding. Softmax, sigmoid and cross
entropy keep their results for the backward pass instead of computing them again.

`python -m tiny.fast` times both on this machine. Elsewhere than on a CPU nothing here is used.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3

LOG2_E = 1.4426950408889634
# 2^f on [-0.5, 0.5], Taylor: ln(2)^n / n!
TAYLOR = (0.6931471806, 0.2402265070, 0.0555041087, 0.0096181291, 0.0013333558, 0.000154035)


@mx.compile
def exp(x: mx.array) -> mx.array:
    """e to the x in float32: 2^n by setting the exponent's bits, 2^f by a polynomial."""
    y = mx.clip(x, -87, 87) * LOG2_E
    n = mx.floor(y + 0.5)
    power = mx.full((), 0.0)
    for c in reversed(TAYLOR):
        power = (power + c) * (y - n)
    return (1 + power) * mx.view((n.astype(mx.int32) + 127) * (1 << 23), mx.float32)


@mx.custom_function
def softmax(x: mx.array) -> mx.array:
    """Over the last axis."""
    p = exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


@softmax.vjp
def _softmax_vjp(x: mx.array, ct: mx.array, p: mx.array) -> mx.array:
    weighed = ct * p
    return weighed - p * weighed.sum(-1, keepdims=True)


@mx.custom_function
def sigmoid(x: mx.array) -> mx.array:
    """1 / (1 + e^-x)."""
    return 1 / (1 + exp(-x))


@sigmoid.vjp
def _sigmoid_vjp(x: mx.array, ct: mx.array, s: mx.array) -> mx.array:
    return ct * s * (1 - s)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x, as in mlx_lm.models.activations."""
    return gate * sigmoid(gate) * x


def attention(q: mx.array, k: mx.array, v: mx.array, cache: None, scale: float, mask: object) -> mx.array:
    """Causal attention with grouped heads, without a cache (training only)."""
    B, heads, T, D = q.shape
    kv = k.shape[1]
    q = (q * scale).reshape(B, kv, heads // kv * T, D)  # B G rT D: queries of one KV head, one below the other
    scores = (q @ k.swapaxes(-1, -2)).reshape(B, heads, T, T)
    p = softmax(scores + nn.MultiHeadAttention.create_additive_causal_mask(T))
    return (p.reshape(B, kv, heads // kv * T, T) @ v).reshape(B, heads, T, D)


@mx.custom_function
def _cross_entropy(logits: mx.array, one_hot_at: mx.array) -> tuple[mx.array, mx.array]:
    top = logits.max(-1, keepdims=True)
    p = exp(logits - top)
    total = p.sum(-1, keepdims=True)
    chosen = mx.take_along_axis(logits, one_hot_at, axis=-1)
    return mx.log(total) + top - chosen, p / total


@_cross_entropy.vjp
def _cross_entropy_vjp(primals, cts, outputs):  # type: ignore[no-untyped-def]
    logits, at = primals
    ct, p = cts[0], outputs[1]
    grad = ct * p
    chosen = mx.take_along_axis(grad, at, axis=-1) - ct
    return mx.put_along_axis(grad, at, chosen, axis=-1), mx.zeros_like(at)


def cross_entropy(logits: mx.array, tokens: mx.array) -> mx.array:
    """Nats of every position: logits [..., V] against token ids [...]."""
    return _cross_entropy(logits, tokens[..., None])[0].squeeze(-1)


def plain_cross_entropy(logits: mx.array, tokens: mx.array) -> mx.array:
    """The same with mlx's own operations."""
    return nn.losses.cross_entropy(logits, tokens)


@contextmanager
def fast_qwen3(wanted: bool = True) -> Iterator[Callable[[mx.array, mx.array], mx.array]]:
    """While it lasts mlx-lm's Qwen3 computes with the functions above; gives the cross entropy to use."""
    if not wanted:
        yield plain_cross_entropy
        return
    own = qwen3.scaled_dot_product_attention, qwen3.swiglu
    qwen3.scaled_dot_product_attention, qwen3.swiglu = attention, swiglu
    try:
        yield cross_entropy
    finally:
        qwen3.scaled_dot_product_attention, qwen3.swiglu = own


def keep_memory() -> None:
    """Let glibc keep freed memory: mlx's CPU arrays come from malloc, and giving 32 MB back to the system and getting
    it again costs more than most operations on it. Nothing happens on other systems."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        for option, value in ((-8, 1), (-4, 0), (-1, 2**31 - 1), (-2, 2**28)):  # arenas, mmaps, trim and pad bytes
            getattr(libc, "mallopt", lambda *_: 0)(option, value)


def _seconds(function: Callable[[mx.array], mx.array], x: mx.array) -> float:
    mx.eval(function(x))
    start = time.perf_counter()
    for _ in range(5):
        mx.eval(function(x))
    return (time.perf_counter() - start) / 5


def main() -> None:
    """Print nanoseconds a number, mlx's own and these."""
    keep_memory()
    x = mx.random.normal((1024, 4096))
    mx.eval(x)
    for name, own, ours in (("exp", mx.exp, exp), ("sigmoid", mx.sigmoid, sigmoid),
                            ("softmax", lambda x: mx.softmax(x, -1), softmax)):
        print(f"{name}: mlx {1e9 * _seconds(own, x) / x.size:.1f} ns, here {1e9 * _seconds(ours, x) / x.size:.1f} ns")


if __name__ == "__main__":
    main()
