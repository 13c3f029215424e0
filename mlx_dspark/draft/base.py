"""What the round loop asks of any draft."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx

from ..sampling import Pick
from ..structs import Proposal


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
