"""Confidences corrected while a run goes on, from its own accept flags: in all texts, and in one text.

One scale on the logit of every confidence, c -> sigmoid(scale * logit(c)), follows the gradient of the
flags' log-likelihood: a draft that is too sure of itself is believed less. Bounded, with a step that
decays to a floor, so that it tracks slowly changing text and cannot run away. In replay, drafts with
logits 1.6 times too large lose 5% of speed uncorrected and 0.3% with this; calibrated ones lose nothing
that matters (tests/test_refine.py).

What one text is off by is a shift of its logits. Among the small pair's held-out prompts (tests/recorded) one passes
all its first slots where 0.69 is promised, another 0.26 of them where 0.50 is. A text has few rounds: so the shift
follows by Newton's method, under a normal prior whose variance is learned from all texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

FIRST_STEP, LAST_STEP = 0.1, 0.003  # of the gradient in log(scale), falling with the square root of the rounds
LIMITS = (math.log(0.3), math.log(2.0))
CLAMP = 1e-6
START = 0.5  # standard deviation of the shifts of texts, before it is known
CERTAINTY = 50.0  # of that, in squared flags
SPREAD_MEMORY = 0.999  # per round of a text
MEMORY = 0.9  # per round: a shift looks back about ten
FARTHEST = 3.0


class Refinement:
    """scale: 1 believes the confidences as they are."""

    def __init__(self) -> None:
        self._log_scale = 0.0
        self._rounds = 0

    @property
    def scale(self) -> float:
        return math.exp(self._log_scale)

    def __call__(self, confidences: Sequence[float]) -> tuple[float, ...]:
        """Corrected confidences; each from itself and past rounds alone."""
        return scaled(confidences, self.scale)

    def learn(self, confidences: Sequence[float], accepted: int, verified: int) -> None:
        """Take in a finished round: slots up to the first rejection were judged, later ones were not."""
        judged = confidences[: min(verified, accepted + 1)]
        if not judged:
            return
        scale, gradient = self.scale, 0.0
        for slot, confidence in enumerate(judged):
            logit = _logit(confidence)
            gradient += ((slot < accepted) - _sigmoid(scale * logit)) * logit * scale
        self._rounds += 1
        step = max(LAST_STEP, FIRST_STEP / math.sqrt(self._rounds))
        self._log_scale = max(LIMITS[0], min(LIMITS[1], self._log_scale + step * gradient))


class Spread:
    """How much texts differ in what their confidences are off by: the variance of their shifts, learned from all.

    Where confidences are right in every text it goes to nothing, and no text is shifted.
    """

    def __init__(self) -> None:
        self._excess, self._weight = START**2 * CERTAINTY, CERTAINTY

    @property
    def variance(self) -> float:
        return max(1e-6, self._excess / self._weight)

    def learn(self, surprise: float, chance: float, information: float) -> None:
        """Take in one text of late: surprises add up to this, by chance with such a variance; a shift would add to it
        as the square of the information about it."""
        self._excess = SPREAD_MEMORY * self._excess + surprise**2 - chance
        self._weight = SPREAD_MEMORY * self._weight + information**2


class Shift:
    """value: what is added to the logits of one text's confidences; 0 believes them as they are."""

    def __init__(self, spread: Spread | None = None) -> None:
        self.value = 0.0
        self._spread = Spread() if spread is None else spread
        self._information = 0.0
        self._surprise = self._chance = self._weight = 0.0  # of late, without the shift

    def __call__(self, confidences: Sequence[float]) -> list[float]:
        """Corrected confidences."""
        return shifted(confidences, self.value)

    def learn(self, expected: Sequence[float], accepted: int, verified: int) -> float:
        """Take in a finished round, of which so much was expected with the present shift; returns how far it moves."""
        judged = expected[: min(verified, accepted + 1)]
        if not judged:
            return self._fade()
        surprise, information = _surprise(judged, accepted)
        self._information = MEMORY * self._information + information
        before = self.value
        moved = before + surprise / (1 / self._spread.variance + self._information)
        self.value = max(-FARTHEST, min(FARTHEST, moved))
        surprise, information = _surprise(shifted(judged, -before), accepted)
        self._surprise = MEMORY * self._surprise + surprise
        self._chance = MEMORY**2 * self._chance + information
        self._weight = MEMORY * self._weight + information
        self._spread.learn(self._surprise, self._chance, self._weight)
        return self.value - before

    def _fade(self) -> float:
        """A round without flags: a text that is not drafted for goes back to what all are like, so that a few bad
        rounds do not park it for good."""
        before = self.value
        self.value *= MEMORY
        self._information *= MEMORY
        return self.value - before


def _surprise(judged: Sequence[float], accepted: int) -> tuple[float, float]:
    """(accept flags less what was expected, the variance of that by chance)."""
    return (sum((slot < accepted) - p for slot, p in enumerate(judged)), sum(p * (1 - p) for p in judged))


def scaled(confidences: Sequence[float], scale: float) -> tuple[float, ...]:
    """Confidences with their logits times so much."""
    return tuple(1 / (1 + (1 / _inner(confidence) - 1) ** scale) for confidence in confidences)


def shifted(confidences: Sequence[float], shift: float) -> list[float]:
    """Confidences with so much added to their logits."""
    if not shift:
        return list(confidences)
    odds = math.exp(-shift)
    return [1 / (1 + (1 / _inner(confidence) - 1) * odds) for confidence in confidences]


def _logit(confidence: float) -> float:
    return -math.log(1 / _inner(confidence) - 1)


def _inner(confidence: float) -> float:
    return confidence if CLAMP < confidence < 1 - CLAMP else max(CLAMP, min(1 - CLAMP, confidence))


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))
