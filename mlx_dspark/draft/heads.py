"""The sequential heads: transition bias (none, vanilla, gated, rnn) and confidence.

Every Markov head is the low-rank term B_k = W2 f(W1[x_{k-1}], h_k, s_{k-1}) added to the base logits
U_k (paper, section 3.1.2; the gated form is only in DeepSeek's code). Concatenation orders are those
of the checkpoints.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from .spec import DraftSpec


class Markov(Protocol):
    """One head. The walk calls `start` once a block and `step` once a slot."""

    def start(self, hidden: mx.array) -> mx.array | None:
        """State s_0 of a block with hidden states [B, T, D]."""

    def step(
        self, token: mx.array, hidden: mx.array, base: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """Corrected logits [B, V] of the slot after `token` [B], from its hidden state [B, D] and base logits."""

    def embed(self, tokens: mx.array) -> mx.array:
        """W1 rows of tokens [...] -> [..., R]."""


class NoMarkov(nn.Module):
    """Heads off: DFlash."""

    def start(self, hidden: mx.array) -> None:
        return None

    def step(self, token: mx.array, hidden: mx.array, base: mx.array, state: None) -> tuple[mx.array, None]:
        return base, None

    def embed(self, tokens: mx.array) -> mx.array:
        raise AssertionError("rank 0 has no embedding")


class VanillaMarkov(nn.Module):
    """B_k = W2 W1[x_{k-1}]."""

    def __init__(self, spec: DraftSpec):
        super().__init__()
        self.markov_w1 = nn.Embedding(spec.vocab_size, spec.markov_rank)
        self.markov_w2 = nn.Linear(spec.markov_rank, spec.head_rows, bias=False)

    def embed(self, tokens: mx.array) -> mx.array:
        return self.markov_w1(tokens)

    def start(self, hidden: mx.array) -> None:
        return None

    def step(self, token: mx.array, hidden: mx.array, base: mx.array, state: None) -> tuple[mx.array, None]:
        return base + self.markov_w2(self.embed(token)), None


class GatedMarkov(nn.Module):
    """B_k = W2 (sigmoid(Wg [h_k; e_k] + b_g) * e_k), e_k = W1[x_{k-1}]."""

    def __init__(self, spec: DraftSpec):
        super().__init__()
        self.markov_w1 = nn.Embedding(spec.vocab_size, spec.markov_rank)
        self.markov_w2 = nn.Linear(spec.markov_rank, spec.head_rows, bias=False)
        self.gate_proj = nn.Linear(spec.hidden_size + spec.markov_rank, spec.markov_rank)

    def embed(self, tokens: mx.array) -> mx.array:
        return self.markov_w1(tokens)

    def start(self, hidden: mx.array) -> None:
        return None

    def step(self, token: mx.array, hidden: mx.array, base: mx.array, state: None) -> tuple[mx.array, None]:
        e = self.embed(token)  # [B, R]
        gate = mx.sigmoid(self.gate_proj(mx.concatenate([hidden, e], axis=-1)))  # [B, R]
        return base + self.markov_w2(gate * e), None


class RnnMarkov(nn.Module):
    """s_k = g * s_{k-1} + (1 - g) * tanh(candidate); B_k = W2 tanh(output).

    gate, candidate and output are one projection of [s_{k-1}; e_k; h_k]: the output does not see s_k.
    """

    def __init__(self, spec: DraftSpec):
        super().__init__()
        rank = spec.markov_rank
        self.markov_w1 = nn.Embedding(spec.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, spec.head_rows, bias=False)
        self.joint_proj = nn.Linear(2 * rank + spec.hidden_size, 3 * rank)

    def embed(self, tokens: mx.array) -> mx.array:
        return self.markov_w1(tokens)

    def start(self, hidden: mx.array) -> mx.array:
        rank = self.joint_proj.bias.shape[0] // 3
        return mx.zeros((hidden.shape[0], rank), dtype=hidden.dtype)  # [B, R]

    def step(self, token: mx.array, hidden: mx.array, base: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
        joint = self.joint_proj(mx.concatenate([state, self.embed(token), hidden], axis=-1))  # [B, 3R]
        gate, candidate, output = mx.split(joint, 3, axis=-1)  # [B, R] each
        gate = mx.sigmoid(gate)
        return base + self.markov_w2(mx.tanh(output)), gate * state + (1 - gate) * mx.tanh(candidate)


class ConfidenceHead(nn.Module):
    """logit of c_k = w . [h_k (; W1[x_{k-1}])] + b: the chance that slot k survives if 1..k-1 did.

    c_k sees x_{k-1} and never x_k, which is what makes scheduling by it lossless (paper, appendix A).
    """

    def __init__(self, spec: DraftSpec):
        super().__init__()
        width = spec.hidden_size + (spec.markov_rank if spec.confidence_with_markov else 0)
        self.with_markov = spec.confidence_with_markov
        self.proj = nn.Linear(width, 1)

    def __call__(self, hidden: mx.array, previous: mx.array, markov: Markov) -> mx.array:
        """hidden [B, N, D], previous tokens x_0..x_{N-1} [B, N] -> float32 logits [B, N]."""
        if self.with_markov:
            hidden = mx.concatenate([hidden, markov.embed(previous).astype(hidden.dtype)], axis=-1)
        return self.proj(hidden)[..., 0].astype(mx.float32)


_MARKOV = {"vanilla": VanillaMarkov, "gated": GatedMarkov, "rnn": RnnMarkov}


def make_markov(spec: DraftSpec) -> Markov:
    """The Markov head that a spec names."""
    return NoMarkov() if spec.markov == "none" else _MARKOV[spec.markov](spec)
