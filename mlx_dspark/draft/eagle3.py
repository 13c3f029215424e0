"""Eagle3 as DeepSpec packs it: one layer that runs on its own output, token by token.

The feature of position i is paired with the token of position i + 1 and sits at RoPE position i. The
layer's output is fed back before the final norm. With one layer only the last context row's output
is needed (K/V do not depend on attention), so all other rows are stored without being run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn

from ..sampling import Pick
from ..structs import Proposal
from . import gemma4, qwen3
from .base import Choices
from .block import FLUSH_ROWS
from .context import ContextCache
from .spec import DraftSpec
from .tables import Tables, TargetTables


@dataclass
class Eagle3State:
    """Context K/V, and committed rows that are not in it yet: a row waits for the token after it."""

    cache: ContextCache = field(default_factory=ContextCache)
    taps: list[mx.array] = field(default_factory=list)  # [B, T, M*D] each
    tokens: list[mx.array] = field(default_factory=list)  # [B, T] each
    last: mx.array | None = None  # output of the newest context row [B, 1, D]


class Eagle3Draft(nn.Module):
    """A recurrent draft in the same loop; it has no confidence head."""

    has_confidence = False
    looks_ahead = 1  # tokens behind a context row that it depends on

    def __init__(self, spec: DraftSpec, own_embed: bool = False, own_head: bool = False):
        super().__init__()
        self.spec = spec
        layer = {"qwen3": qwen3.Layer, "gemma4": gemma4.Layer}[spec.family]
        self.fc = nn.Linear(spec.tap_width, spec.hidden_size, bias=False)
        self.layers = [layer(spec, width=2 * spec.hidden_size)]
        self.hidden_norm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.norm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.tables = Tables(spec, own_embed, own_head)

    @property
    def gamma(self) -> int:
        return self.spec.gamma

    @property
    def taps(self) -> tuple[int, ...]:
        return self.spec.taps

    @property
    def dtype(self) -> mx.Dtype:
        return self.norm.weight.dtype

    def borrow(self, tables: TargetTables) -> None:
        """Use the target's tables for those the checkpoint lacks."""
        self.tables.borrow(tables)

    def start(self) -> Eagle3State:
        return Eagle3State()

    def observe(self, state: Eagle3State, tokens: mx.array, taps: mx.array) -> None:
        """Queue committed rows; many of them are stored at once to bound the memory."""
        state.tokens.append(tokens)
        state.taps.append(taps)
        if sum(t.shape[1] for t in state.tokens) > FLUSH_ROWS:
            tokens, taps = mx.concatenate(state.tokens, axis=1), mx.concatenate(state.taps, axis=1)
            hidden = self.fc(taps[:, :-1].astype(self.dtype))
            keys, values = self.layers[0].self_attn.keys_values(self.pair(hidden, tokens[:, 1:]), state.cache.length)
            state.cache.write(keys, values, keep=hidden.shape[1])
            state.tokens, state.taps = [tokens[:, -1:]], [taps[:, -1:]]
            mx.async_eval(state.cache.arrays)

    def keep(self, state: Eagle3State) -> ContextCache:
        """The context of a request that is over. Its newest row waits for a token and is not in it."""
        return state.cache

    def resume(self, kept: ContextCache, length: int) -> Eagle3State | None:
        """A state behind `length` committed rows, which saw the token after them; None if they are not stored."""
        return Eagle3State(kept.prefix(length)) if length <= kept.length else None

    def propose(self, state: Eagle3State, anchor: mx.array, slots: int, pick: Pick) -> Proposal:
        """Take in the pending rows, then choose a token and run the layer on it, `slots` times."""
        hidden = self.take_context(state, anchor)  # [B, 1, D]
        choices = Choices(anchor, pick)
        for slot in range(slots):
            if slot:
                rows = self.pair(hidden, choices.tokens[-1][:, None])
                hidden = self.run(state, rows, hidden, keep=0, behind=slot - 1)
            choices.choose(self.tables.widen(self.tables.logits(self.norm(hidden))[:, 0]))
        return choices.proposal()

    def pair(self, hidden: mx.array, tokens: mx.array) -> mx.array:
        """Attention input: normed embedding of tokens [B, T] beside normed hidden [B, T, D] -> [B, T, 2D]."""
        embedded = self.layers[0].input_layernorm(self.tables.embed(tokens, self.dtype))
        return mx.concatenate([embedded, self.hidden_norm(hidden)], axis=-1)

    def take_context(self, state: Eagle3State, anchor: mx.array) -> mx.array:
        """Store the pending rows and run the last one; returns its output before the final norm [B, 1, D]."""
        if state.tokens:
            following = mx.concatenate([*state.tokens, anchor[:, None]], axis=1)[:, 1:]
            hidden = self.fc(mx.concatenate(state.taps, axis=1).astype(self.dtype))
            state.taps, state.tokens = [], []
            state.last = self.run(state, self.pair(hidden, following), hidden, keep=hidden.shape[1])
        return state.last

    def run(
        self, state: Eagle3State, rows: mx.array, residual: mx.array, keep: int, behind: int = 0
    ) -> mx.array:
        """Write rows [B, T, 2D] to the cache and run the last one: [B, 1, D] before the final norm."""
        attention, start = self.layers[0].self_attn, state.cache.length + behind
        keys, values = state.cache.write(*attention.keys_values(rows, start), keep=keep, behind=behind)
        queries = attention.queries(rows[:, -1:], start + rows.shape[1] - 1)
        attended = attention.o_proj(attention.mix(queries, keys, values, None))
        return self.layers[0].finish(residual[:, -1:], attended)
