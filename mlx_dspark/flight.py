"""A round on its way to the device and back: what was submitted, and the one vector that is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from .sampling import logprobs_of, most_likely
from .structs import Proposal, Schedule, TopLogprobs, Verdict


@dataclass
class Flight:
    """A round that has been started. Settled: its rows are committed although its tokens are not read yet.

    limit: how many of the scheduled drafts were verified, where only the device knows.
    """

    index: int
    start: int
    proposal: Proposal
    judging: mx.array | None  # random key of the accept rule
    proposed: int = 0
    looks: bool = False  # the policy reads this round's confidences before verifying
    schedule: Schedule | None = None
    limit: mx.array | None = None  # int32 [1]
    confidences: tuple[float, ...] | None = None
    inputs: mx.array | None = None  # anchor and admitted drafts [1, rows]
    taps: mx.array | None = None  # [1, rows, M*D]
    verdict: Verdict | None = None
    packed: mx.array | None = None  # all that the host reads, one int32 vector
    settled: bool = False
    last: bool = False  # no token is left to generate after this round
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What the host reads of a round. `tokens` is only meaningful up to the one after the accepted run.

    drafts: those that were verified. logprobs, top_logprobs: one a row, those behind `tokens` as meaningless as these.
    """

    tokens: list[int]
    accepted: int
    drafts: list[int]
    logprobs: list[float] | None
    top_logprobs: list[TopLogprobs] | None
    confidences: list[float] | None


def pack(flight: Flight, logprobs: bool, top: int, confidences: bool) -> mx.array:
    """Everything the host will read of a judged round, in one int32 vector (floats by their bits).

    top: with logprobs, how many of the most likely tokens of each row.
    """
    verdict, proposal, drafted = flight.verdict, flight.proposal, flight.schedule.drafts
    parts = [verdict.tokens[0]]
    if drafted:
        parts += [verdict.accepted, proposal.tokens[0, :drafted]]
    if flight.limit is not None:
        parts.append(flight.limit)
    if logprobs:
        parts += _pack_logprobs(verdict.tokens[0, :, None], verdict.logits[0], top)
    if confidences and proposal.confidence_logits is not None:
        parts.append(mx.view(mx.sigmoid(proposal.confidence_logits[0]), mx.int32))
    return mx.concatenate(parts) if len(parts) > 1 else parts[0]


def _pack_logprobs(tokens: mx.array, logits: mx.array, top: int) -> list[mx.array]:
    """Of rows of logits [T, V]: the ids of their best, the values of their tokens [T, 1], the values of their best."""
    if not top:
        return [mx.view(logprobs_of(logits, tokens)[:, 0], mx.int32)]
    best = most_likely(logits, top)  # [T, top]
    values = mx.view(logprobs_of(logits, mx.concatenate([tokens, best], axis=1)), mx.int32)  # [T, 1 + top]
    return [best.flatten(), values[:, 0], values[:, 1:].flatten()]


def unpack(flight: Flight, numbers: list[int], logprobs: bool, top: int) -> Outcome:
    """The inverse of `pack`."""
    drafted = flight.schedule.drafts
    rows = drafted + 1
    tokens, rest = numbers[:rows], numbers[rows:]
    accepted, drafts, rest = (rest[0], rest[1:rows], rest[rows:]) if drafted else (0, [], rest)
    if flight.limit is not None:
        drafts, rest = drafts[: rest[0]], rest[1:]
    known = rows if logprobs else 0
    ids, values = rest[: known * top], floats(rest[known * top :])
    end = known + len(ids)
    return Outcome(tokens, accepted, drafts, values[:known] or None, _tops(ids, values[known:end], top),
                   values[end:] or None)


def _tops(ids: list[int], values: list[float], top: int) -> list[TopLogprobs] | None:
    """The best of each row, None if there are none."""
    pairs = list(zip(ids, values, strict=True))
    return [tuple(pairs[at : at + top]) for at in range(0, len(pairs), top)] if top else None


def floats(bits: Sequence[int]) -> list[float]:
    """Float32 numbers that were read by their bits."""
    return np.array(bits, dtype=np.int32).view(np.float32).tolist() if bits else []
