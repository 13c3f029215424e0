"""The records that flow between modules. Nothing here imports mlx.

Letters used in shape comments everywhere: B requests, T rows of a block, N verified drafts,
V vocabulary, D hidden size, R Markov rank, M number of taps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

LEAST_TEMPERATURE = 1e-6  # below it is greedy: far below it, 1 / temperature is no float32 number any more
LEAST_LOGPROB = -9999.0  # what stands for minus infinity in JSON, which has none
TopLogprobs = tuple[tuple[int, float], ...]  # (id, log-probability): the most likely first, of equals the lower id


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits.

    The filters act like mlx-lm's samplers: top-p, min-p and top-k look at the distribution at
    temperature 1, the temperature is applied last. Penalties look at the last `*_context_size`
    tokens, the prompt included.

    temperature: below 1e-6 is greedy, 0 and negative ones included.
    top_p: 1 or above is off, 0 keeps only the top token.
    top_k, min_p: 0 is off. Tokens tied with the k-th are kept.
    logit_bias: token id -> value added to its logit.
    seed: None draws one from the operating system; a run reports the seed it used.

    Raises ValueError for NaN, infinities and values outside these ranges.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float | None = None
    presence_context_size: int = 20
    frequency_penalty: float | None = None
    frequency_context_size: int = 20
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
                     "frequency_penalty"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} is {value}: give a finite number")
        if self.top_p < 0:
            raise ValueError(f"top_p is {self.top_p}: give 0 (top token only) to 1 (off)")
        if not self.top_k >= 0:
            raise ValueError(f"top_k is {self.top_k}: give 0 (off) or a positive count")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}: give 0 (off) to 1")
        if self.repetition_penalty is not None and self.repetition_penalty < 0:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}: give a value of at least 0")
        for name in ("repetition_context_size", "presence_context_size", "frequency_context_size"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least 1")
        for token, value in self.logit_bias.items():
            if token < 0 or math.isnan(value):
                raise ValueError(f"logit_bias {token}: {value} is not a token id and a number")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}: give 0 to 2**64 - 1")

    @property
    def greedy(self) -> bool:
        """True when only the top token can be chosen."""
        return self.temperature < LEAST_TEMPERATURE or self.top_p == 0 or self.top_k == 1


@dataclass(frozen=True)
class KVOptions:
    """How the target's KV cache is stored (mlx-lm's meaning of the same three options).

    bits: None keeps the model's dtype. The cache is quantised once it holds `start` positions.
    """

    bits: int | None = None
    group_size: int = 64
    start: int = 5000

    def __post_init__(self) -> None:
        if self.bits not in (None, 2, 3, 4, 6, 8):
            raise ValueError(f"kv_bits is {self.bits}: give 2, 3, 4, 6 or 8")
        if self.group_size not in (32, 64, 128):
            raise ValueError(f"kv_group_size is {self.group_size}: give 32, 64 or 128")
        if self.start < 0:
            raise ValueError(f"quantized_kv_start is {self.start}: give 0 or more")


@dataclass(frozen=True)
class Schedule:
    """One decision: how many drafts are verified, who decided, and why.

    expected_tokens, seconds: what the round is expected to commit and to cost, where the policy models it.
    """

    drafts: int
    policy: str
    reason: str
    expected_tokens: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Proposal:
    """What a draft proposes after the anchor; everything is lazy.

    tokens: drafts x_1..x_N                                   [B, N]
    logits: corrected logits (base + transition bias), None where only the best token counts [B, N, V]
    log_q: log of the distribution each token was drawn from, float32 [B, N, V];
        None when the token was the only choice (greedy): q is one-hot.
    confidence_logits: None without a confidence head         [B, N]
    """

    tokens: mx.array
    logits: mx.array | None = None
    log_q: mx.array | None = None
    confidence_logits: mx.array | None = None


@dataclass(frozen=True)
class Verified:
    """What one verify forward of the target returns.

    logits: [B, T, V]; taps: the chosen layers' outputs, concatenated in list order [B, T, M*D] or None.
    """

    logits: mx.array
    taps: mx.array | None


@dataclass(frozen=True)
class Verdict:
    """The outcome of the accept rule, still on the device.

    accepted: length of the accepted run                      [B]
    tokens: the accepted drafts, then the correction or bonus token; entries after it are
        meaningless                                           [B, N + 1]
    logits: the target's, after penalties and before the filters and the temperature [B, N + 1, V]
    """

    accepted: mx.array
    tokens: mx.array
    logits: mx.array


@dataclass(frozen=True)
class Round:
    """One finished round, in plain Python values.

    The token that comes out of the prefill is a round with rows = 0: it costs no verify forward
    and is not counted in tau.

    index: 0 for the prefill, then 1, 2, ...
    start: sequence position of the anchor.
    proposed: how many tokens the draft was asked for; drafts: those that were verified.
    accepted: how many drafts were kept. tokens: what was committed, bonus or correction included.
    confidences: c_1..c_N of the proposal when they were read.
    logprobs: of each token, after penalties, at temperature 1; top_logprobs: of the most likely ones in the place
        of each token, by the same measure. Both only when they were asked for.
    seconds: host seconds by part. Without synchronised timing the device's work shows up in `wait`.
    finish: None, "stop" or "length".
    """

    index: int
    start: int
    rows: int
    proposed: int
    drafts: tuple[int, ...]
    accepted: int
    tokens: tuple[int, ...]
    schedule: Schedule
    seconds: Mapping[str, float]
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    confidences: tuple[float, ...] | None = None
    finish: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The round as one JSON object (the line format of `--record`)."""
        return {
            "index": self.index,
            "start": self.start,
            "rows": self.rows,
            "proposed": self.proposed,
            "drafts": list(self.drafts),
            "accepted": self.accepted,
            "tokens": list(self.tokens),
            "confidences": None if self.confidences is None else [round(c, 6) for c in self.confidences],
            "logprobs": None if self.logprobs is None else listed(self.logprobs),
            "top_logprobs": None if self.top_logprobs is None else listed_tops(self.top_logprobs),
            "policy": self.schedule.policy,
            "reason": self.schedule.reason,
            "ms": {part: round(1e3 * s, 4) for part, s in self.seconds.items()},
            "finish": self.finish,
        }


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold: LEAST_LOGPROB for what is less, minus infinity or no number."""
    return max(logprob, LEAST_LOGPROB) if math.isfinite(logprob) else LEAST_LOGPROB


def listed(logprobs: Sequence[float]) -> list[float]:
    """Log-probabilities for JSON, to six digits."""
    return [round(finite(value), 6) for value in logprobs]


def listed_tops(tops: Sequence[TopLogprobs]) -> list[list[list[float]]]:
    """The most likely tokens of each place for JSON: [token id, log-probability] pairs."""
    return [[[token, round(finite(value), 6)] for token, value in best] for best in tops]
