"""The paper's own scheduler for one request: Algorithm 1, and the production form with old information.

Both maximise expected tokens per second inside a round, tau(k) / seconds(k). They are the experiment's
other arm: on a curve with steps, the first row that does not help may be followed by ones that do.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..structs import Round, Schedule
from .rate import Lookahead

LAG = 2  # rounds between a confidence and the budget it decides (paper, section 5.2)


class Paper(Lookahead):
    """Algorithm 1: add rows by descending survival and stop at the first that does not raise tokens per second."""

    def admit(self, confidences: Sequence[float]) -> int:
        """How many slots to verify; for one request the order of survival is the order of slots."""
        proposed, tokens, survival = len(confidences), 1.0, 1.0
        best = tokens / self.seconds(proposed, 0)
        for slot, confidence in enumerate(confidences, start=1):
            survival *= confidence
            tokens += survival
            rate = tokens / self.seconds(proposed, slot)
            if rate <= best:
                return slot - 1
            best = rate
        return proposed


class Lagged(Lookahead):
    """The production form: the budget comes from confidences two rounds old, without an early stop.

    Being old, they may be searched over all widths: nothing in them knows this round's tokens. This
    round's confidences are not read, so a round has one host read.
    """

    @property
    def reads_confidence(self) -> bool:
        return False

    def after(self, proposed: int, confidences: Sequence[float] | None) -> Schedule:
        """The budget of two rounds ago."""
        if not proposed:
            return self.decide(0, 0, (), "no draft asked")
        if len(self._old) < LAG:
            return self.decide(proposed, proposed, (), "no round is old enough yet")
        old = self._old[-LAG][:proposed]
        tokens, survival, best, width = 1.0, 1.0, 1.0 / self.seconds(proposed, 0), 0
        for slot, confidence in enumerate(old, start=1):
            survival *= confidence
            tokens += survival
            if tokens / self.seconds(proposed, slot) > best:
                best, width = tokens / self.seconds(proposed, slot), slot
        return self.decide(proposed, width, old, "budget from two rounds ago")

    def learn_confidences(self, confidences: Sequence[float], landed: Round) -> None:
        """Keep what the next budgets are made from."""
        super().learn_confidences(confidences, landed)
        self._old = [*self._old[1 - LAG :], confidences]

    _old: Sequence[Sequence[float]] = ()
