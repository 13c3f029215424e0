"""Is a confidence of 0.8 right four times in five? Metrics, and sequential temperature scaling (paper, 3.2.1).

The quantity that matters is the survival a_j = c_1 * ... * c_j against "all drafts up to j were accepted".
Sequential temperature scaling goes through the slots from left to right and gives each the temperature
T_j of sigmoid(logit_j / T_j) that minimises the expected calibration error of a_j, earlier ones fixed.
Bins and clamps are those of DeepSeek's evaluation code, so that numbers can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .scaling import CLAMP, Scaling

BINS = 20
FINE_BINS = 1000
GRID = tuple(float(t) for t in np.round(np.geomspace(0.2, 5.0, 161), 6))


@dataclass(frozen=True)
class Rounds:
    """Collected rounds. logits [n, gamma]; accepted [n]: length of the accepted run; lengths [n]: slots verified."""

    logits: np.ndarray
    accepted: np.ndarray
    lengths: np.ndarray

    def at(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """(which rounds verified this slot, whether their drafts up to it were accepted)."""
        there = self.lengths > slot
        return there, (self.accepted > slot)[there]


@dataclass(frozen=True)
class SlotMetrics:
    """How good the survivals of one slot are. NaN where nothing was observed.

    reliability: the non-empty bins, as (bin, mean prediction, mean outcome, count).
    """

    slot: int
    count: int
    ece: float
    auc: float
    brier: float
    predicted: float
    observed: float
    reliability: tuple[tuple[int, float, float, int], ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON; NaN becomes null."""
        numbers = {name: _null(getattr(self, name)) for name in ("ece", "auc", "brier", "predicted", "observed")}
        return {"slot": self.slot, "count": self.count, **numbers, "reliability": [list(b) for b in self.reliability]}


def survivals(logits: np.ndarray, temperatures: Sequence[float] | None = None) -> np.ndarray:
    """a_1..a_gamma from confidence logits [n, gamma]; float64 products of float32 sigmoids, as the reference has it."""
    scaled = logits if temperatures is None else logits / np.asarray(temperatures[: logits.shape[1]], dtype=np.float64)
    return np.cumprod(_sigmoid(scaled.astype(np.float32)).astype(np.float64), axis=1)


def metrics(rounds: Rounds, temperatures: Sequence[float] | None = None) -> list[SlotMetrics]:
    """Calibration of each slot's survival, raw or with temperatures."""
    predicted = survivals(rounds.logits, temperatures)
    found = []
    for slot in range(rounds.logits.shape[1]):
        there, label = rounds.at(slot)
        found.append(_slot_metrics(slot, predicted[there, slot], label.astype(np.float64)))
    return found


def summarise(slots: Sequence[SlotMetrics]) -> dict[str, float | None]:
    """ECE, AUC and Brier score over all slots, each weighted by its count; None where nothing was observed.

    A slot whose AUC is undefined does not count for the AUC.
    """
    found: dict[str, float | None] = {}
    for name in ("ece", "auc", "brier"):
        seen = [(getattr(s, name), s.count) for s in slots if s.count and not math.isnan(getattr(s, name))]
        total = sum(count for _, count in seen)
        found[name] = sum(value * count for value, count in seen) / total if total else None
    return found


def fit_temperatures(rounds: Rounds, grid: Sequence[float] = GRID) -> list[float]:
    """Sequential temperature scaling: one temperature per slot, 1 where a slot was never verified.

    Among equally good temperatures the one nearest to 1 (on a log scale) is taken.
    """
    grid_array = np.array(sorted(grid, key=lambda t: abs(math.log(t))))
    temperatures: list[float] = []
    survival = np.ones(len(rounds.logits))
    for slot in range(rounds.logits.shape[1]):
        there, label = rounds.at(slot)
        chosen = 1.0
        if there.any():
            candidates = survival[there, None] * _sigmoid(rounds.logits[there, slot, None] / grid_array)
            errors = [_ece(np.clip(column, CLAMP, 1 - CLAMP), label) for column in candidates.T]
            chosen = float(grid_array[int(np.argmin(np.round(errors, 12)))])
        temperatures.append(chosen)
        survival = survival * _sigmoid(rounds.logits[:, slot] / chosen)
    return temperatures


def calibrator(temperatures: Sequence[float] | None) -> Scaling:
    """The function that corrects confidences by fitted temperatures; without any it changes nothing."""
    return Scaling(tuple(temperatures or ()))


def _slot_metrics(slot: int, predicted: np.ndarray, label: np.ndarray) -> SlotMetrics:
    if len(predicted) == 0:
        return SlotMetrics(slot, 0, *(math.nan,) * 5, ())
    predicted = np.clip(predicted, CLAMP, 1 - CLAMP)
    count, mean_predicted, mean_label = _binned(predicted, label)
    filled = np.flatnonzero(count)
    return SlotMetrics(
        slot=slot,
        count=len(predicted),
        ece=_ece(predicted, label),
        auc=_auc(predicted, label),
        brier=float(np.mean((predicted - label) ** 2)),
        predicted=float(predicted.mean()),
        observed=float(label.mean()),
        reliability=tuple((int(b), float(mean_predicted[b]), float(mean_label[b]), int(count[b])) for b in filled),
    )


def _binned(predicted: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    index = np.minimum((predicted * BINS).astype(int), BINS - 1)
    count = np.bincount(index, minlength=BINS)
    safe = np.maximum(count, 1)
    return (count, np.bincount(index, weights=predicted, minlength=BINS) / safe,
            np.bincount(index, weights=label, minlength=BINS) / safe)


def _ece(predicted: np.ndarray, label: np.ndarray) -> float:
    count, mean_predicted, mean_label = _binned(predicted, label)
    return float((count / count.sum() * np.abs(mean_predicted - mean_label)).sum())


def _auc(predicted: np.ndarray, label: np.ndarray) -> float:
    """From fine bins: the chance that an accepted prefix was given more than a rejected one, ties half."""
    index = np.minimum((predicted * FINE_BINS).astype(int), FINE_BINS - 1)
    positive = np.bincount(index, weights=label, minlength=FINE_BINS)
    negative = np.bincount(index, weights=1 - label, minlength=FINE_BINS)
    if positive.sum() == 0 or negative.sum() == 0:
        return math.nan
    lower = np.cumsum(negative) - negative
    return float((positive * (lower + 0.5 * negative)).sum() / (positive.sum() * negative.sum()))


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-logits)))


def _null(value: float) -> float | None:
    return None if math.isnan(value) else value
