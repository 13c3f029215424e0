"""Confidences that are not seen yet: predicted from past rounds and from the slots already seen.

A round's confidences are a mean per slot plus a deviation that the slots of one round share (easy or
hard content) plus noise. The shared deviation carries over to the next round with factor `carry`; within
a round it is estimated from the slots seen so far, shrunk by how noisy they are.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

MEMORY = 0.005  # weight of one more round in a slot's mean, once there are many
SPREAD_MEMORY = 0.01


class Forecast:
    """Running estimates; `predict` never looks at anything of a slot beyond those it is given."""

    def __init__(self, slots: int, start: float = 0.6):
        self.slots = slots
        self.means = [start] * slots
        self.rounds = 0
        self.age = 0  # rounds since the last observed one
        self._shared = 0.0
        self._within = self._between = 0.02  # variances
        self._square, self._product = 1e-3, 0.9e-3  # of shared deviations one round apart

    @property
    def carry(self) -> float:
        """How much of a round's shared deviation is left one round later, 0 to 0.99."""
        return min(0.99, max(0.0, self._product / self._square))

    @property
    def high(self) -> bool:
        """Whether the last observed round was above average."""
        return self._shared > 0

    def for_another_text(self) -> Forecast:
        """A copy for a new run: what slots are like stays, what the last round was like does not."""
        other = copy.copy(self)
        other.means = list(self.means)
        other._shared, other.age = 0.0, 0
        return other

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
            if self.age == 1:
                self._square = 0.99 * self._square + self._shared**2
                self._product = 0.99 * self._product + self._shared * shared
        for slot, deviation in enumerate(deviations):
            self.means[slot] += max(MEMORY, 1 / self.rounds) * deviation
        self._shared, self.age = shared, 0

    def _prior(self) -> float:
        return self._shared * self.carry ** max(1, self.age) if self.rounds else 0.0


def _clip(confidence: float) -> float:
    return confidence if 0.01 < confidence < 0.99 else min(0.99, max(0.01, confidence))
