"""Which of several requests draft, and when the others look again: parking (`parking.py`) where a draft is shared.

Most of a proposal is paid with the first of those that draft. So parked requests probe one by one beside others that
draft, and all together where nobody does.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Set

from .parking import PROBE, STAKE, WARM_UP, Odds, Parking
from .worth import Shares

PATIENCE = 1.5  # pauses after which a probe waits no longer for the next decision
WATCH = "parking would save less than looking again costs"


class ParkingLot:
    """tokens, lead: committed, and how many more than plain decoding in the same seconds. probes_in: rounds until the
    next probe is due."""

    def __init__(self) -> None:
        self.tokens, self.lead, self.probes_in = 0, 0.0, math.inf
        self._places: dict[Hashable, Parking] = {}
        self._fresh: dict[Hashable, bool] = {}  # whose forecast has learned since the last decision; by a probe?

    def __getitem__(self, request: Hashable) -> Parking:
        """The place of a request that is there now."""
        return self._places[request]

    def begin(self, requests: Iterable[Hashable]) -> None:
        """A round begins, for those who are there now."""
        self._places = {request: self._places.get(request) or Parking() for request in requests}

    def account(self, tokens: int, plain: float) -> None:
        """A round has committed so many, and plain decoding would have in its seconds."""
        self.tokens += tokens
        self.lead += tokens - plain

    def learned(self, reasons: Mapping[Hashable, str]) -> None:
        """Forecasts of these requests have learned from rounds that were drafted for these reasons."""
        self._fresh |= {request: reason in (PROBE, WATCH) for request, reason in reasons.items()}

    def decide(
        self, values: Mapping[Hashable, float], gains: Mapping[Hashable, float], shares: Shares, odds: Odds,
        seen: Mapping[Hashable, int],
    ) -> set[Hashable]:
        """Which requests draft.

        gains: what drafting is expected to bring each request, in tokens, its share of the proposal not paid. values:
        that being paid. shares: of what is bought together. seen: rounds of each that forecasts know.
        """
        self._review(values, odds, seen)
        drafting = set()
        for request, value in values.items():
            place = self._places[request]
            if value > 0:
                place.draft("drafting pays" if seen[request] >= WARM_UP else "warming up")
            elif place.follow:
                place.draft("the probe paid")
            else:
                continue
            place.follow = False
            drafting.add(request)
        self._probe(drafting, values, gains, shares, odds)
        return drafting

    def invite(self, parked: Set[Hashable]) -> Set[Hashable]:
        """Let these draft after all; returns them."""
        for request in parked:
            self._places[request].draft("beside the others it pays")
        self.probes_in = math.inf
        return parked

    def _review(self, values: Mapping[Hashable, float], odds: Odds, seen: Mapping[Hashable, int]) -> None:
        """What drafting is worth after the last round, and whether its probes found that it has come to pay."""
        for request in self._fresh.keys() & values.keys():
            if self._fresh[request]:
                odds.probed(self._places[request].waited, values[request] > 0)
            if seen[request] > WARM_UP:
                odds.gained(values[request])
        self._fresh.clear()

    def _probe(
        self, drafting: set[Hashable], values: Mapping[Hashable, float], gains: Mapping[Hashable, float],
        shares: Shares, odds: Odds,
    ) -> None:
        """Add those who look whether the content has changed; the others are parked.

        One by one, the longest parked first; all together where nobody drafts, and together they lose little where
        drafting nearly pays. So little, it may be, that parking would not save what looking again costs: losing `cost`
        every round is cheaper than the 2 cost / pause that probes and what they notice late come to, if the pause is of
        two rounds or less. Then they draft on, and nothing is missed.
        """
        parked = sorted(values.keys() - drafting, key=lambda request: -self._places[request].parked)
        groups = [[request] for request in parked] if drafting else [parked] if parked else []
        staked, self.probes_in = 0.0, math.inf
        for group in groups:
            cost = max(0.0, shares.next_to(len(drafting), len(group)) - sum(gains[request] for request in group))
            pause, waited = odds.pause(cost / len(group)), self._places[group[0]].parked
            watches = pause <= 2 and len(group) > 1
            most = cost + (0 if watches else len(group))
            if (watches or waited + 1 >= pause) and self._may_lose(staked + most):
                staked += cost
                drafting.update(group)
                for request in group:
                    self._places[request].draft(WATCH if watches else PROBE)
            else:
                for request in group:
                    self._places[request].park(-values[request])
                rounds = max(PATIENCE * pause - waited, self._affords(staked + most))
                self.probes_in = min(self.probes_in, rounds)

    def _may_lose(self, tokens: float) -> bool:
        """Whether losing this much leaves the run ahead of plain decoding, or behind by the stake at most."""
        return self.lead - tokens >= -STAKE * self.tokens

    def _affords(self, tokens: float) -> float:
        """Rounds without drafts after which it may lose this much."""
        return (tokens - self.lead - STAKE * self.tokens) / (STAKE * len(self._places))
