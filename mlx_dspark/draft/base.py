"""What the round loop asks of any draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx

from ..sampling import ArgmaxPick, Pick
from ..structs import Proposal


class Choices:
    """The tokens of one proposal, chosen left to right; every family's walk fills one.

    anchor: x_0 [B], whose dtype the tokens take. Where the best token was taken nobody needs the logits
    again, and keeping them would keep a vocabulary a slot in memory.
    """

    def __init__(self, anchor: mx.array, pick: Pick):
        self.tokens: list[mx.array] = []  # x_1, x_2, ... [B] each
        self._anchor, self._pick = anchor, pick
        self._logits: list[mx.array] | None = None if isinstance(pick, ArgmaxPick) else []
        self._log_q: list[mx.array | None] = []

    def choose(self, logits: mx.array) -> mx.array:
        """Choose the next token from its corrected logits [B, V] -> [B]."""
        token, log_q = self._pick(logits, self.tokens)
        self.tokens.append(token.astype(self._anchor.dtype))
        if self._logits is not None:
            self._logits.append(logits)
        self._log_q.append(log_q)
        return self.tokens[-1]

    def proposal(self) -> Proposal:
        """What was chosen, as the round loop takes it."""
        return Proposal(
            tokens=mx.stack(self.tokens, axis=1),
            logits=None if self._logits is None else mx.stack(self._logits, axis=1),
            log_q=None if self._log_q[0] is None else mx.stack(self._log_q, axis=1),
        )


class Draft(Protocol):
    """A model that proposes tokens after the anchor.

    gamma: most tokens proposed in one round. taps: the target layers it is fed from (-1: the
    embedding output). The per-request state is whatever `start` returns; one draft serves many.
    """

    gamma: int
    taps: tuple[int, ...]
    has_confidence: bool

    def start(self) -> Any:
        """Fresh state for one request."""

    def observe(self, state: Any, tokens: mx.array, taps: mx.array | None) -> None:
        """Committed target rows: their input tokens [B, T] and taps [B, T, M*D], in sequence order."""

    def propose(self, state: Any, anchor: mx.array, slots: int, pick: Pick) -> Proposal:
        """Propose `slots` tokens (1..gamma) after anchor [B]; lazy, nothing is read back."""


@runtime_checkable
class Resumable(Draft, Protocol):
    """A draft whose context outlives its request."""

    def keep(self, state: Any) -> Any:
        """What to store of a request that is over, so that `resume` can begin from it; the state ends with it."""

    def resume(self, kept: Any, length: int) -> Any | None:
        """A state that has observed the first `length` rows of a kept one; None where that is impossible.

        The token after those rows must be the same as well. `kept` stays as it is.
        """


def propose_many(
    draft: Draft, states: Sequence[Any], anchor: mx.array, slots: Sequence[int], picks: Sequence[Pick]
) -> list[Proposal]:
    """Proposals of several requests: anchor [B], and one state, slot count and pick each.

    In one pass where the draft has `propose_many`; the others draft token by token and do it request by request.
    """
    together = getattr(draft, "propose_many", None)
    if together is not None and len(states) > 1:
        return together(states, anchor, slots, picks)
    return [draft.propose(state, anchor[b : b + 1], count, pick)
            for b, (state, count, pick) in enumerate(zip(states, slots, picks, strict=True))]
