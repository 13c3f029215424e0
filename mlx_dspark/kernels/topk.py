"""transition_topk: the argmax of a slot from a few candidates, with a certificate that it is the argmax.

The candidates are the K best base logits of the slot, found once a block. Every other token v has a base
logit of at most `floor` (the K-th) and a bias of at most bound[y] = max_v W2[v] . W1[y] for the token y
before it. So if the best candidate beats floor + bound[y] it is the argmax; otherwise the full pass runs.
Only a vanilla head has such a bound: its latent is a function of one token.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .argmax import PARTS, fold_last, number, part_outputs
from .argmax import reference as full_pass
from .launch import Execute, Kernel, Launch
from .scan import ARGMAX, HEADER, STAGE_TOKEN, W1, W2, constants, first_table, geometry, scan
from .table import Table
from .text import FOLD_STORAGE, THREADS, fold

K = 256
TRIED = 256  # slots before a low share of certificates ends the use of candidates
ROUNDING = 2**-23  # one unit in the last place of float32


class Candidates(NamedTuple):
    """The K best base logits of every slot: tokens int32 [B, N, K], and the lowest of them float32 [B, N]."""

    tokens: mx.array
    floor: mx.array


def candidates(base: mx.array, k: int = K) -> Candidates:
    """Of base logits [B, N, V]; k is cut to V."""
    k = min(k, base.shape[-1])
    tokens = mx.argpartition(-base, k - 1, axis=-1)[..., :k].astype(mx.int32)
    floor = mx.take_along_axis(base, tokens, axis=-1).min(axis=-1)
    return Candidates(tokens, floor.astype(mx.float32))


def bounds(w1: Table, w2: Table, chunk: int = 256) -> mx.array:
    """bound[y] = max_v W2[v] . W1[y], float32 [rows of W1], raised by what rounding can add to such a sum.

    Costs one product of the two tables: rows * rows * R multiplications.
    """
    full = w2.take(mx.arange(w2.rows))  # [V, R]
    largest = mx.abs(full).max(axis=0)  # [R]
    out = []
    for start in range(0, w1.rows, chunk):
        rows = w1.take(mx.arange(start, min(start + chunk, w1.rows)))  # [chunk, R]
        slack = 2 * w2.width * ROUNDING * (mx.abs(rows) @ largest)
        out.append((rows @ full.T).max(axis=-1) + slack)
        mx.eval(out[-1])
    return mx.concatenate(out)


def reference(
    base: mx.array, latent: mx.array, w2: Table, tokens: mx.array, floor: mx.array, bound: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """The best candidate of a slot, and whether it is certainly the best token.

    base [B, V], latent [B, R], candidates' tokens [B, K] and floor [B], bound [B] of the token before.
    Returns token int32 [B], its corrected logit float32 [B], certified bool [B]: the certificate is
    strict, so that no token outside can even be equal.
    """
    bias = (w2.take(tokens) @ latent.astype(mx.float32)[..., None])[..., 0]  # [B, K]
    totals = mx.take_along_axis(base, tokens, axis=-1).astype(mx.float32) + bias
    value = totals.max(axis=-1)
    token = mx.where(totals == value[:, None], tokens, base.shape[-1]).min(axis=-1)  # the lowest of equals
    return token.astype(mx.int32), value, value > floor + bound


class CertifiedWalk:
    """The greedy walk of a vanilla head by candidates, for a device that the host waits for anyway.

    It reads one flag a slot: where the certificate fails, the full pass runs. The share of certified slots
    decides whether it goes on: below `least` the candidates cost more than they save.
    bound: those of `bounds` [rows of W1].
    """

    def __init__(self, w1: Table, w2: Table, bound: mx.array, least: float = 0.0, k: int = K):
        self._w1, self._w2, self._bound, self._least, self._k = w1, w2, bound, least, k
        self.slots = self.certified = 0

    @property
    def share(self) -> float | None:
        """Certified slots of all, None before the first."""
        return self.certified / self.slots if self.slots else None

    @property
    def pays(self) -> bool:
        return self.slots < TRIED or self.certified >= self._least * self.slots

    def __call__(self, base: mx.array, projected: None, anchor: mx.array) -> mx.array:
        """Tokens [1, N] of base [1, N, V] after anchor [1]."""
        chosen = candidates(base, self._k) if self.pays else None
        token, tokens = anchor, []
        for slot in range(base.shape[1]):
            latent = self._w1.take(token)
            sure = False
            if chosen is not None:
                best, _, certain = reference(base[:, slot], latent, self._w2, chosen.tokens[:, slot],
                                             chosen.floor[:, slot], self._bound[token])
                sure = bool(certain.item())
                self.slots, self.certified = self.slots + 1, self.certified + sure
            token = best if sure else full_pass(base[:, slot], latent, self._w2)[0]
            tokens.append(token)
        return mx.stack(tokens, axis=1)


def run_walk(
    execute: Execute, w1: Table, w2: Table, bound: mx.array, base: mx.array, anchor: mx.array, chosen: Candidates
) -> tuple[mx.array, mx.array]:
    """The greedy vanilla walk with candidates: tokens int32 [B, N] and certified int32 [B, N].

    Two launches a slot: the candidates, then a pass over W2 that every threadgroup leaves at once where
    the certificate holds.
    """
    parts = [mx.zeros((len(anchor), 1), dtype=mx.float32), anchor.astype(mx.uint32)[:, None]]
    tokens, certified = [], []
    for slot in range(base.shape[1]):
        token, *found = _candidates(execute, w1, w2, base, parts, chosen.tokens, slot)
        *parts, sure = _rest(execute, w1, w2, base, [token, *found], chosen.floor, bound, slot)
        tokens.append(token)
        certified.append(sure)
    tokens.append(fold_last(execute, parts)[0])
    return mx.stack(tokens[1:], axis=1), mx.stack(certified, axis=1)


def _candidates(
    execute: Execute, w1: Table, w2: Table, base: mx.array, parts: list[mx.array], tokens: mx.array, slot: int
) -> list[mx.array]:
    """The token before the slot [B], and partial maxima (value, index) over the slot's candidates."""
    (requests, slots, columns), count = base.shape, tokens.shape[-1]
    cut = geometry(w2, count, requests, tile=1)
    shapes, dtypes = part_outputs(cut)
    template = (*constants(w2, cut, columns, slots), ("NPART", parts[0].shape[1]), *first_table(w1))
    launch = Launch(template, cut.grid, cut.threadgroup, ((requests,), *shapes), (mx.int32, *dtypes))
    return execute(CANDIDATES, [base, number(slot), *parts, *w1.arrays, *w2.arrays, tokens], launch)


def _rest(
    execute: Execute, w1: Table, w2: Table, base: mx.array, found: list[mx.array], floor: mx.array,
    bound: mx.array, slot: int,
) -> list[mx.array]:
    """Partial maxima over all tokens, and whether (int32 [B]) the candidates alone were enough."""
    requests, slots, columns = base.shape
    cut = geometry(w2, columns, requests, tile=1)
    shapes, dtypes = part_outputs(cut)
    template = (*constants(w2, cut, columns, slots), ("NPART", found[1].shape[1]), *first_table(w1))
    launch = Launch(template, cut.grid, cut.threadgroup, (*shapes, (requests,)), (*dtypes, mx.int32))
    return execute(REST, [base, number(slot), *found, *w1.arrays, *w2.arrays, floor, bound], launch)


CANDIDATES = Kernel("topk_candidates", ("base", "slot", *PARTS, *W1, *W2, "candidates"),
                    ("token", "out_value", "out_index"),
                    scan(STAGE_TOKEN, ARGMAX, vocabulary="uint(candidates[(first * SLOTS + at_slot) * V + row])"),
                    HEADER)

STAGE_CERTIFICATE = f"""
    {FOLD_STORAGE}
    const uint previous = uint(token[first]);
    uint found = 0;
    {fold("first", "found")}
    const bool sure = folded > floor[first * SLOTS + at_slot] + bound[previous];
    if (group == 0 && tid == 0) certified[first] = sure ? 1 : 0;
    if (sure) {{  // all threads of all threadgroups of this request leave
        if (tid == 0) {{
            out_value[first * PARTS + group] = group == 0 ? folded : -INFINITY;
            out_index[first * PARTS + group] = group == 0 ? found : DS_NONE;
        }}
        return;
    }}
    for (uint k = tid; k < WIDTH; k += {THREADS})
        shared_latent[k] = ds_number<W1_FORMAT, W1_PACK, W1_GROUP, WIDTH>(w1, w1_scales, w1_biases, previous, k);"""

REST = Kernel("topk_rest", ("base", "slot", "token", *PARTS, *W1, *W2, "floor", "bound"),
              ("out_value", "out_index", "certified"), scan(STAGE_CERTIFICATE, ARGMAX), HEADER)
