"""Bounds for the greedy walk by candidates (kernels/topk.py): measured, computed and kept by `profile`.

They belong to a draft's weights. On the CPU a pass over W2 is by far the dearest part of a slot once the
vocabulary is large; there `profile` computes the bounds, and `load` uses them from then on. On a GPU the
kernels of the full pass are used: whether candidates gain there has not been measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from .draft import BlockDraft
from .kernels import topk, walk
from .kernels.argmax import best
from .kernels.pick import backend, medians, switched_off
from .kernels.topk import CertifiedWalk
from .kernels.walk import Chain
from .store import cache_folder, content_hash, replace_file

LONGEST = 300.0  # seconds that the bounds may take
GAIN = 0.8  # candidates must cost less than this share of the full pass when every slot is certified
REPEATS = 5


def find_walk(draft: BlockDraft) -> CertifiedWalk | None:
    """The walk by candidates if the bounds of this draft are stored and the device in force is the CPU."""
    chain = _chain(draft)
    if chain is None:
        return None
    path = bounds_path(draft)
    if not path.exists():
        return None
    try:
        arrays = mx.load(str(path))
        bound, least = arrays["bound"], float(arrays["least"].item())
    except (RuntimeError, ValueError, KeyError):  # damaged: `profile` writes it again
        return None
    return CertifiedWalk(chain.w1, chain.w2, bound, least) if len(bound) == chain.w1.rows else None


def prepare(draft: BlockDraft, progress: Callable[[str], None] = lambda text: None) -> str | None:
    """Compute and store the bounds where they pay; one sentence about it, None where they cannot be used."""
    chain = _chain(draft)
    if chain is None:
        return None
    least = _cost(draft, chain)
    if least > GAIN:
        return f"the walk by candidates would cost {least:.2f} of the full one: not used"
    seconds = _seconds(chain)
    if seconds > LONGEST:
        return (f"the walk by candidates would cost {least:.2f} of the full one, but its bounds {seconds:.0f} s: "
                "not used")
    progress(f"bounds for the walk by candidates: about {seconds:.0f} s")
    path = bounds_path(draft)
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {"bound": topk.bounds(chain.w1, chain.w2), "least": mx.array([least])}
    replace_file(path, lambda file: mx.save_safetensors(file, arrays))
    return f"the walk by candidates costs {least:.2f} of the full one where it is certified: bounds stored in {path}"


def bounds_path(draft: BlockDraft) -> Path:
    """Where the bounds of a draft are kept."""
    return cache_folder() / "bounds" / f"{content_hash(draft.sequential_head)}.safetensors"


def _chain(draft: BlockDraft) -> Chain | None:
    """A vanilla head with the target's own vocabulary, on the CPU; None for anything else."""
    if backend()[0] != "reference" or switched_off() or draft.tables.reduced:
        return None
    chain = draft.sequential_head.chain()
    return chain if chain is not None and chain.gates == 0 else None


def _cost(draft: BlockDraft, chain: Chain) -> float:
    """Seconds of a block by candidates, all certified, over seconds of the full walk."""
    base = 4 * mx.random.normal((1, draft.gamma, chain.w2.rows), key=mx.random.key(7))
    anchor, markov = mx.array([1]), draft.sequential_head
    certain = CertifiedWalk(chain.w1, chain.w2, mx.full((chain.w1.rows,), -mx.inf))

    def full() -> list[mx.array]:
        return walk.reference(markov.step, base, None, anchor, None, best)

    seconds = medians({"certain": lambda: [certain(base, None, anchor)], "full": full}, REPEATS)
    return seconds["certain"] / seconds["full"]


def _seconds(chain: Chain) -> float:
    """How long all bounds will take, from the time of a few."""
    rows, few = chain.w1.rows, min(64, chain.w1.rows)
    columns = chain.w2.take(mx.arange(chain.w2.rows))
    some = chain.w1.take(mx.arange(few))
    mx.eval(columns, some)
    since = time.perf_counter()
    mx.eval((some @ columns.T).max(axis=-1))
    return (time.perf_counter() - since) * rows / few
