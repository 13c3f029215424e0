"""What a token of each request is worth where several share a round, and who pays for what they share.

A text waits for its tokens: a request whose drafts are rejected does not meet other content in the next round, it
stays, and so does its place in the batch. So there is no one price of tokens, such as the rate of all together. A
token of a request saves what the request itself pays for one, its share of a round over what it commits in it:

    worth = min over k of  (base + k * row) / (1 + a_1 + .. + a_k)

base: everybody's share of a round, further rows not counted. row: seconds of one more row. Both are those of rounds of
late. Minimising this for each content minimises the seconds of all texts together, in whatever mixture they come.
Under a common price, requests that are hard to draft for are parked for the others' sake, and fill the batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .grid import Prices

MEMORY = 1 / 32  # of rounds of late
MOST = 0.5  # share of the requests that draft in a round that says what drafting is like


@dataclass
class Work:
    """Rounds of late in which most requests drafted, on average.

    rows: beyond one of each request. proposal: its seconds. other: seconds of what is neither it nor verifying.
    """

    rows: float = 0.0
    proposal: float = 0.0
    other: float = 0.0
    rounds: int = 0

    def add(self, rows: int, proposal: float, other: float) -> None:
        """Count one more round."""
        self.rounds += 1
        weight = max(MEMORY, 1 / self.rounds)
        self.rows += weight * (rows - self.rows)
        self.proposal += weight * (proposal - self.proposal)
        self.other += weight * (other - self.other)

    def base(self, prices: Prices, row: float, requests: int) -> float:
        """Seconds of a round, further rows not counted, that are everybody's.

        At the average number of rows: prices are not linear, so the average of seconds is not what rounds of so many
        rows take.
        """
        rows = min(round(self.rows), len(prices.packed) - 1)
        verify = prices.seconds(rows, -(-rows // requests))
        return verify + self.proposal + self.other - row * rows


def row_seconds(prices: Prices, further: int, always: int, requests: int) -> float:
    """Seconds of one more row beside `further` ones, of which `always` are verified in any case.

    By as many rows more and fewer as there are requests, so that a step is seen from both sides; at most what rows
    cost on average, for a step is not to be paid by everybody who comes near it.
    """
    rows = min(max(further, always + requests), len(prices.packed) - 1)
    fewer, more = max(always, rows - requests), min(rows + requests, len(prices.packed) - 1)
    least, less, most = (prices.seconds(count, -(-count // requests)) for count in (always, fewer, more))
    here = prices.seconds(rows, -(-rows // requests))
    if rows == always:
        return 0.0
    return max(0.0, min((most - less) / (more - fewer), (here - least) / (rows - always)))


def worth(survivals: Sequence[float], base: float, proposal: float, row: float) -> tuple[float, float]:
    """(seconds that a request pays for a token, its tokens in a round), given a_1..a_N.

    `proposal` is paid once it drafts at all.
    """
    tokens = accumulate(survivals, initial=1.0)
    return min(((base + (proposal if drafts else 0.0) + row * drafts) / own, own) for drafts, own in enumerate(tokens))


def worths(
    hopes: Mapping[Hashable, Sequence[float]], drafts: Mapping[Hashable, int], plain: float, base: float,
    proposal: float, row: float,
) -> dict[Hashable, float]:
    """Worth of a token by request, relative to plain decoding; nothing where plain decoding is better for all.

    hopes: a_1..a_N. drafts: how many slots a request proposes at present. plain: seconds of a token without drafts.
    A batch shows requests as often as they have rounds; what is better for all goes by tokens, so each counts by
    what it commits in a round at present.
    """
    found, more = {}, 0.0
    for request, survivals in hopes.items():
        seconds, tokens = worth(survivals, base, proposal, row)
        found[request] = seconds / plain
        more += (tokens if drafts[request] else 1.0) * (found[request] - 1)
    return found if more < 0 else {}


class Shares:
    """Who pays what of that which is bought together, in tokens: as many requests draft as together gain most.

    costs: where so many more requests draft.
    """

    def __init__(self, gains: Iterable[float], costs: Sequence[float]):
        # What was measured cheaper for more requests is no dearer for fewer.
        self._costs = costs = list(accumulate(reversed(costs), min))[::-1]
        ordered = sorted(gains, reverse=True)
        self.chosen, total, best = 0, 0.0, -costs[0]
        for count, gain in enumerate(ordered, start=1):
            total += gain
            if total - costs[count] > best:
                self.chosen, best = count, total - costs[count]
        self._least = ordered[self.chosen - 1] if self.chosen else float("inf")

    def value(self, gain: float) -> float:
        """Of drafting, its share paid: positive for those who draft."""
        return gain - self.next_to(self.chosen - 1 if gain >= self._least else self.chosen)

    def next_to(self, drafting: int, more: int = 1) -> float:
        """What one more request costs beside so many, or several more."""
        return self._costs[min(drafting + more, len(self._costs) - 1)] - self._costs[drafting]
