"""What one micro-batch of a kind of draft is: its random choices on the host, its loss on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..draft import BlockDraft, DraftSpec, Eagle3Draft
from .anchors import choose_anchors, make_blocks, slot_weights
from .columns import choose_columns
from .config import TrainConfig
from .eagle3 import Eagle3Batch, eagle3_loss
from .losses import Batch, LossWeights, block_loss, head_of

ALL = slice(None)


@dataclass(frozen=True)
class Prepared:
    """This machine's part of a micro-batch, before any forward.

    ids [b, S]. weight: the divisor of the loss, of all machines' parts. work: what the task made of it.
    """

    ids: np.ndarray
    weight: float
    work: Any


class Task(Protocol):
    """loss_weights: how the logged terms make up the loss."""

    loss_weights: LossWeights

    def prepare(
        self, ids: np.ndarray, mask: np.ndarray, lengths: np.ndarray, rng: np.random.Generator, mine: slice = ALL
    ) -> Prepared:
        """Choose what is trained on in sequences [B, S], and keep those that are `mine`.

        The choice is the same on all machines, and so is their sum on any number of them.
        """

    def loss(
        self, draft: Any, prepared: Prepared, taps: mx.array, last: mx.array, divisor: float,
        training: bool = True,
    ) -> tuple[mx.array, mx.array]:
        """The loss and the values of its `Sums`. training: shortcuts that only training may take are allowed."""


@dataclass(frozen=True)
class BlockTask:
    """DSpark and DFlash."""

    spec: DraftSpec
    anchors: int
    loss_weights: LossWeights
    columns: int = 0

    def prepare(
        self, ids: np.ndarray, mask: np.ndarray, lengths: np.ndarray, rng: np.random.Generator, mine: slice = ALL
    ) -> Prepared:
        chosen = choose_anchors(mask, self.anchors, rng)
        blocks = make_blocks(ids, mask, chosen, self.spec.gamma, self.spec.mask_token_id)
        weights = slot_weights(blocks.counted, self.loss_weights.decay)
        work = (blocks.part(mine), weights[mine], rng)
        return Prepared(ids[mine], float(weights.sum(dtype=np.float64)), work)

    def loss(
        self, draft: BlockDraft, prepared: Prepared, taps: mx.array, last: mx.array, divisor: float,
        training: bool = True,
    ) -> tuple[mx.array, mx.array]:
        blocks, weights, rng = prepared.work
        columns = None
        if self.columns and training:
            flat = last.reshape(-1, last.shape[-1])
            columns = choose_columns(head_of(draft), flat, blocks.labels[blocks.counted], self.columns, rng)
        return block_loss(draft, Batch(taps, last, blocks, weights, divisor), self.loss_weights, columns=columns)


@dataclass(frozen=True)
class Eagle3Task:
    """Eagle3's training-time test."""

    step_decay: float
    loss_weights: LossWeights = LossWeights(1.0, 0.0, 0.0, None)

    def prepare(
        self, ids: np.ndarray, mask: np.ndarray, lengths: np.ndarray, rng: np.random.Generator, mine: slice = ALL
    ) -> Prepared:
        return Prepared(ids[mine], float(ids.size), (mask[mine], lengths[mine]))

    def loss(
        self, draft: Eagle3Draft, prepared: Prepared, taps: mx.array, last: mx.array, divisor: float,
        training: bool = True,
    ) -> tuple[mx.array, mx.array]:
        mask, lengths = prepared.work
        batch = Eagle3Batch(prepared.ids, mask, lengths, taps, last)
        return eagle3_loss(draft, batch, self.step_decay, divisor)


def make_task(settings: TrainConfig, spec: DraftSpec) -> Task:
    """The task that the settings ask for."""
    if spec.kind == "eagle3":
        return Eagle3Task(settings.step_decay)
    weights = LossWeights(settings.ce, settings.tv, settings.confidence_weight, settings.decay or None)
    return BlockTask(spec, settings.anchors, weights, settings.columns)
