"""Which blocks of a batch are trained on, and what each slot must say.

Everything here is numpy and known before a forward runs: the weights of a step, and so the divisor of its
loss, need no device. Letters: B sequences, A anchors of a sequence, T slots of a block, S positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Anchors:
    """Anchor positions [B, A], ascending, then dummies: position 0 with keep false [B, A]."""

    positions: np.ndarray
    keep: np.ndarray


@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch, with teacher forcing.

    block_ids: what the backbone reads, anchor and masks            [B, A, T] int32
    previous: the token before each slot's, x_{k-1}                  [B, A, T] int32
    labels: the token each slot must say                             [B, A, T] int32
    sources: the position whose target distribution it must match    [B, A, T] int32
    counted: slots that are trained on, a prefix of each block       [B, A, T] bool
    """

    anchors: Anchors
    block_ids: np.ndarray
    previous: np.ndarray
    labels: np.ndarray
    sources: np.ndarray
    counted: np.ndarray

    def part(self, sequences: slice) -> Blocks:
        """The blocks of some of the sequences."""
        anchors = Anchors(self.anchors.positions[sequences], self.anchors.keep[sequences])
        arrays = (self.block_ids, self.previous, self.labels, self.sources, self.counted)
        return Blocks(anchors, *(array[sequences] for array in arrays))


def candidates(loss_mask: np.ndarray) -> np.ndarray:
    """Positions [B, S - 1] that may be anchors: they and the next one count in the loss mask [B, S]."""
    mask = loss_mask.astype(bool)
    both: np.ndarray = mask[:, :-1] & mask[:, 1:]
    return both


def choose_anchors(loss_mask: np.ndarray, count: int, rng: np.random.Generator) -> Anchors:
    """`count` candidates of each row of loss_mask [B, S], uniformly and without replacement.

    Where rows have fewer, dummies fill up; there are no more columns than the richest row needs, and at least one.
    """
    possible = candidates(loss_mask)
    columns = max(1, min(count, int(possible.sum(axis=1).max(initial=0))))
    keys = np.where(possible, rng.random(possible.shape), 2.0)  # 2.0 sorts behind every candidate
    chosen = np.argsort(keys, axis=1, kind="stable")[:, :columns]
    keep = np.take_along_axis(possible, chosen, axis=1)
    order = np.argsort(np.where(keep, chosen, loss_mask.shape[1]), axis=1, kind="stable")
    keep = np.take_along_axis(keep, order, axis=1)
    return Anchors(np.take_along_axis(chosen, order, axis=1) * keep, keep)


def make_blocks(ids: np.ndarray, loss_mask: np.ndarray, anchors: Anchors, slots: int, mask_token_id: int) -> Blocks:
    """The blocks at `anchors` of token ids [B, S] with loss mask [B, S].

    A slot counts while all slots before it do, its token exists and is in the loss mask.
    """
    length = ids.shape[1]
    positions = anchors.positions[..., None] + 1 + np.arange(slots)  # [B, A, T]
    keep = anchors.keep[..., None]
    safe = np.where(keep, np.minimum(positions, length - 1), 0)
    rows = np.arange(ids.shape[0])[:, None, None]
    labels = ids[rows, safe]
    counted = np.cumprod(keep & (positions < length) & (loss_mask[rows, safe] > 0), axis=-1).astype(bool)
    tokens = ids[rows[..., 0], anchors.positions]  # [B, A]
    block_ids = np.full(safe.shape, mask_token_id, dtype=np.int32)
    block_ids[..., 0] = np.where(anchors.keep, tokens, mask_token_id)
    previous = np.concatenate([tokens[..., None], labels[..., :-1]], axis=-1)
    return Blocks(anchors, block_ids, previous.astype(np.int32), labels.astype(np.int32),
                  np.maximum(safe - 1, 0).astype(np.int32), counted)


def slot_weights(counted: np.ndarray, decay: float | None) -> np.ndarray:
    """exp(-j / decay) where slot j counts, 0 elsewhere [B, A, T]; None or 0 is no decay (paper, equation of w_k).

    The paper takes the block size for `decay`, DeepSeek's released settings 4.0.
    """
    slots = np.arange(counted.shape[-1], dtype=np.float32)
    fading = np.exp(-slots / np.float32(decay)) if decay else np.ones_like(slots)
    weights: np.ndarray = (counted * fading).astype(np.float32)
    return weights
