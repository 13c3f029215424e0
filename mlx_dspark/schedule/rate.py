"""Admission by the rate over the run: `rate`, and `lookahead`, which also sees past a step.

With lambda = committed tokens per second of modelled time over the run (the fixed point of a
renewal-reward process, after Dinkelbach), one more row is worth its seconds when the tokens it is
expected to bring exceed lambda times what it costs. `rate` asks that of the next row alone; where the
curve is linear this is optimal stopping. `lookahead` admits slot j when *some* continuation to a
k >= j has positive value, with predicted confidences beyond j:

    max_k  sum_{i=j..k} S_i - lambda * (T(k+1) - T(j)) > 0

Only c_1..c_j and past rounds enter, so the admission of x_j does not depend on x_j (paper, appendix A).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import takewhile

from ..structs import Round, Schedule
from .cost import CostCurve
from .forecast import Forecast
from .refine import Refinement

Calibrate = Callable[[Sequence[float]], Sequence[float]]

RUN_MEMORY = 0.999  # per round: lambda looks back about a thousand rounds
PLAIN_ROUNDS = 50.0  # lambda starts as if this many plain rounds had been run


class RunRate:
    """lambda: tokens per modelled second, never below plain decoding's own rate."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Count one round."""
        self._tokens = RUN_MEMORY * self._tokens + tokens
        self._seconds = RUN_MEMORY * self._seconds + seconds

    def value(self, plain_seconds: float) -> float:
        """lambda, given the seconds of a plain round at the present depth."""
        tokens, seconds = self._tokens + PLAIN_ROUNDS, self._seconds + PLAIN_ROUNDS * plain_seconds
        return max(1 / plain_seconds, tokens / seconds)


class Lookahead:
    """Draft every round; verify by the rate over the run, looking past steps.

    horizon: how many slots beyond j are considered; 0 makes it `rate`. calibrate: raw confidences to
    probabilities.
    """

    uses_confidence = True

    def __init__(
        self, name: str, gamma: int, curve: CostCurve, calibrate: Calibrate = tuple, horizon: int | None = None
    ):
        self.name = name
        self.gamma = min(gamma, curve.widest - 1)
        self.curve, self.calibrate = curve, calibrate
        self.horizon = self.gamma if horizon is None else horizon
        self.forecast = Forecast(self.gamma)
        self.rate = RunRate()
        self.refine = Refinement()
        self.depth = 0
        self._learned = -1
        self._begun = self._observed = 0
        self.tokens, self.lead = 0, 0.0  # committed, and how many more than plain decoding in the same seconds
        self._verify = self._table()
        self._renew()

    @property
    def reads_confidence(self) -> bool:
        """Whether this round's confidences are read before verifying."""
        return True

    def inherit(self, other: Lookahead) -> None:
        """Start from what an earlier run of the same pair learned."""
        self.forecast = other.forecast.for_another_text()
        self.rate, self.refine = copy.copy(other.rate), copy.copy(other.refine)
        self._renew()

    def before(self, history: Sequence[Round]) -> int:
        """Learn from rounds that ended since, then draft."""
        self.begin(history)
        return self.gamma

    def after(self, proposed: int, confidences: Sequence[float] | None) -> Schedule:
        """Admit slots left to right."""
        if not proposed:
            return self.decide(0, 0, (), "no draft asked")
        if confidences is None:
            return self.decide(*self.best_prefix(self.forecast.expected()[:proposed]), "from past rounds")
        known = self.refine(self.calibrate(confidences)[:proposed])
        width = self.admit(known)
        reason = "every slot pays" if width == proposed else f"slot {width + 1} would not pay"
        return self.decide(proposed, width, known, reason)

    def admit(self, confidences: Sequence[float]) -> int:
        """How many slots to verify, looking at c_1..c_j only when slot j is decided."""
        survival = 1.0
        for slot in range(1, len(confidences) + 1):
            survival *= confidences[slot - 1]
            beyond = self.forecast.predict(confidences[:slot])[: min(self.horizon, len(confidences) - slot)]
            if self._continuation(slot, survival, beyond) <= 0:
                return slot - 1
        return len(confidences)

    def best_prefix(self, confidences: Sequence[float]) -> tuple[int, int, Sequence[float]]:
        """(proposed, width of the most valuable prefix, confidences): for a round that nobody looks into."""
        width, best, value, survival = 0, 0.0, 0.0, 1.0
        for slot, confidence in enumerate(confidences, start=1):
            survival *= confidence
            value += survival - self.price() * (self.verify(slot + 1) - self.verify(slot))
            if value > best:
                width, best = slot, value
        return len(confidences), width, confidences

    def decide(self, proposed: int, width: int, confidences: Sequence[float], reason: str) -> Schedule:
        """The record of a decision, with what it is expected to bring and to cost."""
        tokens, survival = 1.0, 1.0
        for confidence in confidences[:width]:
            survival *= confidence
            tokens += survival
        return Schedule(width, self.name, reason, tokens, self.seconds(proposed, width))

    def begin(self, history: Sequence[Round]) -> None:
        """A round begins: learn from those that landed, and count how long ago the last one seen was."""
        self._begun += 1  # the index that this round will have
        self.learn(history)
        self.forecast.age = self._begun - self._observed

    def learn(self, history: Sequence[Round]) -> None:
        """Take in the rounds that were not seen before; a round still in flight comes later."""
        fresh = list(takewhile(lambda landed: landed.index > self._learned, reversed(history)))
        for landed in reversed(fresh):
            self._learned = landed.index
            self.depth = landed.start + len(landed.tokens)
            self._renew()
            if landed.rows == 0:
                continue
            seconds = self.seconds(landed.proposed, landed.rows - 1)
            self.rate.add(len(landed.tokens), seconds)
            self.tokens += len(landed.tokens)
            self.lead += len(landed.tokens) - seconds / self.seconds(0, 0)
            self._renew()
            if landed.confidences:
                self.forecast.age, self._observed = landed.index - self._observed, landed.index
                given = self.calibrate(landed.confidences)[: self.gamma]
                self.learn_confidences(self.refine(given), landed)
                self.refine.learn(given, landed.accepted, landed.rows - 1)

    def learn_confidences(self, confidences: Sequence[float], landed: Round) -> None:
        """Confidences of a finished round are free to look at."""
        self.forecast.observe(confidences)

    def verify(self, rows: int) -> float:
        """Seconds of a verify forward at the present depth."""
        return self._verify[min(rows, len(self._verify)) - 1]

    def drafting(self, proposed: int) -> float:
        """Seconds of a proposal at the present depth."""
        return self.curve.drafting(proposed, self.depth or None)

    def seconds(self, proposed: int, width: int) -> float:
        """Modelled seconds of a round."""
        return self.drafting(proposed) + self.verify(width + 1) + self.curve.host

    def price(self) -> float:
        """lambda."""
        return self._price

    def _table(self) -> list[float]:
        return [self.curve.verify(rows, self.depth or None) for rows in range(1, self.gamma + 2)]

    def _renew(self) -> None:
        """What is asked many times a round and changes once: the costs at the present depth, and lambda."""
        if self.curve.slope:
            self._verify = self._table()
        self._price = self.rate.value(self.seconds(0, 0))

    def _continuation(self, slot: int, survival: float, beyond: Sequence[float]) -> float:
        """The best value of admitting slot j, and perhaps some after it, over stopping before it."""
        price, start = self.price(), self.verify(slot)
        tokens = survival
        best = tokens - price * (self.verify(slot + 1) - start)
        for further, confidence in enumerate(beyond, start=slot + 1):
            survival *= confidence
            tokens += survival
            best = max(best, tokens - price * (self.verify(further + 1) - start))
        return best
