"""The sequential heads: transition bias (none, vanilla, gated, rnn) and confidence.

Every Markov head is the low-rank term B_k = W2 f(W1[x_{k-1}], h_k, s_{k-1}) added to the base logits
U_k (paper, section 3.1.2; the gated form is only in DeepSeek's code). Concatenation orders are those
of the checkpoints; the hidden states' part of a projection is one product for the whole block.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from ..kernels.argmax import correct
from ..kernels.table import Table
from ..kernels.walk import Chain
from .spec import DraftSpec


class Markov(Protocol):
    """One head. The walk calls `project` and `start` once a block and `step` once a slot."""

    def project(self, hidden: mx.array) -> mx.array | None:
        """What the head needs of the hidden states [B, N, D] of all slots: [B, N, J], None if nothing."""

    def start(self, requests: int) -> mx.array | None:
        """State s_0 of a block."""

    def step(
        self, token: mx.array, projected: mx.array | None, base: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """Corrected logits [B, V] of the slot after `token` [B], from its row of `project` and its base logits."""

    def embed(self, tokens: mx.array) -> mx.array:
        """W1 rows of tokens [...] -> [..., R]."""

    def chain(self) -> Chain | None:
        """The head as the kernels see it; None if it has no low-rank form."""


class Trainable(Markov, Protocol):
    """A head that training runs over all slots at once."""

    def latents(self, previous: mx.array, hidden: mx.array) -> mx.array | None:
        """What W2 turns into the bias of every slot [B, N, R], None where there is no bias.

        previous: the tokens before the slots [B, N], given (teacher forcing); hidden [B, N, D].
        """


class NoMarkov(nn.Module):
    """Heads off: DFlash."""

    def project(self, hidden: mx.array) -> None:
        return None

    def start(self, requests: int) -> None:
        return None

    def step(self, token: mx.array, projected: None, base: mx.array, state: None) -> tuple[mx.array, None]:
        return base, None

    def latents(self, previous: mx.array, hidden: mx.array) -> None:
        return None

    def embed(self, tokens: mx.array) -> mx.array:
        raise AssertionError("rank 0 has no embedding")

    def chain(self) -> None:
        return None


class _LowRank(nn.Module):
    """What the heads with a transition bias share: both tables, and B_k = W2 latent_k."""

    def __init__(self, spec: DraftSpec):
        super().__init__()
        self.markov_w1 = nn.Embedding(spec.vocab_size, spec.markov_rank)
        self.markov_w2 = nn.Linear(spec.markov_rank, spec.head_rows, bias=False)

    def embed(self, tokens: mx.array) -> mx.array:
        return self.markov_w1(tokens)

    def project(self, hidden: mx.array) -> mx.array | None:
        return None

    def start(self, requests: int) -> mx.array | None:
        return None

    def latent(
        self, token: mx.array, projected: mx.array | None, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """Latents [..., R] after tokens [...], with their rows of `project` [..., J]; and the state behind them."""
        raise NotImplementedError

    def step(
        self, token: mx.array, projected: mx.array | None, base: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        latent, state = self.latent(token, projected, state)
        return correct(base, latent, Table.of(self.markov_w2)), state

    def latents(self, previous: mx.array, hidden: mx.array) -> mx.array | None:
        return self.latent(previous, self.project(hidden), None)[0]


class VanillaMarkov(_LowRank):
    """B_k = W2 W1[x_{k-1}]."""

    def latent(self, token: mx.array, projected: None, state: None) -> tuple[mx.array, None]:
        return self.embed(token), None

    def chain(self) -> Chain:
        return Chain(Table.of(self.markov_w1), Table.of(self.markov_w2))


class GatedMarkov(_LowRank):
    """B_k = W2 (sigmoid(Wg [h_k; e_k] + b_g) * e_k), e_k = W1[x_{k-1}]."""

    def __init__(self, spec: DraftSpec):
        super().__init__(spec)
        self.gate_proj = nn.Linear(spec.hidden_size + spec.markov_rank, spec.markov_rank)

    def project(self, hidden: mx.array) -> mx.array:
        rank = self.gate_proj.bias.shape[0]
        return self.gate_proj(mx.pad(hidden, [(0, 0), (0, 0), (0, rank)]))  # [B, N, R]

    def latent(self, token: mx.array, projected: mx.array, state: None) -> tuple[mx.array, None]:
        e = self.embed(token)  # [..., R]
        return mx.sigmoid(projected + self.chain().mixing().times(e)) * e, None

    def chain(self) -> Chain:
        mix = Table.of(self.gate_proj)
        return Chain(Table.of(self.markov_w1), Table.of(self.markov_w2), gates=1, mix=mix, at=mix.width - mix.rows)


class RnnMarkov(_LowRank):
    """s_k = g * s_{k-1} + (1 - g) * tanh(candidate); B_k = W2 tanh(output).

    gate, candidate and output are one projection of [s_{k-1}; e_k; h_k]: the output does not see s_k.
    """

    def __init__(self, spec: DraftSpec):
        super().__init__(spec)
        rank = spec.markov_rank
        self.joint_proj = nn.Linear(2 * rank + spec.hidden_size, 3 * rank)

    def project(self, hidden: mx.array) -> mx.array:
        rank = self.joint_proj.bias.shape[0] // 3
        return self.joint_proj(mx.pad(hidden, [(0, 0), (0, 0), (2 * rank, 0)]))  # [B, N, 3R]

    def start(self, requests: int) -> mx.array:
        bias = self.joint_proj.bias
        return mx.zeros((requests, bias.shape[0] // 3), dtype=bias.dtype)  # [B, R]

    def latent(self, token: mx.array, projected: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
        mixing = self.chain().mixing()
        joint = projected + mixing.times(mx.concatenate([state, self.embed(token)], axis=-1))  # [B, 3R]
        gate, candidate, output = mx.split(joint, 3, axis=-1)  # [B, R] each
        gate = mx.sigmoid(gate)
        return mx.tanh(output), gate * state + (1 - gate) * mx.tanh(candidate)

    def latents(self, previous: mx.array, hidden: mx.array) -> mx.array:
        projected, state, found = self.project(hidden), self.start(len(previous)), []
        for slot in range(previous.shape[1]):
            latent, state = self.latent(previous[:, slot], projected[:, slot], state)
            found.append(latent)
        return mx.stack(found, axis=1)  # [B, N, R]

    def chain(self) -> Chain:
        return Chain(Table.of(self.markov_w1), Table.of(self.markov_w2), gates=3, mix=Table.of(self.joint_proj))


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


MARKOV = {"vanilla": VanillaMarkov, "gated": GatedMarkov, "rnn": RnnMarkov}


def make_markov(spec: DraftSpec) -> Trainable:
    """The Markov head that a spec names."""
    return NoMarkov() if spec.markov == "none" else MARKOV[spec.markov](spec)
