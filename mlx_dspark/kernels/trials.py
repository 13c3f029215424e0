"""The trials of a pair's ops: random inputs at its shapes, and what counts as right.

A kernel adds in another order than the reference, so tokens may differ where two are equal up to
rounding. Each slot is judged on its own, after the token that the kernel itself chose before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from . import accept, sample, walk
from .argmax import best
from .launch import Execute
from .pick import Choice, Kernels, Trial, backend, pick
from .softmax import log_softmax
from .table import Table
from .walk import Chain

# What the reference may lose where it multiplies in half precision, of the largest bias; and in float32 sums.
TOLERANCE = {mx.bfloat16: 2**-6, mx.float16: 2**-9, mx.float32: 1e-4}


def choose_kernels(
    markov: Any, size: int, gamma: int, draft_dtype: mx.Dtype, target_size: int, target_dtype: mx.Dtype,
    hidden_size: int,
) -> Kernels:
    """Pick for all ops of a pair.

    markov: its sequential head (see `draft.heads.Markov`), None if it has none. size: columns of the base
    logits that are ids of the target; target_size: those of the target's logits.
    """
    name, reason = backend()
    if name == "reference":
        return Kernels(choices=(Choice("all", "", name, reason),))
    taken: dict[str, Execute] = {}
    choices: list[Choice] = []
    for trial in (*walk_trials(markov, size, gamma, draft_dtype, hidden_size),
                  *accept_trials(target_size, gamma, target_dtype)):
        choice, execute = pick(trial)
        choices.append(choice)
        if execute is not None:
            taken[trial.op] = execute
    chain = None if markov is None else markov.chain()
    bound: dict[str, Any] = {
        "walk_greedy": partial(walk.run_greedy, taken["walk_greedy"], chain) if "walk_greedy" in taken else None,
        "walk_sampled": partial(walk.run_sampled, taken["walk_sampled"], chain) if "walk_sampled" in taken else None,
        "accept_sampled": partial(accept.run_sampled, taken["accept_sampled"]) if "accept_sampled" in taken else None,
    }
    if "accept_greedy" in taken:
        bound["accept_greedy"] = partial(accept.run_greedy, taken["accept_greedy"])
    return Kernels(**bound, choices=tuple(choices))


def walk_trials(markov: Any, size: int, gamma: int, dtype: mx.Dtype, hidden_size: int) -> list[Trial]:
    """Greedy and sampled walk of one block; none for a head without a low-rank form."""
    chain = None if markov is None else markov.chain()
    if chain is None:
        return []
    keys = mx.random.split(mx.random.key(3), 4)
    base = (4 * mx.random.normal((1, gamma, size), key=keys[0])).astype(dtype)
    projected = markov.project(mx.random.normal((1, gamma, hidden_size), key=keys[1]).astype(dtype))
    anchor, noise = mx.array([1]), mx.random.split(keys[2], gamma)[None]  # [1, N, 2]
    scale = mx.array([1.0], dtype=mx.float32)
    case = _Walk(markov, base, projected, anchor, noise, scale)
    shape = f"V {size}, R {chain.rank}, N {gamma}, {_kind(chain)}, {_name(dtype)}"
    return [
        Trial("walk_greedy", shape, lambda execute: [walk.run_greedy(execute, chain, base, projected, anchor)],
              case.greedy, case.greedy_problem, chain.problem()),
        Trial("walk_sampled", shape,
              lambda execute: walk.run_sampled(execute, chain, base, projected, anchor, noise, scale),
              case.sampled, case.sampled_problem, chain.problem()),
    ]


def accept_trials(size: int, gamma: int, dtype: mx.Dtype) -> list[Trial]:
    """Greedy and sampled accept test of one block of gamma drafts."""
    keys = mx.random.split(mx.random.key(5), 4)
    logits = (4 * mx.random.normal((1, gamma + 1, size), key=keys[0])).astype(dtype)
    right = best(logits)[:, :gamma]
    drafts = mx.where(mx.arange(gamma) < gamma - 1, right, (right + 1) % size)
    log_p = log_softmax(logits)
    log_q = log_softmax(logits[:, :gamma].astype(mx.float32) + 0.1 * mx.random.normal((1, gamma, size), key=keys[1]))
    uniforms, after = mx.random.uniform(shape=drafts.shape, key=keys[2]), keys[3][None]
    scale, shape = mx.array([1.0], dtype=mx.float32), f"V {size}, N {gamma}, {_name(dtype)}"

    def same(expected: Sequence[mx.array], outputs: Sequence[mx.array]) -> str | None:
        equal = all(bool((mine == theirs).all()) for mine, theirs in zip(outputs, expected, strict=True))
        return None if equal else "accepted run or tokens differ from the reference"

    def greedy() -> Sequence[mx.array]:
        return accept.greedy_reference(drafts, logits)

    def sampled() -> Sequence[mx.array]:
        return accept.sampled_reference(drafts, log_q, log_softmax(logits), uniforms, after)

    return [
        Trial("accept_greedy", shape, lambda execute: accept.run_greedy(execute, drafts, logits), greedy,
              lambda outputs: same(greedy(), outputs)),
        Trial("accept_sampled", shape,
              lambda execute: accept.run_sampled(execute, drafts, log_q, logits, scale, uniforms, after), sampled,
              lambda outputs: same(accept.sampled_reference(drafts, log_q, log_p, uniforms, after), outputs)),
    ]


class _Walk:
    """The reference of one block walk, and the judgement of another's tokens."""

    def __init__(self, markov: Any, base: mx.array, projected: mx.array | None, anchor: mx.array, keys: mx.array,
                 scale: mx.array):
        self.markov, self.base, self.projected, self.anchor = markov, base, projected, anchor
        self.keys, self.scale = keys, scale

    def greedy(self) -> list[mx.array]:
        return [self._walk(best)]

    def sampled(self) -> list[mx.array]:
        kept: list[mx.array] = []

        def choose(corrected: mx.array) -> mx.array:
            kept.append(corrected.astype(mx.float32))
            return sample.draw(kept[-1], self.keys[:, len(kept) - 1], self.scale)

        return [self._walk(choose), mx.stack(kept, axis=1)]

    def greedy_problem(self, outputs: Sequence[mx.array]) -> str | None:
        corrected = self._corrected(outputs[0])
        return _short_of_the_best(outputs[0], corrected, self._allowed(corrected))

    def sampled_problem(self, outputs: Sequence[mx.array]) -> str | None:
        tokens, kept = outputs
        corrected = self._corrected(tokens)
        allowed = self._allowed(corrected)
        if not bool(mx.abs(kept - corrected).max() <= allowed):
            return "corrected logits differ from the reference"
        size, slots = corrected.shape[-1], range(corrected.shape[1])
        noise = mx.stack([sample.noise(self.keys[:, slot], size) for slot in slots], axis=1)
        return _short_of_the_best(tokens, corrected * self.scale + noise, allowed)

    def _allowed(self, corrected: mx.array) -> float:
        """How far two right answers may be apart: the reference rounds what the kernel sums in float32."""
        bias = mx.abs(corrected - self.base.astype(mx.float32)).max().item()
        logit = mx.abs(corrected).max().item()
        w2 = self.markov.chain().w2
        dtypes = (self.base.dtype, (w2.scales if w2.bits else w2.weight).dtype)
        return max(TOLERANCE[dtype] for dtype in dtypes) * bias + TOLERANCE[mx.float32] * logit

    def _corrected(self, tokens: mx.array) -> mx.array:
        """Corrected logits float32 [1, N, V] of a block that chose these tokens [1, N]."""
        kept: list[mx.array] = []

        def choose(corrected: mx.array) -> mx.array:
            kept.append(corrected.astype(mx.float32))
            return tokens[:, len(kept) - 1]

        self._walk(choose)
        return mx.stack(kept, axis=1)

    def _walk(self, choose: Callable[[mx.array], mx.array]) -> mx.array:
        state = self.markov.start(len(self.anchor))
        return mx.stack(walk.reference(self.markov.step, self.base, self.projected, self.anchor, state, choose), axis=1)


def _short_of_the_best(tokens: mx.array, scores: mx.array, allowed: float) -> str | None:
    chosen = mx.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]
    short = scores.max(axis=-1) - chosen  # [1, N]
    wrong = [slot for slot, gap in enumerate(short[0].tolist(), start=1) if not gap <= 2 * allowed]
    return f"slot {wrong[0]} took a token that is not the best" if wrong else None


def _kind(chain: Chain) -> str:
    """All that the text of its kernels depends on."""
    tables = {"W1": chain.w1, "W2": chain.w2, **({} if chain.mix is None else {f"columns {chain.at} on": chain.mix})}
    weights = ", ".join(f"{name} {_weights(table)}" for name, table in tables.items())
    return f"{ {0: 'vanilla', 1: 'gated', 3: 'rnn'}[chain.gates]} ({weights})"


def _weights(table: Table) -> str:
    kind = f"{table.bits} bits/{table.group}" if table.bits else _name(table.weight.dtype)
    return kind if not table.bits else f"{kind} {_name(table.scales.dtype)}"


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")

