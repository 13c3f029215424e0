"""Confidences corrected while a run goes on, from its own accept flags.

One scale on the logit of every confidence, c -> sigmoid(scale * logit(c)), follows the gradient of the
flags' log-likelihood: a draft that is too sure of itself is believed less. Bounded, with a step that
decays to a floor, so that it tracks slowly changing text and cannot run away. In replay, drafts with
logits 1.6 times too large lose 5% of speed uncorrected and 0.3% with this; calibrated ones lose nothing
that matters (tests/test_refine.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

FIRST_STEP, LAST_STEP = 0.1, 0.003  # of the gradient in log(scale), falling with the square root of the rounds
LIMITS = (math.log(0.3), math.log(2.0))
CLAMP = 1e-6


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
        scale = self.scale
        return tuple(1 / (1 + (1 / _inner(confidence) - 1) ** scale) for confidence in confidences)

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


def _logit(confidence: float) -> float:
    return -math.log(1 / _inner(confidence) - 1)


def _inner(confidence: float) -> float:
    return confidence if CLAMP < confidence < 1 - CLAMP else max(CLAMP, min(1 - CLAMP, confidence))


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))
