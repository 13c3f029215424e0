"""Confidences that are not seen yet: predicted from past rounds and from the slots already seen.

A round's confidences are a mean per slot plus a deviation that the slots of one round share (easy or
hard content) plus noise. The shared deviation carries over to the next round with factor `carry`; within
a round it is estimated from the slots seen so far, shrunk by how noisy they are.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

from .refine import shifted

MEMORY = 0.005  # weight of one more round in a slot's mean, once there are many
PRIOR = 16  # rounds of its own that what other texts were like is worth to a request among many
SPREAD_MEMORY = 0.01
NEAR = 8  # rounds between two observed ones that still tell how much carries over


class Forecast:
    """Running estimates; `predict` never looks at anything of a slot beyond those it is given."""

    def __init__(self, slots: int, start: float = 0.6):
        self.slots = slots
        self.means = [start] * slots
        self.rounds = 0
        self.seen = [0] * slots  # rounds by slot; a short proposal shows the first ones only
        self.age = 0  # rounds since the last observed one
        self._shared = 0.0
        self._within = self._between = 0.02  # variances
        self._square, self._product = 1e-3, 0.9e-3  # of shared deviations that are few rounds apart
        self._ages = 1e-3  # rounds between these, weighted like the squares

    @property
    def carry(self) -> float:
        """How much of a round's shared deviation is left one round later, 0 to 0.99."""
        correlation = min(1.0, max(0.0, self._product / self._square))  # by chance it may be more
        return min(0.99, math.pow(correlation, self._square / self._ages))

    @property
    def high(self) -> bool:
        """Whether the last observed round was above average."""
        return self._shared > 0

    def kept(self) -> Forecast:
        """A copy that stays as it is."""
        other = copy.copy(self)
        other.means, other.seen = list(self.means), list(self.seen)
        return other

    def for_another_text(self) -> Forecast:
        """A copy for a new run: what slots are like stays, what the last round was like does not."""
        other = self.kept()
        other._shared, other.age = 0.0, 0
        return other

    def for_one_of_many(self) -> Forecast:
        """A copy for one of several requests, which soon has means of its own."""
        other = self.for_another_text()
        other.rounds, other.seen = min(self.rounds, PRIOR), [min(count, PRIOR) for count in self.seen]
        return other

    def pool(self, confidences: Sequence[float], own: Forecast, tokens: int) -> None:
        """Learn what slots are like in all texts from a round of one of them, whose own forecast is given.

        It counts by its tokens, for hard passages take more rounds than others that are as long.
        """
        self.rounds += 1
        self._learn_means(confidences, tokens)
        self._within, self._between = own._within, own._between
        self._square, self._product, self._ages = own._square, own._product, own._ages

    def move(self, shift: float) -> None:
        """From now on, confidences have so much added to their logits."""
        self.means = shifted(self.means, shift)

    def expected(self) -> list[float]:
        """Confidences of a round that has not been drafted."""
        shift = self._prior()
        return [_clip(mean + shift) for mean in self.means]

    def predict(self, seen: Sequence[float]) -> list[float]:
        """Confidences of the slots after those in `seen` (c_1..c_j)."""
        count = len(seen)
        prior = self._prior()
        weight = count * self._between / (count * self._between + self._within)
        shared = prior + weight * (sum(c - m for c, m in zip(seen, self.means, strict=False)) / count - prior)
        return [_clip(mean + shared) for mean in self.means[count:]]

    def observe(self, confidences: Sequence[float]) -> None:
        """Learn from a round's confidences; a proposal cut short teaches its first slots only."""
        count = len(confidences)
        if count == 0:
            return
        self.rounds += 1
        deviations = [c - m for c, m in zip(confidences, self.means, strict=False)]
        shared = sum(deviations) / count
        weight = max(SPREAD_MEMORY, 1 / self.rounds)
        if count > 1:
            within = sum((d - shared) ** 2 for d in deviations) / (count - 1)
            self._within += weight * (within - self._within)
        if self.rounds > 1:
            surprise = (shared - self._prior()) ** 2 - self._within / count
            self._between = max(1e-4, self._between + weight * (max(0.0, surprise) - self._between))
            if self.age <= NEAR:
                self._square = 0.99 * self._square + self._shared**2
                self._product = 0.99 * self._product + self._shared * shared
                self._ages = 0.99 * self._ages + self._shared**2 * max(1, self.age)
        self._learn_means(confidences)
        self._shared, self.age = shared, 0

    def _learn_means(self, confidences: Sequence[float], weight: int = 1) -> None:
        for slot, confidence in enumerate(confidences[: self.slots]):
            self.seen[slot] += weight
            self.means[slot] += weight * max(MEMORY, 1 / self.seen[slot]) * (confidence - self.means[slot])

    def _prior(self) -> float:
        return self._shared * self.carry ** max(1, self.age) if self.rounds else 0.0


def _clip(confidence: float) -> float:
    return confidence if 0.01 < confidence < 0.99 else min(0.99, max(0.01, confidence))
