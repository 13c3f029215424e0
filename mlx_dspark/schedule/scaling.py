"""Temperatures: confidences corrected slot by slot, c -> sigmoid(logit(c) / T)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .rate import Calibrate

CLAMP = 1e-8  # confidences closer to 0 or 1 are taken for this close


@dataclass(frozen=True)
class Scaling:
    """A function from raw confidences c_1..c_n to calibrated ones; slots without a temperature stay raw."""

    temperatures: tuple[float, ...] = ()

    def __call__(self, confidences: Sequence[float]) -> tuple[float, ...]:
        scaled = [_scale(c, t) for c, t in zip(confidences, self.temperatures, strict=False)]
        return (*scaled, *confidences[len(scaled) :])


def temperatures_of(calibrate: Calibrate) -> tuple[float, ...] | None:
    """What a calibration is made of, empty where it changes nothing; None where temperatures cannot express it."""
    if calibrate is tuple:
        return ()
    return calibrate.temperatures if isinstance(calibrate, Scaling) else None


def _scale(confidence: float, temperature: float) -> float:
    inner = min(1 - CLAMP, max(CLAMP, confidence))
    return 1 / (1 + math.exp(-math.log(inner / (1 - inner)) / temperature))
