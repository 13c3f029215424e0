"""Replay rounds, recorded or made up, under any policy on any cost curve.

It answers "would this help on that machine?" without the machine: the policies are the real ones, fed
round by round through their two questions; only the seconds come from the curve.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..structs import Round
from .cost import CostCurve
from .policies import Policy

NOISE = 0.12  # standard deviation of a slot's acceptance around the round's, seen by the confidence head
STAY = 20  # mean rounds between two switches of swinging content


@dataclass(frozen=True)
class Content:
    """What a draft would have met: confidences [rounds, gamma], and whether each slot would pass on its own."""

    confidences: np.ndarray
    passes: np.ndarray

    def __len__(self) -> int:
        return len(self.confidences)


@dataclass(frozen=True)
class Replay:
    """The outcome of a simulation in modelled seconds."""

    policy: str
    rounds: int
    tokens: int
    seconds: float
    parked: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def made_up(kind: str, rounds: int, seed: int, gamma: int = 7, stay: int = STAY) -> Content:
    """Synthetic content: `steady` (acceptance 0.75) or `swinging` (sticky switches between 0.9 and 0.4)."""
    rng = np.random.default_rng(seed)
    if kind == "steady":
        level = np.full(rounds, 0.75)
    elif kind == "swinging":
        level = np.where(np.cumsum(rng.random(rounds) < 1 / stay) % 2, 0.4, 0.9)
    else:
        raise ValueError(f"content {kind!r} is unknown: steady and swinging are")
    confidences = np.clip(level[:, None] + NOISE * rng.standard_normal((rounds, gamma)), 0.01, 0.99)
    return Content(confidences, rng.random((rounds, gamma)) < confidences)


def replay(policy: Policy, content: Content, curve: CostCurve) -> Replay:
    """Feed content to a policy, one entry per round (a parked round's entry goes by unseen)."""
    history: deque[Round] = deque(maxlen=4)
    tokens, seconds, parked = 0, 0.0, 0
    for index, (confidences, passes) in enumerate(_rows(content), start=1):
        proposed = policy.before(history)
        seen = confidences[:proposed] if proposed else None
        reads = bool(proposed) and policy.reads_confidence
        schedule = policy.after(proposed, seen if reads else None)
        accepted = _leading(passes, schedule.drafts)
        tokens += accepted + 1
        seconds += curve.drafting(proposed) + curve.verify(schedule.drafts + 1) + curve.host + curve.read * reads
        parked += not proposed
        history.append(Round(
            index=index, start=0, rows=schedule.drafts + 1, proposed=proposed, drafts=(), accepted=accepted,
            tokens=(0,) * (accepted + 1), schedule=schedule, seconds={},
            confidences=seen if policy.uses_confidence else None,
        ))
    return Replay(policy.name, len(content), tokens, seconds, parked / len(content))


def fixed_rate(width: int, content: Content, curve: CostCurve) -> float:
    """Tokens per second of always verifying `width` drafts (0: plain decoding), without a loop."""
    accepted = np.cumprod(content.passes[:, :width], axis=1).sum(axis=1) if width else np.zeros(len(content))
    seconds = curve.drafting(width) + curve.verify(width + 1) + curve.host
    return float((accepted + 1).mean() / seconds)


def best_fixed(content: Content, curve: CostCurve) -> tuple[int, float]:
    """The best width in hindsight, plain decoding included, and its tokens per second."""
    widths = range(min(content.passes.shape[1], curve.widest - 1) + 1)
    return max(((width, fixed_rate(width, content, curve)) for width in widths), key=lambda pair: pair[1])


def hindsight_rate(content: Content, curve: CostCurve) -> float:
    """An upper bound no policy can reach: every round's best width, knowing which drafts will pass."""
    rate = 1 / (curve.verify(1) + curve.host)
    widths = np.arange(min(content.passes.shape[1], curve.widest - 1) + 1)
    run = np.cumprod(content.passes[:, : widths[-1]], axis=1)
    accepted = np.concatenate([np.zeros((len(content), 1)), np.cumsum(run, axis=1)], axis=1)  # [rounds, widths]
    seconds = np.array([curve.drafting(int(w)) + curve.verify(int(w) + 1) + curve.host for w in widths])
    for _ in range(20):  # Dinkelbach's iteration
        best = np.argmax(accepted + 1 - rate * seconds, axis=1)
        rate = (accepted[np.arange(len(content)), best] + 1).sum() / seconds[best].sum()
    return float(rate)


def _rows(content: Content) -> Iterator[tuple[tuple[float, ...], Sequence[bool]]]:
    return zip(map(tuple, content.confidences.tolist()), content.passes.tolist(), strict=True)


def _leading(passes: Sequence[bool], width: int) -> int:
    for slot in range(width):
        if not passes[slot]:
            return slot
    return width
