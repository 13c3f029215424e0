"""What plans would have brought, given what a round has shown: `auto` across requests learns from it what pays.

A finished round whose confidences travelled shows what every slot was worth, drafts that were not verified included.
So one round teaches what it would have brought to plan by forecasts, to let the device choose the slots, to look, to
propose fewer slots, and to go by an older decision.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .grid import RECTANGULAR, Prices
from .parking import WARM_UP, Mean, Odds
from .ranking import Survivals, search, top
from .worth import Work

FAMILIAR = 8  # rounds after which a request's own insight counts as much as everybody's
FULL = 16  # decisions to draft: one in so many proposes the whole block, to see what the last slots are worth
RANK, LOOK = "rank", "look"


class Insight(dict[str, dict[bool, Mean]]):
    """Tokens that a request gains by a round's confidences, after a round of it below and one above its average.

    rank: as many rows as forecasts say for the slots that survive best, over the slots by forecasts, too. look: the
    lookahead decision by confidences that the host has read, over that.
    """

    def __init__(self) -> None:
        super().__init__({what: {False: Mean(), True: Mean()} for what in (RANK, LOOK)})

    def of_one(self, own: Insight, what: str, high: bool) -> float | None:
        """What it brings a request whose own insight is given, this one being everybody's; None before anything was
        learned."""
        shared, mine = self[what][high], own[what][high]
        if not shared.count:
            return None
        return shared.value + mine.count / (mine.count + FAMILIAR) * (mine.value - shared.value)


@dataclass(frozen=True)
class Hindsight:
    """A finished round, request by request, in tokens of plain decoding.

    rows: what the tokens of each slot are worth, by how they survive under the confidences that were seen; empty for a
    request that showed none. expected: the same by what was forecast. taken: drafts that were verified in any case.
    prices: seconds of the verify forwards. price: tokens a second. ranks: whether a device may choose the slots.
    """

    rows: Survivals
    expected: Survivals
    taken: Sequence[int]
    prices: Prices
    price: float
    ranks: bool

    @cached_property
    def planned(self) -> list[int]:
        """Drafts of each request by the forecasts."""
        return most_valuable(self.expected, self.taken, self.prices, self.price)

    def ranked(self, planned: Sequence[int]) -> Sequence[int]:
        """As many rows as planned, for the best slots where the device chooses them."""
        if not self.ranks or self.prices.layout(sum(planned), max(planned)) == RECTANGULAR:
            return planned
        return best_slots(self.rows, self.taken, planned)

    def row(self, drafts: Sequence[int]) -> float:
        """What a row of these costs on average."""
        return self.price * average_seconds(self.prices, self.taken, drafts)

    def gains(self, drafts: Sequence[int], row: float) -> list[float]:
        """Of each request, its rows paid."""
        return [sum(own[:count]) - row * count for own, count in zip(self.rows, drafts, strict=True)]

    def cut(self, slots: int) -> Hindsight:
        """Had so many been proposed."""
        return Hindsight([own[:slots] for own in self.rows], [own[:slots] for own in self.expected], self.taken,
                         self.prices, self.price, self.ranks)


@dataclass
class Load:
    """What was learned at one count of requests.

    work: what rounds that draft are like. insight: of all requests. deep: by whether rows go to the best of
    what a round shows and by slots, what a request gains a round by proposing so many, its rows paid. stale: tokens
    that all requests lose in a round that goes by a decision as old as decisions may become.
    """

    work: Work = field(default_factory=Work)
    odds: Odds = field(default_factory=Odds)
    insight: Insight = field(default_factory=Insight)
    deep: dict[tuple[bool, int], Mean] = field(default_factory=lambda: defaultdict(Mean))
    stale: Mean = field(default_factory=Mean)

    @property
    def knows_widths(self) -> bool:
        """Whether enough whole blocks were seen to propose less."""
        return self.deep[False, 1].count >= WARM_UP

    @property
    def learned(self) -> bool:
        """Whether enough was seen to let decisions stand, and verdicts wait."""
        return self.stale.count >= FULL and self.knows_widths

    def learn_depth(self, seen: Hindsight, gamma: int) -> None:
        """What would have come of proposing fewer slots: by forecasts, and of as many rows for the best slots."""
        for slots in range(1, gamma + 1):
            cut = seen.cut(slots)
            for followed, drafts in ((False, cut.planned), (True, best_slots(cut.rows, cut.taken, cut.planned))):
                tokens = sum(cut.gains(drafts, 0.0))
                value = tokens - cut.price * cut.prices.seconds(sum(drafts), max(drafts))
                self.deep[followed, slots].add(value / sum(map(bool, cut.rows)))

    def learn_staleness(
        self, seen: Hindsight, requests: Sequence[Hashable], old: Mapping[Hashable, int], row: float, ranks: bool
    ) -> None:
        """What an old decision, drafts by request, would have lost in this round.

        ranks: whether rows go to the best slots, as many as were planned.
        """
        aged = [min(old.get(request, drafts), len(own))
                for request, drafts, own in zip(requests, seen.planned, seen.rows, strict=True)]
        now, then = (sum(seen.gains(seen.ranked(plan) if ranks else plan, row)) for plan in (seen.planned, aged))
        self.stale.add(now - then)


def most_valuable(rows: Survivals, taken: Sequence[int], prices: Prices, price: float) -> list[int]:
    """Drafts of each request whose tokens are worth most, their seconds paid; for confidences that nobody has seen."""
    return search(rows, taken, prices, lambda tokens, seconds: tokens - price * seconds)


def best_slots(rows: Survivals, taken: Sequence[int], planned: Sequence[int]) -> list[int]:
    """As many drafts as planned, for the slots that survive best."""
    best = top(rows, sum(planned) - sum(taken))
    return [fixed or own for fixed, own in zip(taken, best, strict=True)]


def average_seconds(prices: Prices, taken: Sequence[int], drafts: Sequence[int]) -> float:
    """What a chosen row costs on average."""
    rows = sum(drafts) - sum(taken)
    more = prices.seconds(sum(drafts), max(drafts)) - prices.seconds(sum(taken), max(taken))
    return more / rows if rows else 0.0
