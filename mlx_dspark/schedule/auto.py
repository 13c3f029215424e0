"""`auto`: lookahead, and the question before it: is drafting worth its seconds at all?

Parking is decided before the draft is paid for, from the forecast of the round. A parked run probes: it
drafts one round to see whether the content has changed. The pause between probes is the one that
balances the probe's cost against what is missed, sqrt(2 cost / (chance of a change per round x gain of
noticing)), with both learned from the run; probes that fail make the chance smaller, so they back off.

The second host read of a round (its confidences) has a price too: it is only paid while deciding by
this round's confidences has been worth more than that, compared with deciding by past rounds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

from ..structs import Round, Schedule
from .cost import CostCurve
from .rate import Calibrate, Lookahead

WARM_UP = 8  # rounds drafted before anything is parked, while an optimist would
OPTIMISM = 0.35  # added to every expected confidence before the first round, less with every round seen
STAKE = 0.01  # share of the run's tokens that probing may cost, when drafting has earned nothing
FIRST_GAIN = 0.3  # tokens per round gained by drafting, before it is known
PAUSE_LIMIT = 256  # rounds; a run never stops looking altogether
GAIN_MEMORY = 0.02
PROBE_MEMORY = 0.995
READ_MEMORY = 0.01


class Mean:
    """A running mean: of all values at first, later mostly of the last 1 / READ_MEMORY."""

    def __init__(self) -> None:
        self.value, self.count = 0.0, 0

    def add(self, value: float) -> None:
        """Count one more value."""
        self.count += 1
        self.value += max(READ_MEMORY, 1 / self.count) * (value - self.value)


class Auto(Lookahead):
    """Lookahead that parks, probes and saves the second read."""

    def __init__(self, name: str, gamma: int, curve: CostCurve, calibrate: Calibrate = tuple):
        super().__init__(name, gamma, curve, calibrate)
        self._parked = 0  # rounds since the last drafted one
        self._probing = False
        self._changes, self._watched = 1.0, 8.0  # changes noticed in how many parked rounds (a prior of one in eight)
        self._gain = FIRST_GAIN
        # Tokens gained by reading a round's confidences, after a round below and one above average.
        self._insight = {False: Mean(), True: Mean()}
        self._follow = False  # a probe paid: draft once more
        self._why = "warming up"

    def inherit(self, other: Lookahead) -> None:
        """Start from what an earlier run of the same pair learned."""
        super().inherit(other)
        if isinstance(other, Auto):
            self._changes, self._watched, self._gain = other._changes, other._watched, other._gain
            self._insight = {high: copy.copy(mean) for high, mean in other._insight.items()}

    @property
    def reads_confidence(self) -> bool:
        """Only while looking into the round pays for the read."""
        insight = self._insight[self.forecast.high]
        return not insight.count or max(0.0, insight.value) >= self.price() * self.curve.read

    def before(self, history: Sequence[Round]) -> int:
        """Draft, park, or probe."""
        self.begin(history)
        self._probing = False
        expected = self.forecast.expected()
        value = self.drafting_value(expected)
        if self.forecast.rounds < WARM_UP and self.drafting_value(self._hoped(expected)) > 0:
            return self._draft("warming up")
        if value > 0:
            return self._draft("drafting pays")
        if self._follow:
            self._follow = False
            return self._draft("the probe paid")
        if self._parked + 1 >= self.pause() and self._may_lose(self.price() * self.curve.drafting(self.gamma) + 1):
            self._probing = True
            return self._draft("probe")
        self._parked += 1
        self._why = f"parked: a draft is expected to lose {-value:.2f} tokens"
        return 0

    def after(self, proposed: int, confidences: Sequence[float] | None) -> Schedule:
        """The lookahead decision, or the reason for parking."""
        if not proposed:
            return self.decide(0, 0, (), self._why)
        schedule = super().after(proposed, confidences)
        if not self._probing:
            return schedule
        return Schedule(schedule.drafts, self.name, "probe", schedule.expected_tokens, schedule.seconds)

    def drafting_value(self, confidences: Sequence[float]) -> float:
        """Tokens gained over a plain round, its extra seconds priced, with these confidences.

        A round is worth more than the best width for its expected confidences, because the width can
        still follow what is seen: that much is learned from past rounds.
        """
        _, width, _ = self.best_prefix(confidences)
        extra = max(0.0, self._insight[self.forecast.high].value - self.price() * self.curve.read)
        return self._gained(confidences, width) + extra - self.price() * self.curve.drafting(self.gamma)

    def _hoped(self, expected: Sequence[float]) -> list[float]:
        """Confidences that the few rounds seen so far do not rule out."""
        hope = OPTIMISM / math.sqrt(self.forecast.rounds + 1)
        return [min(0.97, confidence + hope) for confidence in expected]

    def _may_lose(self, tokens: float) -> bool:
        """Whether losing this much leaves the run ahead of plain decoding, or behind by the stake at most."""
        return self.lead - tokens >= -STAKE * self.tokens

    def pause(self) -> float:
        """Rounds between two probes of a parked run."""
        cost = self.price() * self.curve.drafting(self.gamma) + 0.02
        chance = self._changes / self._watched
        return min(PAUSE_LIMIT, max(2.0, math.sqrt(2 * cost / (chance * self._gain))))

    def learn_confidences(self, confidences: Sequence[float], landed: Round) -> None:
        """Was it good to draft, and to look?"""
        width = self.admit(confidences)
        self._learn_insight(confidences, width)
        self.forecast.observe(confidences)
        value = self.drafting_value(self.forecast.expected())
        if landed.schedule.reason == "probe":
            self._watched = PROBE_MEMORY * (self._watched + self._parked_before)
            self._changes = PROBE_MEMORY * (self._changes + (value > 0))
            self._follow = self._gained(confidences, width) > self.price() * self.curve.drafting(self.gamma)
        if value > 0:
            self._gain += GAIN_MEMORY * (value - self._gain)

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

    def _draft(self, why: str) -> int:
        self._why = why
        self._parked_before, self._parked = self._parked + 1, 0
        return self.gamma
