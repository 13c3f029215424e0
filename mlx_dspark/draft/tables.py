"""Embedding and output head of a draft: its own, or the target's where the checkpoint has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from .spec import DraftSpec


@dataclass(frozen=True)
class TargetTables:
    """What a draft may borrow. embed: tokens [B, T] -> raw rows [B, T, D]; head: [B, T, D] -> [B, T, V], uncapped."""

    embed: Callable[[mx.array], mx.array]
    head: Callable[[mx.array], mx.array]


class Tables(nn.Module):
    """Input rows and base logits, with the family's scale and soft cap.

    A head of `draft_vocab_size` rows speaks a reduced vocabulary; `d2t` [draft_vocab_size] holds the
    distance from a draft id to the target id, and `widen` spreads its logits over the target's ids.
    The target's tables may be longer or shorter than `vocab_size` by padding; `match` says how long.
    """

    def __init__(self, spec: DraftSpec, own_embed: bool, own_head: bool):
        super().__init__()
        self._spec = spec
        if own_embed:
            self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        if own_head:
            self.lm_head = nn.Linear(spec.hidden_size, spec.head_rows, bias=False)
        if spec.draft_vocab_size is not None:
            self.d2t = mx.zeros((spec.draft_vocab_size,), dtype=mx.int32)
        self._borrowed: TargetTables | None = None
        self._width = spec.vocab_size

    @property
    def incomplete(self) -> bool:
        """Something must be borrowed."""
        return "embed_tokens" not in self or "lm_head" not in self

    def borrow(self, tables: TargetTables) -> None:
        """Use the target's tables for those that are missing here."""
        self._borrowed = tables

    def match(self, width: int) -> None:
        """Propose logits of `width` columns, which the accept rule compares with the target's."""
        self._width = width

    def known(self, tokens: mx.array) -> mx.array:
        """Ids of the target's padding, for which this draft has no rows, become its last row."""
        return tokens if self._width <= self._spec.vocab_size else mx.minimum(tokens, self._spec.vocab_size - 1)

    def embed(self, tokens: mx.array, dtype: mx.Dtype) -> mx.array:
        """Rows of tokens [B, T], scaled -> [B, T, D]."""
        rows = self.embed_tokens(self.known(tokens)) if "embed_tokens" in self else self._borrowed.embed(tokens)
        rows = rows.astype(dtype)
        scale = self._spec.embed_scale
        return rows if scale == 1 else rows * mx.array(scale, dtype=dtype)  # rounded to the dtype, as in training

    def logits(self, hidden: mx.array) -> mx.array:
        """Base logits U: hidden [B, N, D] -> [B, N, head rows]; capped before any bias is added."""
        logits = self.lm_head(hidden) if "lm_head" in self else self._borrowed.head(hidden)
        if self._spec.logit_scale != 1:
            logits = logits * self._spec.logit_scale
        cap = self._spec.softcap
        return fitted(logits if cap is None else mx.tanh(logits / cap) * cap, self._spec.head_rows)

    @property
    def reduced(self) -> bool:
        """The head speaks a vocabulary of its own."""
        return self._spec.draft_vocab_size is not None

    def rows(self, columns: int) -> int:
        """How many of a head's columns are ids of the target."""
        return min(columns, self._width)

    def padded(self, logits: mx.array) -> mx.array:
        """[..., columns] -> [..., target's V]: cut, or filled with -inf."""
        return fitted(logits, self._width)

    def widen(self, logits: mx.array) -> mx.array:
        """[B, head rows] -> [B, target's V]; ids the draft cannot say are -inf."""
        if self._spec.draft_vocab_size is None:
            return self.padded(logits)
        ids = mx.arange(self._spec.draft_vocab_size) + self.d2t
        wide = mx.full((logits.shape[0], self._spec.vocab_size), -mx.inf, dtype=logits.dtype)
        wide[:, ids] = logits
        return fitted(wide, self._width)


def fitted(logits: mx.array, width: int) -> mx.array:
    """Cut [..., columns] to `width`, or pad with -inf: what differs is padding, which nobody says."""
    columns = logits.shape[-1]
    if columns == width:
        return logits
    if columns > width:
        return logits[..., :width]
    padding = mx.full((*logits.shape[:-1], width - columns), -mx.inf, dtype=logits.dtype)
    return mx.concatenate([logits, padding], axis=-1)
