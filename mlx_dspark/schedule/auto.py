"""`auto`: lookahead, and the question before it: is drafting worth its seconds at all?

Parking is decided before the draft is paid for, from the forecast of the round; `parking.py` says when a
parked run looks again.

The second host read of a round (its confidences) has a price too: it is only paid while deciding by
this round's confidences has been worth more than that, compared with deciding by past rounds.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from ..structs import Round, Schedule
from .cost import CostCurve
from .parking import PROBE, STAKE, WARM_UP, Mean, Odds, Parking, hoped
from .rate import Calibrate, Lookahead


class Auto(Lookahead):
    """Lookahead that parks, probes and saves the second read."""

    def __init__(self, name: str, gamma: int, curve: CostCurve, calibrate: Calibrate = tuple):
        super().__init__(name, gamma, curve, calibrate)
        self._parking, self._odds = Parking(), Odds()
        # Tokens gained by reading a round's confidences, after a round below and one above average.
        self._insight = {False: Mean(), True: Mean()}

    def inherit(self, other: Lookahead) -> None:
        """Start from what an earlier run of the same pair learned."""
        super().inherit(other)
        if isinstance(other, Auto):
            self._odds = copy.copy(other._odds)
            self._insight = {high: copy.copy(mean) for high, mean in other._insight.items()}

    @property
    def reads_confidence(self) -> bool:
        """Only while looking into the round pays for the read."""
        insight = self._insight[self.forecast.high]
        return not insight.count or max(0.0, insight.value) >= self.price() * self.curve.read

    def before(self, history: Sequence[Round]) -> int:
        """Draft, park, or probe."""
        self.begin(history)
        expected = self.forecast.expected()
        value, cost = self.drafting_value(expected), self._draft_cost()
        if self.forecast.rounds < WARM_UP and self.drafting_value(hoped(self.forecast, expected)) > 0:
            self._parking.draft("warming up")
        elif value > 0:
            self._parking.draft("drafting pays")
        elif self._parking.follow:
            self._parking.follow = False
            self._parking.draft("the probe paid")
        elif self._parking.parked + 1 >= self._odds.pause(cost) and self._may_lose(cost + 1):
            self._parking.draft(PROBE)
        else:
            self._parking.park(-value)
            return 0
        return self.gamma

    def after(self, proposed: int, confidences: Sequence[float] | None) -> Schedule:
        """The lookahead decision, or the reason for parking."""
        if not proposed:
            return self.decide(0, 0, (), self._parking.why)
        schedule = super().after(proposed, confidences)
        if self._parking.why != PROBE:
            return schedule
        return replace(schedule, reason=PROBE)

    def drafting_value(self, confidences: Sequence[float]) -> float:
        """Tokens gained over a plain round, its extra seconds priced, with these confidences.

        A round is worth more than the best width for its expected confidences, because the width can
        still follow what is seen: that much is learned from past rounds.
        """
        _, width, _ = self.best_prefix(confidences)
        extra = max(0.0, self._insight[self.forecast.high].value - self.price() * self.curve.read)
        return self._gained(confidences, width) + extra - self._draft_cost()

    def _draft_cost(self) -> float:
        """Tokens that could be committed in the time of a proposal."""
        return self.price() * self.drafting(self.gamma)

    def _may_lose(self, tokens: float) -> bool:
        """Whether losing this much leaves the run ahead of plain decoding, or behind by the stake at most."""
        return self.lead - tokens >= -STAKE * self.tokens

    def learn_confidences(self, confidences: Sequence[float], landed: Round) -> None:
        """Was it good to draft, and to look?"""
        width = self.admit(confidences)
        self._learn_insight(confidences, width)
        self.forecast.observe(confidences)
        value = self.drafting_value(self.forecast.expected())
        if landed.schedule.reason == PROBE:
            self._odds.probed(self._parking.waited, value > 0)
            self._parking.follow = self._gained(confidences, width) > self._draft_cost()
        self._odds.gained(value)

    def _learn_insight(self, confidences: Sequence[float], seen: int) -> None:
        """Value of the width chosen by looking, over that chosen by the forecast, under what was seen."""
        if self.forecast.age != 1:  # after a pause the forecast is worse than when it is needed
            return
        blind = self.best_prefix(self.forecast.expected()[: len(confidences)])[1]
        gained = self._gained(confidences, seen) - self._gained(confidences, blind)
        self._insight[self.forecast.high].add(gained)

    def _gained(self, confidences: Sequence[float], width: int) -> float:
        """Expected tokens of `width` drafts, less the price of their rows."""
        tokens, survival = 0.0, 1.0
        for confidence in confidences[:width]:
            survival *= confidence
            tokens += survival
        return tokens - self.price() * (self.verify(width + 1) - self.verify(1))
