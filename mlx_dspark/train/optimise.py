"""Learning rate, clipping and AdamW, as DeepSeek's runs have them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten


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
    """AdamW (betas 0.9 and 0.999, eps 1e-8) on float32 masters, after clipping to the norm `clip`."""

    def __init__(self, schedule: Schedule, clip: float = 1.0, weight_decay: float = 0.0):
        self.schedule, self.clip = schedule, clip
        self._adam = optim.AdamW(schedule.peak, [0.9, 0.999], 1e-8, weight_decay, bias_correction=True)

    def update(self, step: int, masters: dict[str, Any], gradients: dict[str, Any]) -> tuple[dict[str, Any], mx.array]:
        """New masters, and the norm of the gradients before clipping."""
        gradients, norm = optim.clip_grad_norm(gradients, self.clip)
        self._adam.learning_rate = self.schedule.at(step)
        return self._adam.apply_gradients(gradients, masters), norm

    def start(self, masters: dict[str, Any]) -> None:
        """Make the moments, before the first update."""
        self._adam.init(masters)

    @property
    def arrays(self) -> dict[str, mx.array]:
        """The state by flat name, for a checkpoint."""
        return dict(tree_flatten(self._adam.state))

    def restore(self, arrays: dict[str, mx.array]) -> None:
        """Continue from `arrays`."""
        self._adam.state = tree_unflatten(list(arrays.items()))
