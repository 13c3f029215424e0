"""A block draft: backbone, transition bias and confidence, composed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx
import mlx.nn as nn

from ..kernels import REFERENCE, Kernels, walk
from ..kernels.topk import CertifiedWalk
from ..sampling import ArgmaxPick, GumbelPick, Pick
from ..structs import Proposal
from .backbone import Backbone
from .base import Choices
from .context import ContextCache
from .dflash2 import CandidateSelector
from .heads import ConfidenceHead, Markov, make_markov
from .spec import DraftSpec
from .tables import Tables, TargetTables

FLUSH_ROWS = 512  # pending taps become K/V from this many rows on: parked rounds pay nothing, and memory stays bounded


@dataclass
class BlockState:
    """One request's draft context: K/V per layer, and taps whose K/V are not computed yet.

    Taps wait until the next block because its K/V projection then serves both; a parked request
    collects them without paying for the draft.
    """

    caches: list[ContextCache]
    pending: list[mx.array] = field(default_factory=list)  # taps [B, T, M*D]
    waiting: int = 0  # their rows: counted as they come, for a parked request may have hundreds and asks every round


class BlockDraft(nn.Module):
    """DSpark for one target family; DFlash is the same with the heads off.

    own_embed, own_head: the checkpoint carries these tables; the others are borrowed from the target.
    """

    def __init__(self, spec: DraftSpec, own_embed: bool = False, own_head: bool = False):
        super().__init__()
        self.spec = spec
        self.backbone = Backbone(spec)
        self.tables = Tables(spec, own_embed, own_head)
        if spec.selector is not None:
            self.candidate_selector = CandidateSelector(spec)
        else:
            self.markov_head = make_markov(spec)
        if spec.confidence:
            self.confidence_head = ConfidenceHead(spec)
        self._kernels = REFERENCE

    @property
    def kernels(self) -> Kernels:
        """What walks its blocks: the reference, until `use` is told otherwise."""
        return self._kernels

    def use(self, kernels: Kernels) -> None:
        """Walk with the kernels that were chosen for this device."""
        self._kernels = kernels

    @property
    def gamma(self) -> int:
        return self.spec.gamma

    @property
    def taps(self) -> tuple[int, ...]:
        return self.spec.taps

    @property
    def has_confidence(self) -> bool:
        return self.spec.confidence

    @property
    def dtype(self) -> mx.Dtype:
        return self.backbone.norm.weight.dtype

    def borrow(self, tables: TargetTables) -> None:
        """Use the target's tables for those the checkpoint lacks."""
        self.tables.borrow(tables)

    @property
    def sequential_head(self) -> Markov:
        """What corrects a slot's logits for the token before it."""
        return self.markov_head if self.spec.selector is None else self.candidate_selector

    @property
    def certified_share(self) -> float | None:
        """Slots of greedy walks by candidates that were certified, since loading; None where none was tried."""
        walk_greedy = self.kernels.walk_greedy
        return walk_greedy.share if isinstance(walk_greedy, CertifiedWalk) else None

    def start(self) -> BlockState:
        return BlockState(self.backbone.make_cache())

    def observe(self, state: BlockState, tokens: mx.array, taps: mx.array) -> None:
        """Queue taps [B, T, M*D] of committed rows; `tokens` carry nothing the taps do not."""
        state.pending.append(taps)
        state.waiting += taps.shape[1]
        if state.waiting >= FLUSH_ROWS:
            self.backbone.extend(self._take_context(state), state.caches)
            mx.async_eval([array for cache in state.caches for array in cache.arrays])

    def keep(self, state: BlockState) -> list[ContextCache]:
        """The context of a request that is over, for another one that begins alike."""
        context = self._take_context(state)
        if context is not None:
            self.backbone.extend(context, state.caches)
        return state.caches

    def resume(self, kept: list[ContextCache], length: int) -> BlockState:
        """A state behind the first `length` committed rows of `kept`."""
        return BlockState([cache.prefix(length) for cache in kept])

    def propose(self, state: BlockState, anchor: mx.array, slots: int, pick: Pick) -> Proposal:
        """One block pass of all block_size rows, then `slots` steps of the sequential head."""
        anchor = self.tables.known(anchor)
        hidden = self._slots(self.block_hidden([state], anchor), slots)
        return self.walk(self.tables.logits(hidden), hidden, anchor, pick)

    def propose_many(
        self, states: Sequence[BlockState], anchor: mx.array, slots: Sequence[int], picks: Sequence[Pick]
    ) -> list[Proposal]:
        """`propose` for several requests in one pass: anchor [B], and one of everything else each."""
        anchor = self.tables.known(anchor)
        hidden = self._slots(self.block_hidden(states, anchor), max(slots))
        base = self.tables.logits(hidden)  # [B, N, V]
        if all(isinstance(pick, ArgmaxPick) for pick in picks):
            walked = self.walk(base, hidden, anchor, picks[0])
            return [_part(walked, b, count) for b, count in enumerate(slots)]
        return self._walk_each(base, hidden, anchor, slots, picks)

    def block_hidden(self, states: Sequence[BlockState], anchor: mx.array) -> mx.array:
        """Hidden states of the blocks [anchor, mask, mask, ...] after the final norm [B, T, D]."""
        mask = mx.full((anchor.shape[0], self.spec.block_size - 1), self.spec.mask_token_id, dtype=anchor.dtype)
        block = self.tables.embed(mx.concatenate([anchor[:, None], mask], axis=1), self.dtype)  # [B, T, D]
        return self.backbone(block, self._take_contexts(states), [state.caches for state in states])

    def _slots(self, hidden: mx.array, slots: int) -> mx.array:
        """The block rows that predict [B, N, D]."""
        first = 0 if self.spec.anchor_predicts else 1
        return hidden[:, first : first + slots]

    def walk(self, base: mx.array, hidden: mx.array, anchor: mx.array, pick: Pick) -> Proposal:
        """Choose x_1..x_N left to right from base [B, N, V], corrected for what was chosen before."""
        markov = self.sequential_head
        projected = markov.project(hidden)
        walked = self._fused_walk(base, projected, anchor, pick)
        if walked is None:
            choices = Choices(anchor, pick)
            walk.reference(markov.step, base, projected, anchor, markov.start(len(anchor)),
                           lambda corrected: choices.choose(self.tables.widen(corrected)))
            walked = choices.proposal()
        return replace(walked, confidence_logits=self._confidence(hidden, anchor, walked.tokens))

    def _walk_each(
        self, base: mx.array, hidden: mx.array, anchor: mx.array, slots: Sequence[int], picks: Sequence[Pick]
    ) -> list[Proposal]:
        """`walk` where every request picks in its own way; one that wants fewer slots idles in the last ones."""
        markov = self.sequential_head
        each = [Choices(anchor[b : b + 1], pick) for b, pick in enumerate(picks)]

        def choose(corrected: mx.array) -> mx.array:
            wide = self.tables.widen(corrected)  # [B, V]
            return mx.concatenate([
                choices.choose(wide[b : b + 1]) if len(choices.tokens) < slots[b] else anchor[b : b + 1]
                for b, choices in enumerate(each)
            ])

        walk.reference(markov.step, base, markov.project(hidden), anchor, markov.start(len(anchor)), choose)
        proposals = [choices.proposal() for choices in each]
        tokens = mx.concatenate([mx.pad(p.tokens, [(0, 0), (0, base.shape[1] - p.tokens.shape[1])]) for p in proposals])
        confidence = self._confidence(hidden, anchor, tokens)
        return [replace(proposal, confidence_logits=None if confidence is None else confidence[b : b + 1, : slots[b]])
                for b, proposal in enumerate(proposals)]

    def _confidence(self, hidden: mx.array, anchor: mx.array, tokens: mx.array) -> mx.array | None:
        """Confidence logits [B, N] of tokens [B, N]; a slot's looks at the token before it, never at its own."""
        if not self.has_confidence:
            return None
        previous = mx.concatenate([anchor[:, None], tokens[:, :-1]], axis=1)  # x_0..x_{N-1}
        return self.confidence_head(hidden, previous, self.sequential_head)

    def _fused_walk(
        self, base: mx.array, projected: mx.array | None, anchor: mx.array, pick: Pick
    ) -> Proposal | None:
        """The walk in one chain of kernels, where the device has them and the pick needs no more than they do."""
        rows = self.tables.rows(base.shape[-1])
        if rows < base.shape[-1]:
            base = mx.contiguous(base[..., :rows])  # once: every launch would copy a slice
        if isinstance(pick, ArgmaxPick) and self._greedy_kernel(len(anchor)):
            tokens = self.kernels.walk_greedy(base, projected, anchor)
            return Proposal(tokens.astype(anchor.dtype))
        if isinstance(pick, GumbelPick) and self.kernels.walk_sampled is not None and len(anchor) == 1:
            keys = pick.keys[None, : base.shape[1]]  # [1, N, 2]: several requests would draw the same noise
            tokens, corrected = self.kernels.walk_sampled(base, projected, anchor, keys, pick.scale)
            corrected = self.tables.padded(corrected)
            return Proposal(tokens.astype(anchor.dtype), corrected, pick.shape(corrected))
        return None

    def _greedy_kernel(self, requests: int) -> bool:
        """Whether a kernel walks this many requests; the candidates' walk reads back and serves one."""
        walk_greedy = self.kernels.walk_greedy
        return walk_greedy is not None and (requests == 1 or not isinstance(walk_greedy, CertifiedWalk))

    def _take_context(self, state: BlockState) -> mx.array | None:
        return self._take_contexts([state])[0]

    def _take_contexts(self, states: Sequence[BlockState]) -> list[mx.array | None]:
        """Fuse what is pending in one product, and forget it; None where nothing is: [B, C, D] each."""
        pending = [state.pending[0] if len(state.pending) == 1 else mx.concatenate(state.pending, axis=1)
                   for state in states if state.pending]
        if not pending:
            return [None] * len(states)
        counts = [state.waiting for state in states]
        taps = pending[0] if len(pending) == 1 else mx.concatenate(pending, axis=1)
        fused, first = self.backbone.fuse(taps.astype(self.dtype)), 0
        contexts: list[mx.array | None] = []
        for state, count in zip(states, counts, strict=True):
            contexts.append(fused[:, first : first + count] if count else None)
            first += count
            state.pending.clear()
            state.waiting = 0
        return contexts


def _part(proposal: Proposal, request: int, slots: int) -> Proposal:
    """One request's share of a proposal for several, without logits: the best token alone counted."""
    own, confidence = slice(request, request + 1), proposal.confidence_logits
    return Proposal(proposal.tokens[own, :slots],
                    confidence_logits=None if confidence is None else confidence[own, :slots])
