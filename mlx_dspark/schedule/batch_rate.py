"""What policies for several requests have in common when they decide by costs: the grid, and what they remember."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from ..structs import Round
from .forecast import Forecast
from .grid import RECTANGULAR, CostGrid, Prices
from .lines import Known, Line, Plan, Ranked
from .ranking import survivals, top
from .rate import Calibrate
from .refine import Refinement, scaled, shifted
from .scaling import temperatures_of


class ByCost:
    """Draft for every request, verify nothing: a base whose subclasses say what is verified.

    gamma: the draft's slots. calibrate: raw confidences to probabilities.
    """

    def __init__(self, name: str, gamma: int, grid: CostGrid, calibrate: Calibrate = tuple):
        self.name, self.grid, self.calibrate = name, grid, calibrate
        self.gamma = min(gamma, grid.widest - 1)
        self.temperatures = temperatures_of(calibrate)
        self.refine = Refinement()
        self.known: dict[Hashable, Known] = {}
        self._typical = Forecast(self.gamma)  # of all requests: what new ones start from

    @property
    def reads_confidence(self) -> bool:
        """Whether this round's confidences are read before verifying."""
        return True

    @property
    def uses_confidence(self) -> bool:
        """Whether this round's confidences are learned from when it is finished."""
        return True

    @property
    def decides(self) -> bool:
        """Whether this round is worked out anew."""
        return True

    def before(self, lines: Sequence[Line]) -> Mapping[Hashable, int]:
        """Draft as many slots as there is use for."""
        self.begin(lines)
        return {line.request: self.slots(line) for line in lines}

    def after(self, lines: Sequence[Line]) -> Plan:
        """Decide with this round's confidences, or without them where they were not read."""
        raise NotImplementedError

    def learn(self, landed: Mapping[Hashable, Round]) -> None:
        """Take in the finished round of every request that took part in it."""
        seen = {}
        for request, one in landed.items():
            if one.rows and one.confidences and request in self.known:
                given = self.calibrate(one.confidences)[: self.gamma]
                seen[request] = self.known[request].shift(self.refine(given))
                if one.finish is None:  # a text that was cut does not tell whether the next draft was right
                    self.refine.learn(given, one.accepted, one.rows - 1)
        self.learn_confidences(landed, seen)

    def reflect(self) -> None:
        """All was learned at once."""

    def learn_confidences(self, landed: Mapping[Hashable, Round], seen: Mapping[Hashable, Sequence[float]]) -> None:
        """Confidences of finished rounds, refined, are free to look at."""
        for request, confidences in seen.items():
            known = self.known[request]
            known.observe(landed[request].index, confidences)
            self._typical.pool(shifted(confidences, -known.shift.value), known.forecast, len(landed[request].tokens))

    def begin(self, lines: Sequence[Line]) -> None:
        """A round begins: forget who has left, greet who is new."""
        self.known = {line.request: self.known.get(line.request) or self.greet() for line in lines}
        for line in lines:
            self.known[line.request].begin(line.fixed is not None)

    def greet(self) -> Known:
        """What is known of a new request."""
        return Known(self._typical.for_one_of_many())

    def slots(self, line: Line) -> int:
        """The most drafts of a request."""
        return max(0, min(self.gamma if line.fixed is None else line.fixed, line.left))

    def expected(self, line: Line) -> list[float]:
        """Confidences by past rounds."""
        return self.known[line.request].forecast.expected()

    def current(self, line: Line) -> Sequence[float]:
        """Confidences of this round, those by past rounds where they were not read."""
        if line.confidences is None:
            return self.expected(line)[: line.proposed]
        own = self.refine(self.calibrate(line.confidences))[: line.proposed]
        return self.known[line.request].shift(own)

    def worth(self, request: Hashable) -> float:
        """Of a token of this request beside those of others."""
        return 1.0

    def weighed(self, request: Hashable, confidences: Sequence[float]) -> list[float]:
        """Survivals by what a token of the request is worth."""
        return self.worths(request, survivals(confidences))

    def worths(self, request: Hashable, survivals: Sequence[float]) -> list[float]:
        """What the tokens of these slots are worth, by how they survive."""
        own = self.worth(request)
        return [own * survival for survival in survivals]

    def prices(self, lines: Sequence[Line]) -> Prices:
        """Seconds of the verify forwards among which is chosen."""
        most = max(self.gamma, *(self.taken(line) for line in lines))
        return self.grid.prices(len(lines), most, [line.depth for line in lines])

    def drafting(self, requests: int, slots: int, depths: Sequence[int]) -> float:
        """Seconds of a proposal for so many of the requests that lie at these depths."""
        return self.grid.drafting(requests, slots, len(depths), depths)

    @staticmethod
    def taken(line: Line) -> int:
        """Drafts that are verified in any case."""
        return 0 if line.fixed is None else max(0, min(line.fixed, line.left))

    def overhead(self, lines: Sequence[Line]) -> float:
        """Seconds of a round apart from its verify forward."""
        asked, depths = [line.proposed for line in lines if line.proposed], [line.depth for line in lines]
        return self.drafting(len(asked), max(asked, default=0), depths) + self.grid.around(len(lines))

    def plan(
        self, lines: Sequence[Line], confidences: Sequence[Sequence[float]], drafts: Sequence[int],
        reasons: Sequence[str] = (),
    ) -> Plan:
        """The record of a decision, with what it is expected to bring and to cost."""
        reasons = reasons or [reason(line, count) for line, count in zip(lines, drafts, strict=True)]
        tokens = len(lines) + sum(sum(survivals(own[:count])) for own, count in zip(confidences, drafts, strict=True))
        prices, further, widest = self.prices(lines), sum(drafts), max(drafts)
        return Plan(
            {line.request: count for line, count in zip(lines, drafts, strict=True)},
            prices.layout(further, widest), self.name,
            {line.request: why for line, why in zip(lines, reasons, strict=True)},
            tokens, prices.seconds(further, widest) + self.overhead(lines),
        )


    def leave_to_device(self, plan: Plan, lines: Sequence[Line]) -> Plan:
        """As many rows as planned, but for the slots that survive best in this round, which the device finds out.

        As planned where there is nothing to choose, and where rows are bought by the width and go to everybody.
        """
        ranked = {line.request: line.proposed for line in lines if line.fixed is None and line.proposed}
        further = sum(plan.drafts[request] for request in ranked)
        if plan.layout == RECTANGULAR or len(ranked) < 2 or further in (0, sum(ranked.values())):
            return plan
        return replace(plan, drafts={**plan.drafts, **ranked},
                       ranked=Ranked(tuple(ranked), further, self.temperatures or (), self.refine.scale,
                                     tuple(self.known[request].shift.value for request in ranked),
                                     tuple(self.worth(request) for request in ranked)))

    def share_out(self, plan: Plan, lines: Sequence[Line]) -> Plan:
        """The device's part, by this round's confidences on the host: its reference, for replays and where temperatures
        do not say how confidences are corrected."""
        if plan.ranked is None:
            return plan
        ranked, by_request = plan.ranked, {line.request: self.current(line) for line in lines}
        given = {line.request: self.calibrate(line.confidences or ())[: line.proposed] for line in lines}
        rows = []
        for request, shift, worth in zip(ranked.requests, ranked.shifts, ranked.worths, strict=True):
            by_request[request] = shifted(scaled(given[request], ranked.scale), shift)
            rows.append([worth * survival for survival in survivals(by_request[request])])
        drafts = {**plan.drafts, **dict(zip(ranked.requests, top(rows, ranked.further), strict=True))}
        known = self.plan(lines, [by_request[line.request] for line in lines], [drafts[line.request] for line in lines],
                          [plan.reasons[line.request] for line in lines])
        return replace(known, layout=plan.layout, seconds=plan.seconds)


def reason(line: Line, drafts: int) -> str:
    """Why this many drafts, where this round's confidences decided."""
    if not line.proposed:
        return "no draft asked"
    if line.fixed is not None:
        return "fixed width"
    return "every slot pays" if drafts == line.proposed else f"slot {drafts + 1} would not pay"
