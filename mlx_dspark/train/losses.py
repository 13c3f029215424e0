"""The loss of block drafts (paper, section 3.2; DeepSeek's code where they differ) and what is logged with it.

total = ce * CE + tv * TV + confidence * BCE, each a sum over slots weighted by w_k and divided by the sum
of weights over the whole batch. TV is sum_v |q - p| without the factor 1/2; the confidence's label
c* = 1 - sum_v |q - p| / 2, the exact chance that the slot is accepted, has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..draft.block import BlockDraft
from .anchors import Blocks
from .columns import Columns
from .forward import block_hidden
from .projection import Goal, Head, project

EPSILON = 1e-6  # of the divisor, as in DeepSeek's code


@dataclass(frozen=True)
class LossWeights:
    """What each term counts, and how fast slots fade (None: not). The defaults are DSpark's released settings."""

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    decay: float | None = 4.0


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the device: taps [B, S, M*D], last hidden states [B, S, D] and its blocks.

    weights: w of each slot [B, A, T]. divisor: their sum over everything that is one loss (all machines).
    """

    taps: mx.array
    last: mx.array
    blocks: Blocks
    weights: np.ndarray
    divisor: float


@dataclass(frozen=True)
class Sums:
    """What is logged of a batch, as numerators and divisors, so that it adds up over batches and machines.

    values: weighted sums of CE, TV and BCE, and of the weights; blocks, and the sum of their expected committed tokens;
    weighted sums of |c - c*|, c - c* and of the same difference of survivals; c* and slots by position [9 + 2T].
    """

    values: np.ndarray

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.values + other.values)

    def _ratio(self, top: int, bottom: int) -> float:
        return float(self.values[top] / max(self.values[bottom], 1e-20))

    ce = property(lambda self: self._ratio(0, 3), doc="Mean cross entropy.")
    tv = property(lambda self: self._ratio(1, 3), doc="Mean sum_v |q - p|.")
    bce = property(lambda self: self._ratio(2, 3), doc="Mean binary cross entropy of the confidence.")
    tau = property(lambda self: self._ratio(4, 5), doc="Committed tokens a round at temperature 1, expected.")
    confidence_error = property(lambda self: self._ratio(6, 3), doc="Mean |c - c*|.")
    confidence_bias = property(lambda self: self._ratio(7, 3), doc="Mean c - c*.")
    survival_bias = property(lambda self: self._ratio(8, 3), doc="Mean of survival by c minus survival by c*.")

    @property
    def acceptance(self) -> list[float]:
        """Conditional acceptance by position: mean c* of the slots that count, at temperature 1 [T]."""
        accepted, counted = np.split(self.values[9:], 2)
        return (accepted / np.maximum(counted, 1e-20)).tolist()

    def loss(self, weights: LossWeights) -> float:
        """The total loss."""
        return weights.ce * self.ce + weights.tv * self.tv + weights.confidence * self.bce


def block_loss(
    draft: BlockDraft, batch: Batch, weights: LossWeights, chunk: int | None = None, columns: Columns | None = None
) -> tuple[mx.array, mx.array]:
    """The loss of one batch, differentiable in the draft's parameters, and the values of its `Sums`.

    columns: the part of the vocabulary that it is computed over; None is all of it.
    """
    blocks, head = batch.blocks, head_of(draft)
    previous = mx.array(blocks.previous).flatten(0, 1)  # [B*A, T]
    hidden = block_hidden(draft, batch.taps, blocks).flatten(0, 1)  # [B*A, T, D]
    latent = draft.markov_head.latents(previous, hidden)
    rows = np.flatnonzero(blocks.counted)  # slots that do not count are not projected
    index, w = mx.array(rows), mx.array(batch.weights.reshape(-1)[rows])
    flat, scale, labels = _rows(hidden, index), 1 / (batch.divisor + EPSILON), blocks.labels.reshape(-1)[rows]
    if columns is not None:
        labels, head = columns.labels(labels), columns.head(head)
    goal = Goal(_target_rows(batch, rows), mx.array(labels), w * (weights.ce * scale),
                w * (weights.tv * scale) if weights.tv else None)
    total, ce, variation = project(flat, None if latent is None else _rows(latent, index), head, goal, chunk)
    accept = mx.clip(1 - 0.5 * variation, 0, 1)  # c* [N]
    bce, confidence = mx.zeros_like(ce), accept
    if draft.has_confidence:
        logit = draft.confidence_head(flat, previous.flatten()[index], draft.markov_head)
        bce, confidence = nn.losses.binary_cross_entropy(logit, accept, reduction="none"), mx.sigmoid(logit)
        total = total + (w * bce).sum() * (weights.confidence * scale)
    return total, mx.stop_gradient(_sums(blocks, index, w, (ce, variation, bce), (accept, confidence)))


def head_of(draft: nn.Module) -> Head:
    """The draft's tables as the projection takes them. Raises ValueError for a head that cannot be trained with."""
    spec = draft.spec
    if "lm_head" not in draft.tables or spec.draft_vocab_size is not None or spec.logit_scale != 1:
        raise ValueError("this draft cannot be trained: its output head is not a full table of its own")
    if spec.selector is not None:
        raise ValueError("this draft cannot be trained: DFlash2's candidate selector has no loss here")
    w2 = getattr(getattr(draft, "markov_head", None), "markov_w2", None)
    return Head(draft.tables.lm_head.weight, None if w2 is None else w2.weight, spec.softcap)


def _target_rows(batch: Batch, rows: np.ndarray) -> mx.array:
    """Last hidden states [N, D] of the positions whose target distribution the slots `rows` must match."""
    sources = batch.blocks.sources  # [B, A, T], positions of their sequences
    sequences = np.arange(len(sources))[:, None, None]
    return _rows(batch.last, mx.array((sequences * batch.last.shape[1] + sources).reshape(-1)[rows]))


def _rows(array: mx.array, index: mx.array) -> mx.array:
    """Rows [N, W] of an array [..., W] by their numbers in the flattened leading axes."""
    return array.reshape(-1, array.shape[-1])[index]


def _sums(
    blocks: Blocks, index: mx.array, w: mx.array, terms: tuple[mx.array, mx.array, mx.array],
    chances: tuple[mx.array, mx.array],
) -> mx.array:
    """The values of `Sums`. chances: c* and c of the rows [N], put back into their blocks."""
    slots = blocks.counted.shape[-1]
    empty = mx.zeros((blocks.counted.size,))
    accept, confidence = (empty.at[index].add(x).reshape(-1, slots) for x in chances)  # [B*A, T]
    weight = empty.at[index].add(w).reshape(-1, slots)
    survival = mx.cumprod(accept, axis=-1)
    used = float(blocks.counted[..., 0].sum())
    scalars = [*((term * w).sum() for term in terms), w.sum(), survival.sum() + used, mx.array(used),
               (mx.abs(confidence - accept) * weight).sum(), ((confidence - accept) * weight).sum(),
               ((mx.cumprod(confidence, axis=-1) - survival) * weight).sum()]
    counted = mx.array(blocks.counted.reshape(-1, slots).sum(axis=0).astype(np.float32))
    return mx.concatenate([mx.stack(scalars), accept.sum(axis=0), counted])
