"""Checks of the kernel ops, for any executor: each runs one op on data of its own and compares with the reference.

A check is a function of an `Execute`; it raises AssertionError where the result is wrong. The data are of two
kinds. Whole numbers: every sum is exact in every dtype and order, so results must be equal, and ties abound.
Typical ones: a token may differ where two are equal up to rounding, so each slot is judged by the reference's
logits after the tokens that the kernel itself chose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from emulator import Emulator

from mlx_dspark.bench_kernels import Shape
from mlx_dspark.draft.heads import MARKOV
from mlx_dspark.kernels import accept, argmax, sample, topk, walk
from mlx_dspark.kernels.launch import Execute, Kernel, Launch
from mlx_dspark.kernels.scan import HEADER
from mlx_dspark.kernels.table import Table

MODES = {
    "metal-forward": Emulator(),
    "metal-reverse": Emulator(order="reverse"),
    "metal-random": Emulator(order="random"),
    "cuda-text": Emulator("cuda", order="random"),
    "race": Emulator(order="random", sanitize="thread"),
    "address": Emulator(order="reverse", sanitize="address"),
}
Check = Callable[[Execute], None]
HIDDEN = 96
EXCESS = 1e-5  # added to log q where nothing is to be left of p - q, whatever rounding does
TOLERANCE = 1e-5  # of the largest logit: float32 sums in another order


@dataclass(frozen=True)
class Case:
    """One block. weights: a dtype, or bits of an affine quantisation in groups of `group`.

    data: whole, typical, negative (whole, all below zero), ties (all logits equal), draws (a few best ones, all
    equal), impossible (mostly -inf).
    """

    vocab: int = 1009
    rank: int = 64
    requests: int = 1
    slots: int = 3
    weights: str = "float32"
    group: int = 64
    data: str = "whole"
    base: str = "float32"
    head: str = "vanilla"
    scale: float = 1.0
    k: int = 8  # candidates

    @property
    def bits(self) -> int:
        return int(self.weights) if self.weights in ("8", "4") else 0

    @property
    def whole(self) -> bool:
        return self.data != "typical"


# --- data -----------------------------------------------------------------------------------------------------------


def seeded(*seed: object) -> np.random.Generator:
    """Numbers that are the same on every machine."""
    return np.random.default_rng([*map(ord, "".join(map(repr, seed)))])


def whole_numbers(rng: np.random.Generator, least: int, most: int, shape: Sequence[int]) -> mx.array:
    return mx.array(rng.integers(least, most, shape, endpoint=True).astype(np.float32))


def normal(rng: np.random.Generator, shape: Sequence[int]) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32))


def make_table(case: Case, rows: int, seed: str, width: int | None = None) -> Table:
    """Whole numbers so small that sums are exact in bfloat16; quantised ones differ in every group's scale and bias."""
    rng, width = seeded(case, seed), width or case.rank
    if case.data in ("ties", "draws"):
        return packed_table(case, np.zeros((rows, width), np.uint32), rng) if case.bits else Table(
            mx.zeros((rows, width), dtype=getattr(mx, case.weights)))
    if case.bits:
        return packed_table(case, rng.integers(0, 2**case.bits, (rows, width)).astype(np.uint32), rng)
    return Table(whole_numbers(rng, -1, 1, (rows, width)).astype(getattr(mx, case.weights)))


def packed_table(case: Case, codes: np.ndarray, rng: np.random.Generator) -> Table:
    """A quantised table of these codes [rows, width], its scales and biases small whole numbers (zero for ties)."""
    count = 32 // case.bits
    shifts = (np.arange(count) * case.bits).astype(np.uint32)
    words = (codes.reshape(len(codes), -1, count) << shifts).sum(axis=-1, dtype=np.uint32)
    groups, some = (len(codes), codes.shape[1] // case.group), int(case.data not in ("ties", "draws"))
    return Table(mx.array(words), whole_numbers(rng, -2, 2, groups) * some, whole_numbers(rng, -9, 9, groups) * some,
                 case.bits, case.group)


def make_base(case: Case) -> mx.array:
    """Base logits [B, N, V]."""
    rng, shape = seeded(case, "base"), (case.requests, case.slots, case.vocab)
    if case.data == "typical":
        return (2 * normal(rng, shape)).astype(getattr(mx, case.base))
    if case.data == "ties":
        return mx.full(shape, -3.0, dtype=getattr(mx, case.base))
    if case.data == "draws":
        return mx.array(np.where(rng.random(shape) < 0.04, -1, -2).astype(np.float32)).astype(getattr(mx, case.base))
    base = whole_numbers(rng, -6, 6, shape) * {0: 1, 4: 300, 8: 60_000}[case.bits]  # about as much as the bias
    if case.data == "negative":
        base = base - 240  # in float32 weights below every bias
    if case.data == "impossible":
        rows = seeded(case, "rows").random(shape) < 0.9
        rows[0, 0] = True  # nothing at all is possible in one slot: the first token wins then
        base = mx.where(mx.array(rows), -mx.inf, base)
    return base.astype(getattr(mx, case.base))


def make_latent(case: Case) -> mx.array:
    """A latent a request [B, R]."""
    rng, shape = seeded(case, "latent"), (case.requests, case.rank)
    return normal(rng, shape) if case.data == "typical" else whole_numbers(rng, -1, 1, shape)


def make_keys(case: Case) -> mx.array:
    """Random keys [B, N, 2]."""
    bits = seeded(case, "keys").integers(0, 2**32, (case.requests, case.slots, 2), dtype=np.uint32)
    return mx.array(bits)


def scale_of(case: Case) -> mx.array:
    return mx.array([case.scale], dtype=mx.float32)


def dense(table: Table) -> mx.array:
    """All numbers of a table in float32."""
    return table.take(mx.arange(table.rows))


def make_markov(case: Case) -> tuple[nn.Module, nn.Module]:
    """A head with the case's weights, and one with the same numbers in float32, for the reference."""
    shape = Shape(case.vocab, case.rank, case.slots, HIDDEN)
    head, plain = MARKOV[case.head](shape), MARKOV[case.head](shape)
    mixed = next((name for name in ("gate_proj", "joint_proj") if name in head), None)
    names = ["markov_w1", "markov_w2", *([mixed] if mixed else [])]
    for name in names:
        head[name].weight = typical_weights(case, name, head[name].weight.shape)
    if mixed:
        head[mixed].bias = normal(seeded(case, "bias"), head[mixed].bias.shape)
    if case.bits:
        nn.quantize(head, case.group, case.bits)
    else:
        head.set_dtype(getattr(mx, case.weights))
    if case.whole:
        for name in names[:2]:
            fill(head[name], make_table(case, case.vocab, name))
    for name in names:
        plain[name].weight = dense(Table.of(head[name]))
    if mixed:
        plain[mixed].bias = head[mixed].bias.astype(mx.float32)
    return head.eval(), plain.eval()


def typical_weights(case: Case, name: str, shape: Sequence[int]) -> mx.array:
    """Weights of such a size that the bias weighs about as much as the base logits."""
    spread = 1.0 if name == "markov_w1" else 2 / shape[1] ** 0.5
    return spread * normal(seeded(case, name), shape)


def fill(layer: nn.Module, table: Table) -> None:
    layer.weight = table.weight
    if table.bits:
        layer.scales, layer.biases = table.scales, table.biases


# --- comparisons ----------------------------------------------------------------------------------------------------


def equal(what: str, found: mx.array, expected: mx.array) -> None:
    wrong = np.argwhere(np.array(found != expected))
    assert found.shape == expected.shape and not len(wrong), (
        f"{what} differs in {len(wrong)} places, first at {wrong[0].tolist()}: "
        f"{np.array(found)[tuple(wrong[0])]}, not {np.array(expected)[tuple(wrong[0])]}")


def close(what: str, found: mx.array, expected: mx.array, tolerance: float = TOLERANCE) -> None:
    finite = mx.where(mx.isinf(expected), 0, expected)
    limit = tolerance * max(1.0, mx.abs(finite).max().item())
    same = (found == expected) | (mx.abs(found - expected) <= limit)
    assert found.shape == expected.shape and same.all().item(), f"{what} differs in {(~same).sum().item()} places"


def best_by(what: str, tokens: mx.array, scores: mx.array) -> None:
    """Each token [...] has the best score of [..., V], up to rounding."""
    chosen = mx.take_along_axis(scores, tokens[..., None].astype(mx.int32), axis=-1)[..., 0]
    close(f"score of {what}", chosen, scores.max(axis=-1))


# --- transition_argmax and transition_sample ------------------------------------------------------------------------


def check_argmax(case: Case, execute: Execute) -> None:
    base, latent, w2 = make_base(case)[:, 0], make_latent(case), make_table(case, case.vocab, "w2")
    if case.data == "typical":
        w2 = Table.of(make_markov(case)[0].markov_w2)
        token, value = argmax.run(execute, base, latent, w2)
        corrected = argmax.correct(base, latent, Table(dense(w2)))
        best_by("token", token, corrected)
        close("value", value, corrected.max(axis=-1))
        return
    token, value = argmax.run(execute, base, latent, w2)
    expected = argmax.reference(base, latent, w2)
    equal("token", token, expected[0])
    equal("value", value, expected[1])


def check_both_kinds(case: Case, execute: Execute) -> None:
    """Whole and typical numbers: the kernel is built once for both."""
    check_argmax(case, execute)
    check_argmax(replace(case, data="typical"), execute)


def check_every_row_wins(case: Case, execute: Execute) -> None:
    """Each request's latent is a row of W2, whose numbers are 1 and -1: that row is its own best."""
    signs = np.unique(seeded(case).integers(0, 2, (2 * case.vocab, case.rank)), axis=0).astype(np.uint32)
    signs = seeded(case, "order").permutation(signs)[: case.vocab]
    assert len(signs) == case.vocab
    if case.bits:
        table = packed_table(case, signs, seeded(case))
        w2 = replace(table, scales=mx.full(table.scales.shape, 2.0), biases=mx.full(table.biases.shape, -1.0))
    else:
        w2 = Table((mx.array(signs).astype(mx.float32) * 2 - 1).astype(getattr(mx, case.weights)))
    base = mx.full((case.vocab, case.vocab), -500.0)
    token, value = argmax.run(execute, base, dense(w2), w2)
    equal("token", token, mx.arange(case.vocab))
    equal("value", value, mx.full((case.vocab,), case.rank - 500.0))


def check_base_wins(case: Case, tokens: Sequence[int], execute: Execute) -> None:
    """A request for each of the tokens, whose base logit is above all others; all are below zero."""
    base = mx.where(mx.arange(case.vocab) == mx.array(tokens)[:, None], -7.0, -9.0)
    w2 = make_table(replace(case, data="ties"), case.vocab, "w2")
    found, _ = argmax.run(execute, base, mx.zeros((len(tokens), case.rank)), w2)
    equal("token", found, mx.array(tokens))


def check_sample(case: Case, execute: Execute) -> None:
    base, latent, w2 = make_base(case)[:, 0], make_latent(case), make_table(case, case.vocab, "w2")
    keys, scale = make_keys(case)[:, 0], scale_of(case)
    token, corrected = sample.run(execute, base, latent, w2, keys, scale)
    expected = sample.reference(base, latent, w2, keys, scale)
    equal("corrected", corrected, expected[1])
    best_by("token", token, corrected * scale + sample.noise(keys, case.vocab))
    equal("token", token, expected[0])


NOISE_PROBE = Kernel("noise_probe", ("keys",), ("noise",), """
    const uint at = threadgroup_position_in_grid.x * 256 + thread_position_in_threadgroup.x;
    if (at < SIZE) noise[at] = ds_gumbel(keys[0], keys[1], at, SIZE);
""", HEADER)


LARGEST_WORD = 26_355  # among the first 1001 words of this seed one rounds to 2^32, which must not become infinite


def check_noise(size: int, seed: int, execute: Execute) -> None:
    """The kernels' noise is that of mx.random.gumbel, word by word: another word would be another number."""
    key = mx.random.key(seed)
    launch = Launch((("SIZE", size),), (-(-size // 256) * 256, 1, 1), (256, 1, 1), ((size,),), (mx.float32,))
    close("noise", execute(NOISE_PROBE, [key], launch)[0], mx.random.gumbel((size,), key=key))


# --- the walk -------------------------------------------------------------------------------------------------------


def after(
    markov: nn.Module, base: mx.array, projected: mx.array | None, anchor: mx.array, tokens: mx.array
) -> mx.array:
    """Corrected logits float32 [B, N, V] of the reference's walk that takes these tokens [B, N]."""
    kept: list[mx.array] = []

    def choose(corrected: mx.array) -> mx.array:
        kept.append(corrected.astype(mx.float32))
        return tokens[:, len(kept) - 1]

    walk.reference(markov.step, base, projected, anchor, markov.start(len(anchor)), choose)
    return mx.stack(kept, axis=1)


def block(case: Case, plain: nn.Module) -> tuple[mx.array, mx.array | None, mx.array]:
    """base [B, N, V], projected and anchor [B] of a block."""
    hidden = normal(seeded(case, "hidden"), (case.requests, case.slots, HIDDEN))
    anchor = mx.array(seeded(case, "anchor").integers(0, case.vocab, (case.requests,)))
    return make_base(case), plain.project(hidden), anchor


def check_walk_greedy(case: Case, execute: Execute) -> None:
    markov, plain = make_markov(case)
    base, projected, anchor = block(case, plain)
    tokens = walk.run_greedy(execute, markov.chain(), base, projected, anchor)
    corrected = after(plain, base, projected, anchor, tokens)
    if case.whole:
        equal("token", tokens, mx.argmax(corrected, axis=-1))
        equal("token of the head itself", tokens, mx.argmax(after(markov, base, projected, anchor, tokens), axis=-1))
    else:
        best_by("token", tokens, corrected)


def check_walk_sampled(case: Case, execute: Execute) -> None:
    markov, plain = make_markov(case)
    base, projected, anchor = block(case, plain)
    keys, scale = make_keys(case), scale_of(case)
    tokens, kept = walk.run_sampled(execute, markov.chain(), base, projected, anchor, keys, scale)
    corrected = after(plain, base, projected, anchor, tokens)
    close("corrected", kept, corrected, 0.0 if case.whole else TOLERANCE)
    noise = mx.stack([sample.noise(keys[:, slot], case.vocab) for slot in range(case.slots)], axis=1)
    best_by("token", tokens, kept * scale + noise)


# --- transition_topk ------------------------------------------------------------------------------------------------


def reference_flags(
    case: Case, chain: walk.Chain, base: mx.array, anchor: mx.array, chosen: topk.Candidates, bound: mx.array
) -> tuple[mx.array, mx.array]:
    """Tokens and certificates [B, N] of the walk by candidates, from the op's reference and the full pass."""
    token, tokens, flags = anchor, [], []
    for slot in range(case.slots):
        latent = chain.w1.take(token)
        best, _, sure = topk.reference(
            base[:, slot], latent, chain.w2, chosen.tokens[:, slot], chosen.floor[:, slot], bound[token])
        token = mx.where(sure, best, argmax.reference(base[:, slot], latent, chain.w2)[0])
        tokens.append(token)
        flags.append(sure)
    return mx.stack(tokens, axis=1), mx.stack(flags, axis=1)


def spread_base(case: Case) -> mx.array:
    """Base logits [B, N, V], whole numbers: in turn K, K / 2 or no tokens stand out, or they are spread widely.

    Where K stand out the certificate holds and the bias decides which of them is the best.
    """
    rng, shape = seeded(case, "spread"), (case.requests, case.slots, case.vocab)
    base = rng.integers(-3, 4, shape)
    for b, n in np.ndindex(*shape[:2]):
        kind = (b + n) % 4
        if kind == 3:
            base[b, n] = np.round(rng.standard_normal(case.vocab) * 12)
        else:
            base[b, n, rng.permutation(case.vocab)[: (case.k, 0, -(-case.k // 2))[kind]]] += 100
    return mx.array(base.astype(np.float32))


def exact_bound(chain: walk.Chain) -> mx.array:
    """max_v W2[v] . W1[y] with nothing added: sums of whole numbers have no rounding."""
    return (dense(chain.w1) @ dense(chain.w2).T).max(axis=-1)


def check_topk_walk(case: Case, execute: Execute, least: tuple[int, int] = (1, 1)) -> None:
    """least: certified and other slots that there must be, so that both ways are seen."""
    markov, _ = make_markov(case)
    chain, base, bound = markov.chain(), spread_base(case), exact_bound(markov.chain())
    anchor = mx.array(seeded(case, "anchor").integers(0, case.vocab, (case.requests,)))
    chosen = topk.candidates(base, case.k)
    tokens, certified = topk.run_walk(execute, chain.w1, chain.w2, bound, base, anchor, chosen)
    expected, flags = reference_flags(case, chain, base, anchor, chosen, bound)
    assert flags.sum().item() >= least[0] and (~flags).sum().item() >= least[1], "the data show one way only"
    equal("token", tokens, expected)
    equal("token of the full walk", tokens, mx.argmax(after(markov, base, None, anchor, tokens), axis=-1))
    equal("certified", certified, flags.astype(mx.int32))


def check_certificate_is_strict(case: Case, execute: Execute) -> None:
    """The best candidate only equals floor + bound, and a lower token outside equals it too: that one wins."""
    weights = np.zeros((300, 4), np.float32)
    weights[5, 0] = 1
    w1 = Table(mx.array(np.eye(4, dtype=np.float32)[[0] * 300]))
    base = np.full((1, 1, 300), -50.0, np.float32)
    base[0, 0, [5, 200, 201]] = [9, 10, 9]
    chosen = topk.Candidates(mx.array([[[201, 200]]], dtype=mx.int32), mx.array([[9.0]]))
    for bound, token, sure in ((1.0, 5, 0), (0.5, 200, 1)):
        tokens, certified = topk.run_walk(execute, w1, Table(mx.array(weights)), mx.full((300,), bound),
                                          mx.array(base), mx.array([7]), chosen)
        assert (tokens.item(), certified.item()) == (token, sure)


# --- accept ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Test:
    """One accept test. q: other (near p), same (equal to p, so that no residual is left), one (certain drafts)."""

    __test__ = False  # no test of pytest's

    vocab: int = 1009
    requests: int = 2
    slots: int = 3
    data: str = "typical"  # typical, ties (few different logits), impossible (mostly -inf), peaked
    dtype: str = "float32"
    scale: float = 1.0
    q: str = "other"
    limited: bool = False


def make_limits(test: Test) -> mx.array | None:
    """How many drafts were verified [B]: none, all, and numbers before, at and behind the wrong draft; None for all."""
    if not test.limited:
        return None
    return (mx.arange(test.requests, dtype=mx.int32) // 2 + mx.arange(test.requests) % 2) % (test.slots + 1)


def make_logits(test: Test) -> mx.array:
    """Target logits [B, N + 1, V]."""
    rng, shape = seeded(test, "logits"), (test.requests, test.slots + 1, test.vocab)
    heights = mx.array(np.add.outer(np.arange(test.requests), np.arange(test.slots + 1))[..., None] % 3 * 2)
    if test.data == "ties":
        return (whole_numbers(rng, -3, -1, shape) - heights).astype(getattr(mx, test.dtype))
    logits = 3 * normal(rng, shape) + heights  # softmax sums differ by row
    if test.data == "impossible":
        possible = rng.random(shape) < 0.1
        possible[..., -1] = True
        logits = mx.where(mx.array(possible), logits, -mx.inf)
    return logits.astype(getattr(mx, test.dtype))


def log_softmax(logits: mx.array, scale: float) -> mx.array:
    logits = logits.astype(mx.float32)
    logits = (logits - logits.max(axis=-1, keepdims=True)) * scale
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def check_accept_greedy(test: Test, execute: Execute) -> None:
    """Request b accepts b drafts: the others differ from the target's best."""
    logits = make_logits(test)
    best = mx.argmax(logits, axis=-1).astype(mx.int32)[:, : test.slots]
    right = mx.arange(test.slots) != mx.arange(test.requests)[:, None] % (test.slots + 1)
    drafts = mx.where(right, best, (best + 1) % test.vocab)
    limits = make_limits(test)
    accepted, tokens = accept.run_greedy(execute, drafts, logits, limits)
    expected = accept.greedy_reference(drafts, logits, limits)
    equal("accepted", accepted, expected[0])
    equal("tokens", tokens, expected[1])


def check_every_token_is_best(size: int, execute: Execute) -> None:
    """The accept test's argmax with a winner walked through every token, as many requests as tokens."""
    logits = mx.where(mx.eye(size)[:, None] > 0, -5.0, -6.0)
    accepted, tokens = accept.run_greedy(execute, mx.zeros((size, 0), dtype=mx.int32), logits)
    equal("tokens", tokens[:, 0], mx.arange(size))
    equal("accepted", accepted, mx.zeros((size,), dtype=mx.int32))


def accept_block(test: Test) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
    """drafts, log_q, logits, uniforms, keys: request b's draft b mod (N + 1) is sure to fail, those before to pass."""
    logits, rows = make_logits(test), test.slots
    keys = mx.random.split(mx.random.key(test.vocab), test.requests)
    if not rows:
        nothing = mx.zeros((test.requests, 0))
        return nothing.astype(mx.int32), mx.zeros((test.requests, 0, test.vocab)), logits, nothing, keys
    log_p = log_softmax(logits, test.scale)[:, :rows]
    if test.q == "same":
        log_q = log_p + EXCESS
    else:
        moved = logits[:, :rows].astype(mx.float32) + normal(seeded(test, "q"), log_p.shape)
        log_q = log_softmax(moved, test.scale)
    fails = mx.arange(rows) == mx.arange(test.requests)[:, None] % (rows + 1)
    drafts = mx.where(fails, mx.argmax(log_q, axis=-1), mx.argmax(log_p, axis=-1)).astype(mx.int32)
    if test.q == "one":
        log_q = mx.where(mx.arange(test.vocab) == drafts[..., None], 0.0, -mx.inf)
    uniforms = mx.where(fails, 1e9, 1e-6)  # beyond [0, 1): u q(x) > p(x) at the likeliest x of q, whatever p is
    return drafts, log_q, logits, uniforms, keys


def check_accept_sampled(test: Test, execute: Execute) -> None:
    drafts, log_q, logits, uniforms, keys = accept_block(test)
    log_p, limits = log_softmax(logits, test.scale), make_limits(test)
    expected = accept.sampled_reference(drafts, log_q, log_p, uniforms, keys, limits)
    passing = mx.arange(test.requests) % (test.slots + 1)
    equal("accepted of the reference", expected[0], passing if limits is None else mx.minimum(passing, limits))
    accepted, tokens = accept.run_sampled(
        execute, drafts, log_q, logits, mx.array([test.scale], dtype=mx.float32), uniforms, keys, limits)
    equal("accepted", accepted, expected[0])
    equal("tokens", tokens, expected[1])


def check_small_residual(same: bool, execute: Execute) -> None:
    """Two tokens are possible, and the residual is one of them; with q = p nothing is left of it and p is used."""
    requests, size, two = 12, 600, [259, 450]  # in other SIMD-groups and threadgroups than the first
    row = np.full(size, -np.inf, np.float32)
    row[two] = 0
    logits = mx.broadcast_to(mx.array(row), (requests, 2, size))
    row[two] = np.log([0.5, 0.5]) + EXCESS if same else np.log([0.99, 0.01])
    log_q = mx.broadcast_to(mx.array(row), (requests, 1, size))
    drafts, uniforms = mx.full((requests, 1), two[0], dtype=mx.int32), mx.full((requests, 1), 1e9)
    keys = mx.random.split(mx.random.key(0), requests)
    expected = accept.sampled_reference(drafts, log_q, log_softmax(logits, 1.0), uniforms, keys)
    assert set(expected[1][:, 0].tolist()) == ({*two} if same else {two[1]})
    accepted, tokens = accept.run_sampled(execute, drafts, log_q, logits, mx.array([1.0]), uniforms, keys)
    equal("accepted", accepted, expected[0])
    equal("tokens", tokens, expected[1])


def check_accept_uniforms(test: Test, execute: Execute) -> None:
    """Accept tests close to their limit: u is p / q, a little less or a little more."""
    drafts, log_q, logits, _, keys = accept_block(test)
    drafts = mx.argsort(-logits.astype(mx.float32), axis=-1)[:, : test.slots, 3].astype(mx.int32)
    log_p = log_softmax(logits, test.scale)
    ratio = mx.exp(mx.take_along_axis(log_p[:, : test.slots] - log_q, drafts[..., None], axis=-1))[..., 0]
    nudge = mx.where(mx.arange(test.slots) < mx.arange(test.requests)[:, None], 0.999, 1.001)
    uniforms = ratio * nudge
    expected = accept.sampled_reference(drafts, log_q, log_p, uniforms, keys)
    found = accept.run_sampled(
        execute, drafts, log_q, logits, mx.array([test.scale], dtype=mx.float32), uniforms, keys)
    equal("accepted", found[0], mx.minimum(mx.arange(test.requests), test.slots))
    equal("accepted of the reference", expected[0], found[0])
    equal("tokens", found[1], expected[1])


# --- the table ------------------------------------------------------------------------------------------------------

FORMATS = [("float32", 64), ("float16", 64), ("bfloat16", 64), ("8", 32), ("8", 64), ("8", 128), ("4", 32), ("4", 64),
           ("4", 128)]  # fmt: skip
ONE_GROUP = [("float32", 64), ("float16", 64), ("bfloat16", 64), ("8", 64), ("4", 64)]


def _name(weights: str, group: int) -> str:
    return f"{weights}bit-group{group}" if weights in ("8", "4") else weights


def _formats(what: str, check: Callable, formats: Sequence[tuple[str, int]], **changes) -> dict[str, Check]:
    return {f"{what} {_name(weights, group)}": partial(check, Case(
        weights=weights, group=group, rank=128, vocab=301, **changes)) for weights, group in formats}


@cache
def core() -> dict[str, Check]:
    """One check of every op and kernel: these run in every mode."""
    return {
        "argmax": partial(check_argmax, Case(requests=5, weights="8")),
        "sample": partial(check_sample, Case(requests=5, weights="bfloat16", vocab=777)),
        "walk": partial(check_walk_greedy, Case(requests=5, weights="4", group=32)),
        "walk sampled": partial(check_walk_sampled, Case(requests=2, weights="float16", vocab=600)),
        "walk gated": partial(check_walk_greedy, Case(requests=2, head="gated", rank=36, data="typical")),
        "walk rnn": partial(check_walk_sampled, Case(requests=2, head="rnn", weights="bfloat16", data="typical")),
        "topk": partial(check_topk_walk, Case(requests=3, slots=4, rank=16)),
        "accept greedy": partial(check_accept_greedy, Test(requests=5)),
        "accept sampled": partial(check_accept_sampled, Test(requests=5)),
    }


@cache
def wide() -> dict[str, Check]:
    """What else there is of data and shapes: each runs in one mode, and on every device."""
    return {
        **_formats("argmax", check_both_kinds, FORMATS, requests=2),
        **_formats("every row wins", check_every_row_wins, ONE_GROUP),
        **_formats("walk", check_walk_sampled, ONE_GROUP, requests=2, slots=2),
        "every base logit wins": partial(check_base_wins, Case(vocab=530, rank=4), list(range(530))),
        "base logits win in two steps": partial(check_base_wins, Case(vocab=65_837, rank=4), [
            0, 255, 256, 511, 512, 33_023, 65_535, 65_536, 65_791, 65_792, 65_836]),
        "argmax of negative logits": partial(check_argmax, Case(data="negative", requests=2)),
        "argmax among equals": partial(check_argmax, Case(data="ties", requests=2)),
        "argmax among a few equals": partial(check_argmax, Case(data="draws", requests=9, rank=4)),
        "argmax of impossible tokens": partial(check_argmax, Case(data="impossible", requests=2)),
        "argmax of three tokens": partial(check_argmax, Case(vocab=3, rank=4, requests=3)),
        "argmax of one threadgroup": partial(check_argmax, Case(vocab=256)),
        "argmax of one row more": partial(check_argmax, Case(vocab=257, rank=8)),
        "argmax of few rows and two tiles": partial(check_argmax, Case(vocab=37, requests=9, rank=12)),
        "argmax of half base logits": partial(check_argmax, Case(base="bfloat16", weights="bfloat16", requests=2)),
        "argmax in two steps": partial(check_argmax, Case(vocab=65_537 + 300, rank=8, requests=2)),
        "sample among equals": partial(check_sample, Case(data="ties", requests=2)),
        "sample of impossible tokens": partial(check_sample, Case(data="impossible", requests=2)),
        "sample of an even vocabulary": partial(check_sample, Case(vocab=512, rank=4, requests=2, scale=0.25)),
        "sample when cold": partial(check_sample, Case(scale=100.0, requests=2)),
        "sample in two steps": partial(check_sample, Case(vocab=70_001, rank=4, data="ties")),
        "argmax of two pieces a lane": partial(check_argmax, Case(vocab=300, rank=256, weights="8", requests=2)),
        "walk of one slot": partial(check_walk_greedy, Case(slots=1)),
        "walk of seven slots": partial(check_walk_greedy, Case(slots=7, vocab=257, requests=2)),
        "walk of negative logits": partial(check_walk_greedy, Case(data="negative", vocab=300, requests=2)),
        "walk of impossible tokens": partial(check_walk_greedy, Case(data="impossible", vocab=300)),
        "walk in two steps": partial(check_walk_greedy, Case(vocab=65_600, rank=4, slots=2)),
        "walk of half base logits": partial(check_walk_greedy, Case(base="float16", weights="float16", vocab=300)),
        **{f"walk {head} {_name(weights, group)}": partial(check_walk_sampled, Case(
            head=head, weights=weights, group=group, rank=64, vocab=333, slots=3, requests=2, data="typical"))
           for head, weights, group in (
               ("gated", "float16", 64), ("gated", "8", 32), ("rnn", "8", 32), ("rnn", "4", 32))},
        "walk gated of five requests": partial(check_walk_greedy, Case(
            head="gated", requests=5, slots=7, vocab=333, data="typical")),
        "walk rnn of five requests": partial(check_walk_greedy, Case(
            head="rnn", requests=5, slots=7, vocab=333, data="typical")),
        "walk rnn of rank 128": partial(check_walk_sampled, Case(head="rnn", rank=128, vocab=300, data="typical")),
        "walk rnn of rank 20": partial(check_walk_sampled, Case(head="rnn", rank=20, vocab=333, data="typical")),
        "topk of quantised weights": partial(check_topk_walk, Case(
            requests=2, weights="4", group=32, rank=32), least=(0, 1)),
        "topk of half weights": partial(check_topk_walk, Case(requests=2, weights="bfloat16", rank=16, vocab=520)),
        "topk with more candidates than threads": partial(check_topk_walk, Case(requests=2, k=300, rank=8)),
        "topk of one candidate": partial(check_topk_walk, Case(requests=3, k=1, vocab=300), least=(0, 1)),
        "topk of all tokens": partial(check_topk_walk, Case(
            requests=2, k=300, vocab=300, rank=8), least=(1, 0)),
        "the certificate is strict": partial(check_certificate_is_strict, Case()),
        "noise of an odd size": partial(check_noise, 1001, 1),
        "noise of an even size": partial(check_noise, 512, 2),
        "noise of sizes one to three": lambda execute: [check_noise(size, 3, execute) for size in (1, 2, 3)],
        "noise at the largest word": partial(check_noise, 1001, LARGEST_WORD),
        "every token is best": partial(check_every_token_is_best, 515),
        "accept greedy among equals": partial(check_accept_greedy, Test(data="ties", requests=5)),
        "accept greedy of half logits": partial(check_accept_greedy, Test(dtype="bfloat16", requests=3)),
        "accept greedy of impossible tokens": partial(check_accept_greedy, Test(data="impossible")),
        "accept greedy without drafts": partial(check_accept_greedy, Test(slots=0)),
        "accept greedy of seven drafts": partial(check_accept_greedy, Test(slots=7, requests=8, vocab=300)),
        "accept greedy of limited drafts": partial(check_accept_greedy, Test(requests=8, limited=True)),
        "accept greedy in two steps": partial(check_accept_greedy, Test(vocab=16_900, slots=1)),
        "accept greedy of five tokens": partial(check_accept_greedy, Test(vocab=5, requests=4)),
        "accept sampled near the limit": partial(check_accept_uniforms, Test(requests=4)),
        "accept sampled of half logits": partial(check_accept_sampled, Test(dtype="float16", requests=4)),
        "accept sampled where p is q": partial(check_accept_sampled, Test(requests=4, q="same")),
        "accept sampled of a small residual": partial(check_small_residual, False),
        "accept sampled without a residual": partial(check_small_residual, True),
        "accept sampled of certain drafts": partial(check_accept_sampled, Test(requests=4, q="one")),
        "accept sampled of impossible tokens": partial(check_accept_sampled, Test(requests=4, data="impossible")),
        "accept sampled among equals": partial(check_accept_sampled, Test(requests=4, data="ties", vocab=514)),
        "accept sampled when cold": partial(check_accept_sampled, Test(requests=4, scale=100.0)),
        "accept sampled when hot": partial(check_accept_uniforms, Test(requests=4, scale=0.5, vocab=300)),
        "accept sampled without drafts": partial(check_accept_sampled, Test(slots=0)),
        "accept sampled of seven drafts": partial(check_accept_sampled, Test(slots=7, requests=8, vocab=300)),
        "accept sampled of limited drafts": partial(check_accept_sampled, Test(requests=8, vocab=300, limited=True)),
        "accept sampled in two steps": partial(check_accept_sampled, Test(vocab=16_900, slots=1)),
        "accept sampled of three tokens": partial(check_accept_sampled, Test(vocab=3, requests=4)),
    }


def large() -> Check:
    """Qwen3's vocabulary and the rank of its drafts."""
    return partial(check_argmax, Case(vocab=151_936, rank=256, weights="bfloat16"))
