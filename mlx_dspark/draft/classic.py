"""A small whole model as draft: the classic baseline, in the same loop.

Any mlx-lm model with the target's tokenizer. It needs no taps. After a proposal its cache is rolled
back to the committed rows; those that survived come again through `observe` and are run together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

from ..sampling import Pick
from ..structs import KVOptions, Proposal, Verified
from .base import Choices
from .block import FLUSH_ROWS

CLASSIC_GAMMA = 4  # proposals per round: each is one forward of the small model


class Model(Protocol):
    """What is needed of a model; a `Target` is one."""

    def start(self, options: KVOptions) -> Any:
        """An empty cache."""

    def forward(self, tokens: mx.array, cache: Any) -> Verified:
        """Logits of rows [B, T]."""


@dataclass
class ClassicState:
    """The small model's cache, and committed tokens that it has not seen."""

    cache: Any
    tokens: list[mx.array] = field(default_factory=list)


class ClassicDraft:
    """Drafts token by token with a model of its own."""

    taps: tuple[int, ...] = ()
    has_confidence = False

    def __init__(self, model: Model, gamma: int = CLASSIC_GAMMA):
        self.model, self.gamma = model, gamma
        self.model.start(KVOptions()).require_full()

    def start(self) -> ClassicState:
        return ClassicState(self.model.start(KVOptions()))

    def observe(self, state: ClassicState, tokens: mx.array, taps: mx.array | None) -> None:
        """Queue committed tokens; a long prompt is run at once to bound the memory."""
        state.tokens.append(tokens)
        rows = sum(t.shape[1] for t in state.tokens)
        if rows >= FLUSH_ROWS:
            self.model.forward(mx.concatenate(state.tokens, axis=1), state.cache)  # its logits are never evaluated
            state.cache.advance(rows, rows)
            state.tokens.clear()
            mx.async_eval(state.cache.arrays)

    def keep(self, state: ClassicState) -> Any:
        """The small model's cache of a request that is over."""
        return state.cache

    def resume(self, kept: Any, length: int) -> ClassicState | None:
        """A state behind the first `length` tokens; None if the small model has not run so many."""
        cache = kept.prefix(length)
        return None if cache is None else ClassicState(cache)

    def propose(self, state: ClassicState, anchor: mx.array, slots: int, pick: Pick) -> Proposal:
        """Run the pending tokens and the anchor in one forward, then one row per further slot."""
        rows = mx.concatenate([*state.tokens, anchor[:, None]], axis=1)
        committed = rows.shape[1] - 1
        choices = Choices(anchor, pick)
        for _ in range(slots):
            rows = choices.choose(self.model.forward(rows, state.cache).logits[:, -1])[:, None]
        state.cache.advance(committed + slots, committed)  # anchor and drafts are not committed yet
        state.tokens.clear()
        return choices.proposal()
