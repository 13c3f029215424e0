"""The block walk: all slots of a block, chained on the device; nothing is read back in between.

A slot needs the token before it, so slot k + 1 begins by folding the partial maxima of slot k: every
threadgroup does that for itself, from a few kilobytes that the cache holds.

    vanilla     one launch a slot: fold, W1 row, pass over W2
    gated, rnn  two: fold and latent, then the pass. A latent multiplies [R, R] (rnn: [3R, 2R]) weights,
                128 (786) kilobytes in bf16 at R = 256, which 198 threadgroups would each read again
    at the end  one small launch folds the last slot
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from . import argmax, sample
from .argmax import PARTS, begin, fold_last, numbers, part_outputs
from .launch import Execute, Kernel, Launch
from .scan import ARGMAX, HEADER, SAMPLE, STAGE_TOKEN, W1, W2, constants, first_table, geometry, scan
from .table import Table
from .text import FOLD_STORAGE, PLACE, SIMDS, THREADS, fold

MIX = ("mix", "mix_scales", "mix_biases")

Step = Callable[
    [mx.array, mx.array | None, mx.array, mx.array | None], tuple[mx.array, mx.array | None]
]  # (token [B], projected [B, J], base [B, V], state) -> (corrected [B, V], state)


@dataclass(frozen=True)
class Chain:
    """A Markov head as the kernels see it.

    gates: latents of one projection: 0 vanilla (the latent is the W1 row), 1 gated, 3 rnn.
    mix: that projection [gates * R, columns]; its columns from `at` on multiply [W1 row] or, with a state,
    [state; W1 row]. What its other columns make of the hidden states comes ready as `projected`.
    """

    w1: Table
    w2: Table
    gates: int = 0
    mix: Table | None = None
    at: int = 0

    @property
    def rank(self) -> int:
        return self.w2.width

    @property
    def inputs(self) -> int:
        """Columns of `mix` that the latent reads."""
        return 2 * self.rank if self.gates == 3 else self.rank

    def mixing(self) -> Table:
        """The columns of `mix` that the latent reads [gates * R, inputs]."""
        return self.mix.columns(self.at, self.at + self.inputs)

    def problem(self) -> str | None:
        """Why the kernels cannot run this head; None if they can."""
        tables = [self.w1, self.w2] if self.mix is None else [self.w1, self.w2, self.mix]
        found = [problem for problem in (table.problem() for table in tables) if problem]
        if found:
            return found[0]
        if self.mix is not None and (self.at % self.mix.pack or self.rank % self.mix.pack):
            return f"columns of the projection from {self.at} on do not begin at a multiple of {self.mix.pack}"
        return None


def reference(
    step: Step, base: mx.array, projected: mx.array | None, anchor: mx.array, state: mx.array | None,
    choose: Callable[[mx.array], mx.array],
) -> list[mx.array]:
    """Let `choose` take a token from the corrected logits [B, V] of each slot, left to right; those tokens [B].

    base [B, N, V], projected [B, N, J] (what the head makes of the hidden states), anchor [B].
    """
    tokens = [anchor]
    for slot in range(base.shape[1]):
        here = None if projected is None else projected[:, slot]
        corrected, state = step(tokens[-1], here, base[:, slot], state)
        tokens.append(choose(corrected))
    return tokens[1:]


def run_greedy(
    execute: Execute, chain: Chain, base: mx.array, projected: mx.array | None, anchor: mx.array
) -> mx.array:
    """Tokens int32 [B, N] of base [B, N, V] after anchor [B], each slot's best."""
    tokens, _ = _walk(execute, chain, base, projected, anchor, ())
    return tokens


def run_sampled(
    execute: Execute, chain: Chain, base: mx.array, projected: mx.array | None, anchor: mx.array,
    keys: mx.array, scale: mx.array,
) -> tuple[mx.array, mx.array]:
    """Tokens int32 [B, N] drawn with keys [B, N, 2] and 1 / temperature [1]; corrected logits float32 [B, N, V]."""
    tokens, corrected = _walk(execute, chain, base, projected, anchor, (keys, scale))
    return tokens, mx.stack(corrected, axis=1)


def _walk(
    execute: Execute, chain: Chain, base: mx.array, projected: mx.array | None, anchor: mx.array,
    noise: tuple[mx.array, ...],
) -> tuple[mx.array, list[mx.array]]:
    parts = begin(anchor, geometry(chain.w2, base.shape[-1], len(anchor)))
    projected = None if projected is None else projected.astype(mx.float32)
    state = mx.zeros((len(anchor), chain.rank), dtype=mx.float32)
    tokens, corrected = [], []
    for slot in range(base.shape[1]):
        if chain.gates:
            token, latent, state = _latent(execute, chain, parts, projected, state, slot)
            scan_slot = sample.scan_slot if noise else argmax.scan_slot
            outputs = scan_slot(execute, base, slot, latent, chain.w2, *noise)
        else:
            token, *outputs = _slot(execute, chain, parts, base, slot, noise)
        tokens.append(token)
        parts, corrected = outputs[:2], corrected + outputs[2:]
    tokens.append(fold_last(execute, parts)[0])
    return mx.stack(tokens[1:], axis=1), corrected


def _slot(
    execute: Execute, chain: Chain, parts: list[mx.array], base: mx.array, slot: int, noise: tuple[mx.array, ...]
) -> list[mx.array]:
    """One launch of the vanilla walk: the token before `slot`, partial maxima, corrected logits if sampled."""
    requests, slots, rows = base.shape
    cut = geometry(chain.w2, rows, requests)
    shapes, dtypes = part_outputs(cut)
    template = (*constants(chain.w2, cut, rows), ("NPART", parts[0].shape[1]), *first_table(chain.w1))
    launch = Launch(template, cut.grid, cut.threadgroup, ((requests,), *shapes, *([(requests, rows)] if noise else [])),
                    (mx.int32, *dtypes, *([mx.float32] if noise else [])))
    inputs = [base, numbers(slot, slots), *parts, *chain.w1.arrays, *chain.w2.arrays, *noise]
    return execute(SAMPLED_SLOT if noise else GREEDY_SLOT, inputs, launch)


def _latent(
    execute: Execute, chain: Chain, parts: list[mx.array], projected: mx.array, state: mx.array, slot: int
) -> tuple[mx.array, mx.array, mx.array]:
    """The token before `slot` [B], the slot's latent [B, R] and the state after it [B, R]."""
    requests, slots = projected.shape[:2]
    mix = chain.mix
    template = (
        ("NPART", parts[0].shape[1]), ("RANK", chain.rank), ("INPUTS", chain.inputs),
        ("MIX_WIDTH", mix.width), ("MIX_FORMAT", mix.format), ("MIX_PACK", mix.pack), ("MIX_GROUP", mix.group),
        ("AT", chain.at), *first_table(chain.w1),
    )
    recurrent = chain.gates == 3
    groups = -(-chain.rank // SIMDS)
    shapes = ((requests,), (requests, chain.rank), *([(requests, chain.rank)] if recurrent else []))
    launch = Launch(template, (groups * THREADS, requests, 1), (THREADS, 1, 1), shapes,
                    (mx.int32, mx.float32, *([mx.float32] if recurrent else [])))
    inputs = [*parts, *chain.w1.arrays, *mix.arrays, projected, numbers(slot, slots)]
    outputs = execute(*((RNN, [*inputs, state]) if recurrent else (GATED, inputs)), launch)
    return outputs[0], outputs[1], outputs[2] if recurrent else state


GREEDY_SLOT = Kernel("walk_argmax", ("base", "slot", *PARTS, *W1, *W2), ("token", "out_value", "out_index"),
                     scan(STAGE_TOKEN, ARGMAX), HEADER)
SAMPLED_SLOT = Kernel("walk_sample", ("base", "slot", *PARTS, *W1, *W2, "keys", "scale"),
                      ("token", "out_value", "out_index", "corrected"), scan(STAGE_TOKEN, SAMPLE), HEADER)


def latent_text(gates: int, before: str, finish: str) -> str:
    """Kernel text: one SIMD-group makes one number of the latent, from `gates` rows of the projection.

    before: how many columns of the state come before the W1 row. finish: text that makes the outputs from
    `out` [gates], the projections that belong to number `j`.
    """
    return f"""{PLACE}
    const uint request = threadgroup_position_in_grid.y;
    const uint SLOTS = slot[1];
    {FOLD_STORAGE}
    threadgroup float x[INPUTS];
    uint previous = 0;
    {fold("request", "previous")}
    if (group == 0 && tid == 0) token[request] = int(previous);
    for (uint k = tid; k < RANK; k += {THREADS}) {{
        x[{before} + k] = ds_number<W1_FORMAT, W1_PACK, W1_GROUP, RANK>(w1, w1_scales, w1_biases, previous, k);
        {"x[k] = state[request * RANK + k];" if before != "0" else ""}
    }}
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const uint j = group * {SIMDS} + simd;
    if (j >= RANK) return;  // a whole SIMD-group leaves, and there is no barrier below
    float out[{gates}];
    for (uint g = 0; g < {gates}; ++g) {{
        float sum = 0.0f;
        for (uint at = lane; at < INPUTS / MIX_PACK; at += 32) {{
            float piece[MIX_PACK], affine[2], here[MIX_PACK], total = 0.0f;
            for (uint k = 0; k < MIX_PACK; ++k) {{ here[k] = x[at * MIX_PACK + k]; total += here[k]; }}
            ds_piece<MIX_FORMAT, MIX_PACK, MIX_GROUP, MIX_WIDTH>(
                mix, mix_scales, mix_biases, g * RANK + j, AT / MIX_PACK + at, piece, affine);
            sum += ds_term<MIX_FORMAT, MIX_PACK>(piece, affine, here, total);
        }}
        for (uint d = 16; d > 0; d >>= 1) sum += simd_shuffle_xor(sum, d);
        out[g] = sum + projected[((request * SLOTS + slot[0]) * {gates} + g) * RANK + j];
    }}
    if (lane == 0) {{{finish}
    }}
"""


GATED = Kernel("latent_gated", (*PARTS, *W1, *MIX, "projected", "slot"), ("token", "latent"), latent_text(1, "0", """
        latent[request * RANK + j] = ds_sigmoid(out[0]) * x[j];"""), HEADER)
RNN = Kernel("latent_rnn", (*PARTS, *W1, *MIX, "projected", "slot", "state"), ("token", "latent", "next_state"),
             latent_text(3, "RANK", """
        const float gate = ds_sigmoid(out[0]);
        next_state[request * RANK + j] = gate * x[j] + (1.0f - gate) * precise::tanh(out[1]);
        latent[request * RANK + j] = precise::tanh(out[2]);"""), HEADER)
