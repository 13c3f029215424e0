"""What the scheduler is told of every request in a round, what it answers, and what it keeps of each."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from ..structs import Schedule
from .forecast import Forecast
from .refine import Shift

LAG = 2  # rounds between confidences and the budget they decide (paper, section 5.2)


@dataclass(frozen=True)
class Line:
    """One request in one round.

    request: its name, the same in every round. left: the most drafts of which it has any use.
    depth: positions in its cache. proposed: what was drafted for it this round (0 before that).
    confidences: c_1..c_proposed as the draft gives them; None where they were not read.
    fixed: drafts that are verified whatever others do, None where the scheduler chooses.
    """

    request: Hashable
    left: int
    depth: int = 0
    proposed: int = 0
    confidences: Sequence[float] | None = None
    fixed: int | None = None


@dataclass(frozen=True)
class Ranked:
    """Rows that go to the slots which survive best in this round, worked out by the device without a host read.

    requests: whose slots are ranked, in order. further: how many of their best slots are verified, all together.
    temperatures, scale, shifts: how their confidences are corrected first, by slot, all, and by request:
    sigmoid(scale * logit / temperature + shift), with 1 for slots without a temperature. worths: of a token by request,
    by which survivals count. Without shifts and worths: none, and all the same.
    """

    requests: tuple[Hashable, ...]
    further: int
    temperatures: tuple[float, ...] = ()
    scale: float = 1.0
    shifts: tuple[float, ...] = ()
    worths: tuple[float, ...] = ()


@dataclass(frozen=True)
class Plan:
    """One decision for all requests: how many drafts of each are verified, and in which layout.

    reasons: by request. expected_tokens, seconds: of the whole round, where the policy models it.
    ranked: who gets how many is left to the device; `drafts` then says how many there are to choose from.
    """

    drafts: Mapping[Hashable, int]
    layout: str
    policy: str
    reasons: Mapping[Hashable, str]
    expected_tokens: float | None = None
    seconds: float | None = None
    ranked: Ranked | None = None

    def schedule(self, request: Hashable) -> Schedule:
        """The part of one request, for its `Round`; the seconds are shared and stay with the plan."""
        return Schedule(self.drafts[request], self.policy, self.reasons[request])


@dataclass
class Known:
    """What is remembered of a request between rounds.

    begun: index of its present round. observed: index of the last one whose confidences were learned from.
    old: the last confidences, oldest first. fixed: its drafts are not the scheduler's to choose.
    shift: what its confidences are off by; the forecast is of shifted ones.
    """

    forecast: Forecast
    begun: int = 0
    observed: int = 0
    old: list[Sequence[float]] = field(default_factory=list)
    fixed: bool = False
    shift: Shift = field(default_factory=Shift)

    def begin(self, fixed: bool) -> None:
        """A round of it begins."""
        self.begun += 1
        self.fixed = fixed
        self.forecast.age = self.begun - self.observed

    def observe(self, index: int, confidences: Sequence[float]) -> None:
        """Learn from the confidences of a finished round."""
        self.forecast.age, self.observed = index - self.observed, index
        self.forecast.observe(confidences)
        self.old = [*self.old[1 - LAG :], confidences]

    def judge(self, expected: Sequence[float], accepted: int, verified: int) -> None:
        """Learn from the accept flags of a finished round."""
        self.forecast.move(self.shift.learn(expected, accepted, verified))
