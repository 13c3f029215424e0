"""Learning rate, clipping and AdamW, as DeepSeek's runs have them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_map


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up over int(warmup * steps) steps, then a cosine to zero.

    DeepSeek's arrangement of two schedulers multiplies the cosine by a constant slightly above 1, which only
    shows in short runs; it is kept, so that traces can be compared.
    """

    peak: float
    steps: int
    warmup: float = 0.04

    def at(self, step: int) -> float:
        """The learning rate of step 0, 1, ..."""
        warm = int(self.warmup * self.steps)
        if step < warm:
            return self.peak * (step + 1) / warm
        left = self.steps - warm
        excess = 2 / (1 + math.cos(math.pi / left)) if left > 1 else 1.0
        return 0.5 * self.peak * excess * (1 + math.cos(math.pi * (step - warm) / left))


class Optimiser:
    """AdamW (betas 0.9 and 0.999, eps 1e-8) on float32 masters, after clipping to the norm `clip` (0: not at all).

    It keeps nothing: masters and moments go in and new ones come out, so that a step that is broken off left no trace.
    """

    def __init__(self, schedule: Schedule, clip: float = 1.0, weight_decay: float = 0.0):
        self.schedule, self.clip, self._weight_decay = schedule, clip, weight_decay

    def start(self, masters: dict[str, Any]) -> dict[str, Any]:
        """The moments before the first step."""
        adam = self._adam(0)
        adam.init(masters)
        return adam.state

    def update(
        self, step: int, masters: dict[str, Any], moments: dict[str, Any], gradients: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], mx.array]:
        """New masters and moments, and the norm of the gradients before clipping."""
        gradients, norm = optim.clip_grad_norm(gradients, self.clip or math.inf)
        adam = self._adam(step)
        adam.state = {**tree_map(lambda array: array, moments), "learning_rate": adam.learning_rate}  # it is written to
        return adam.apply_gradients(gradients, masters), adam.state, norm

    def _adam(self, step: int) -> optim.AdamW:
        return optim.AdamW(self.schedule.at(step), [0.9, 0.999], 1e-8, self._weight_decay, bias_correction=True)
