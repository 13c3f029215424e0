"""`python -m mlx_dspark.bench kernels`: bytes and seconds of the kernel ops at one shape.

Every contender of an op runs in turn, so that a slow moment hits all of them; medians are reported, and
ratios only within one run. Contenders of the walk:
    op_by_op    products in the weights' dtype, every slot's corrected logits kept: how it was done first
    reference   what runs where no kernel is used
    compiled    the reference under mx.compile
    candidates  kernels/topk.py where every slot is certified: its best case (greedy, vanilla)
    kernel      the chain of launches (null where the device has none)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .backend import machine
from .draft.heads import MARKOV
from .kernels.pick import BACKENDS, Trial, Work, backend, medians
from .kernels.topk import CertifiedWalk, candidates, run_walk
from .kernels.traffic import slot_traffic
from .kernels.trials import accept_trials, walk_trials
from .kernels.walk import Chain

WEIGHTS = ("float32", "float16", "bfloat16", "8", "4")


@dataclass(frozen=True)
class Shape:
    """Sizes of a head. The head's modules take these three as they take a DraftSpec."""

    vocab_size: int
    markov_rank: int
    slots: int
    hidden_size: int = 1024

    @property
    def head_rows(self) -> int:
        return self.vocab_size


def bench_kernels(
    shape: Shape, head: str, weights: Sequence[str], group: int, repeats: int,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure all ops for each kind of weights; returns the JSON document."""
    name, reason = backend()
    document: dict[str, Any] = {
        "machine": machine(), "kernels": name, "reason": reason, "head": head, "vocab": shape.vocab_size,
        "rank": shape.markov_rank, "slots": shape.slots, "repeats": repeats, "weights": {},
    }
    for kind in weights:
        progress(f"weights {kind}")
        document["weights"][kind] = _walks(shape, head, kind, group, repeats, name)
    progress("accept")
    trials = accept_trials(shape.vocab_size, shape.slots, mx.float32 if name == "reference" else mx.bfloat16)
    document["accept"] = {trial.op: _timed({"reference": trial.reference, **_kernel(trial, name)}, repeats)
                          for trial in trials}
    return document


def _walks(shape: Shape, head: str, kind: str, group: int, repeats: int, name: str) -> dict[str, Any]:
    markov = make_head(shape, head, kind, group)
    base = mx.float32 if name == "reference" else mx.bfloat16
    greedy, sampled = walk_trials(markov, shape.vocab_size, shape.slots, base, shape.hidden_size)
    chain = markov.chain()
    bytes_of = {}
    for op, random in (("walk_greedy", False), ("walk_sampled", True)):
        traffic = slot_traffic(chain, shape.vocab_size, base, sampled=random)
        bytes_of[op] = {"minimum": traffic.minimum, "kernel": traffic.kernel, "ratio": round(traffic.ratio, 4)}
    works: dict[str, Work] = {"op_by_op": _op_by_op(markov, shape, base), "reference": greedy.reference,
                              "compiled": mx.compile(greedy.reference)}
    if head == "vanilla":
        works["candidates"] = _candidates(chain, shape, base, name)
    return {
        "bytes_a_slot": bytes_of,
        "walk_greedy": _timed({**works, **_kernel(greedy, name)}, repeats),
        "walk_sampled": _timed({"reference": sampled.reference, **_kernel(sampled, name)}, repeats),
    }


def make_head(shape: Shape, head: str, kind: str, group: int) -> nn.Module:
    """A random Markov head whose weights are of `kind`: a dtype, or bits of an affine quantisation."""
    mx.random.seed(0)
    markov = MARKOV[head](shape)
    if kind in ("8", "4"):
        nn.quantize(markov, group, int(kind))
    else:
        markov.set_dtype(getattr(mx, kind))
    mx.eval(markov.parameters())
    return markov.eval()


def _op_by_op(markov: nn.Module, shape: Shape, dtype: mx.Dtype) -> Work:
    """One op after the other, as the walk was first written: nothing fused, all corrected logits kept.

    The heads' formulas stand here again on purpose: the heads project once a block and correct in float32.
    """
    base = (4 * mx.random.normal((1, shape.slots, shape.vocab_size), key=mx.random.key(3))).astype(dtype)
    hidden = mx.random.normal((1, shape.slots, shape.hidden_size), key=mx.random.key(4)).astype(dtype)
    mx.eval(base, hidden)
    chain = markov.chain()

    def run() -> Sequence[mx.array]:
        token, state, kept = mx.array([1]), markov.start(1), []
        for slot in range(shape.slots):
            e = markov.embed(token)
            if chain.gates == 0:
                latent = e
            elif chain.gates == 1:
                latent = mx.sigmoid(markov.gate_proj(mx.concatenate([hidden[:, slot], e], axis=-1))) * e
            else:
                joint = markov.joint_proj(mx.concatenate([state, e, hidden[:, slot]], axis=-1))
                gate, candidate, output = mx.split(joint, 3, axis=-1)
                gate = mx.sigmoid(gate)
                latent, state = mx.tanh(output), gate * state + (1 - gate) * mx.tanh(candidate)
            kept.append(base[:, slot] + markov.markov_w2(latent))
            token = mx.argmax(kept[-1], axis=-1)
        return [mx.stack(kept, axis=1), token]

    return run


def _candidates(chain: Chain, shape: Shape, dtype: mx.Dtype, name: str) -> Work:
    """The walk by candidates when nothing can beat them: a bound of minus infinity certifies every slot."""
    base = mx.random.normal((1, shape.slots, shape.vocab_size), key=mx.random.key(1)).astype(dtype)
    bound, anchor = mx.full((shape.vocab_size,), -mx.inf), mx.array([1])
    if name == "reference":
        certain = CertifiedWalk(chain.w1, chain.w2, bound)
        return lambda: [certain(base, None, anchor)]
    execute = BACKENDS[name]
    return lambda: run_walk(execute, chain.w1, chain.w2, bound, base, anchor, candidates(base))


def _kernel(trial: Trial, name: str) -> dict[str, Work | None]:
    if name == "reference" or trial.unsupported is not None:
        return {"kernel": None}
    return {"kernel": lambda: trial.kernel(BACKENDS[name])}


def _timed(works: dict[str, Work | None], repeats: int) -> dict[str, Any]:
    """Median milliseconds of each, run in turn, and their ratio to the reference's."""
    seconds = medians({name: work for name, work in works.items() if work is not None}, repeats)
    return {
        "ms": {name: round(1e3 * seconds[name], 4) if name in seconds else None for name in works},
        "of_reference": {name: round(median / seconds["reference"], 4) for name, median in seconds.items()},
    }
