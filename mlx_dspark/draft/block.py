"""A block draft: backbone, transition bias and confidence, composed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn

from ..sampling import Pick
from ..structs import Proposal
from .context import ContextCache
from .heads import ConfidenceHead, Markov, make_markov
from .qwen3 import Qwen3Backbone
from .spec import DraftSpec

FLUSH_ROWS = 256  # pending taps are turned into K/V from this many rows on, so that memory stays bounded


@dataclass(frozen=True)
class Tables:
    """The target's embedding and output head, borrowed where the checkpoint carries none.

    embed: tokens [B, T] -> [B, T, D]; head: hidden [B, T, D] -> logits [B, T, V].
    """

    embed: Callable[[mx.array], mx.array]
    head: Callable[[mx.array], mx.array]


@dataclass
class BlockState:
    """One request's draft context: K/V per layer, and taps whose K/V are not computed yet.

    Taps wait until the next block because its K/V projection then serves both; a parked request
    collects them without paying for the draft.
    """

    caches: list[ContextCache]
    pending: list[mx.array] = field(default_factory=list)  # taps [B, T, M*D]

    @property
    def waiting(self) -> int:
        return sum(taps.shape[1] for taps in self.pending)


class BlockDraft(nn.Module):
    """DSpark for one target family; DFlash (DeepSpec's) is the same with the heads off.

    own_embed, own_head: the checkpoint carries these tables; the others come from `borrow`.
    """

    def __init__(self, spec: DraftSpec, own_embed: bool, own_head: bool):
        super().__init__()
        self.spec = spec
        self.backbone = Qwen3Backbone(spec)
        self.markov_head = make_markov(spec)
        if spec.confidence:
            self.confidence_head = ConfidenceHead(spec)
        if own_embed:
            self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        if own_head:
            self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        self._borrowed: Tables | None = None

    @property
    def gamma(self) -> int:
        return self.spec.block_size

    @property
    def taps(self) -> tuple[int, ...]:
        return self.spec.taps

    @property
    def has_confidence(self) -> bool:
        return self.spec.confidence

    @property
    def dtype(self) -> mx.Dtype:
        return self.backbone.norm.weight.dtype

    @property
    def needs_tables(self) -> bool:
        """The checkpoint lacks the embedding or the head."""
        return "embed_tokens" not in self or "lm_head" not in self

    def borrow(self, tables: Tables) -> None:
        """Use the target's tables for those the checkpoint lacks."""
        self._borrowed = tables

    def embed(self, tokens: mx.array) -> mx.array:
        """tokens [B, T] -> embeddings in the draft's dtype [B, T, D]."""
        rows = self.embed_tokens(tokens) if "embed_tokens" in self else self._borrowed.embed(tokens)
        return rows.astype(self.dtype)

    def base_logits(self, hidden: mx.array) -> mx.array:
        """U: hidden [B, N, D] -> [B, N, V]."""
        return self.lm_head(hidden) if "lm_head" in self else self._borrowed.head(hidden)

    def start(self) -> BlockState:
        return BlockState(self.backbone.make_cache())

    def observe(self, state: BlockState, tokens: mx.array, taps: mx.array) -> None:
        """Queue taps [B, T, M*D] of committed rows; `tokens` carry nothing the taps do not."""
        state.pending.append(taps)
        if state.waiting >= FLUSH_ROWS:
            self.backbone.extend(self._take_context(state), state.caches)
            mx.async_eval([array for cache in state.caches for array in cache.arrays])

    def propose(self, state: BlockState, anchor: mx.array, slots: int, pick: Pick) -> Proposal:
        """One block pass of all block_size rows, then `slots` steps of the sequential head."""
        hidden = self.block_hidden(state, anchor)[:, :slots]  # [B, N, D]
        return self.walk(self.base_logits(hidden), hidden, anchor, pick)

    def block_hidden(self, state: BlockState, anchor: mx.array) -> mx.array:
        """Hidden states of the block [anchor, mask, mask, ...] after the final norm [B, T, D]."""
        mask = mx.full((anchor.shape[0], self.spec.block_size - 1), self.spec.mask_token_id, dtype=anchor.dtype)
        block = self.embed(mx.concatenate([anchor[:, None], mask], axis=1))  # [B, T, D]
        return self.backbone(block, self._take_context(state), state.caches)

    def walk(self, base: mx.array, hidden: mx.array, anchor: mx.array, pick: Pick) -> Proposal:
        """Choose x_1..x_N left to right from base [B, N, V] plus the bias of what was chosen before."""
        markov: Markov = self.markov_head
        token, state = anchor, markov.start(hidden)
        tokens: list[mx.array] = []
        logits: list[mx.array] = []
        log_q: list[mx.array | None] = []
        for slot in range(hidden.shape[1]):
            bias, state = markov.step(token, hidden[:, slot], state)
            logits.append(base[:, slot] if bias is None else base[:, slot] + bias)  # [B, V]
            token, chosen_from = pick(logits[-1], tokens)
            tokens.append(token.astype(anchor.dtype))
            log_q.append(chosen_from)
        confidence = None
        if self.has_confidence:
            previous = mx.stack([anchor, *tokens[:-1]], axis=1)  # x_0..x_{N-1}  [B, N]
            confidence = self.confidence_head(hidden, previous, markov)
        return Proposal(
            tokens=mx.stack(tokens, axis=1),
            logits=mx.stack(logits, axis=1),
            log_q=None if log_q[0] is None else mx.stack(log_q, axis=1),
            confidence_logits=confidence,
        )

    def _take_context(self, state: BlockState) -> mx.array | None:
        """Fuse the pending taps and forget them; None when nothing is pending."""
        if not state.pending:
            return None
        taps = mx.concatenate(state.pending, axis=1).astype(self.dtype)
        state.pending.clear()
        return self.backbone.fuse(taps)  # [B, C, D]

