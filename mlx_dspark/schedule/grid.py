"""What a round of several requests costs on this machine: seconds by requests and rows, measured in both layouts.

A verify forward of several requests runs in one of two layouts. `packed` runs the true number of rows,
so it is priced by the sum over requests; `rectangular` runs every request at the rows of the widest, so
it is priced by the widest. As on a `CostCurve` nothing is interpolated: an unmeasured count of requests
or rows is priced like the next larger measured one. Beyond the largest the price grows in proportion.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..errors import FormatError
from .cost import CostCurve

PACKED, RECTANGULAR = "packed", "rectangular"
LAYOUTS = (PACKED, RECTANGULAR)
SECONDS = ("host", "host_request", "read", "read_request", "rank_request", "decide_request")

Pair = tuple[int, int]


@dataclass(frozen=True)
class Prices:
    """Verify seconds that this round's requests may meet.

    packed: by further rows of all requests together, beyond one row each. rectangular: by the drafts of the
    widest request. A layout that may not be used costs infinitely much.
    """

    packed: Sequence[float]
    rectangular: Sequence[float]

    @property
    def by_width(self) -> bool:
        """Whether rectangles may be run."""
        return self.rectangular[-1] < math.inf

    def seconds(self, further: int, widest: int) -> float:
        """Of the cheaper layout."""
        return min(self.packed[further], self.rectangular[widest])

    def layout(self, further: int, widest: int) -> str:
        """The cheaper one, packed if they cost the same."""
        return PACKED if self.packed[further] <= self.rectangular[widest] else RECTANGULAR


@dataclass(frozen=True)
class CostGrid:
    """Seconds, all of them, of rounds in which several requests take part.

    packed: one verify forward by (requests, rows of all requests together).
    rectangular: one verify forward by (requests, rows of the widest request).
    Either may be empty: that layout is then never chosen. Both are at context depth `depth` (positions).
    packed_slope, rectangular_slope: by the same pairs, seconds more per further position of every request.
    draft: one batched proposal by (requests that draft, slots each); empty costs nothing. draft_slope: as of forwards.
    part: what a proposal for half of the requests takes, over one for all; 0 where that was not measured.
    host: per round, everything that is not a forward. host_request: the same, more per request.
    read: what a look at the round's confidences adds to it. read_request: the same, more per request.
    rank_request: what the device's sharing out of rows adds to a round, per request. decide_request: the same of
    working out who drafts and how much is verified, and of the confidences that this is learned from.
    about: where and when it was measured, or what it was derived from.

    Raises FormatError for values that cannot have been measured.
    """

    packed: Mapping[Pair, float]
    rectangular: Mapping[Pair, float] = field(default_factory=dict)
    depth: int = 0
    packed_slope: Mapping[Pair, float] = field(default_factory=dict)
    rectangular_slope: Mapping[Pair, float] = field(default_factory=dict)
    draft: Mapping[Pair, float] = field(default_factory=dict)
    draft_slope: Mapping[Pair, float] = field(default_factory=dict)
    part: float = 0.0
    host: float = 0.0
    host_request: float = 0.0
    read: float = 0.0
    read_request: float = 0.0
    rank_request: float = 0.0
    decide_request: float = 0.0
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("packed", "rectangular", "draft"):
            for pair, seconds in getattr(self, name).items():
                if not (_is_pair(pair) and 0 <= seconds < math.inf):
                    raise FormatError(f"a cost grid has {name}[{pair!r}] = {seconds!r}: measure it again")
        for name in SECONDS:
            if not 0 <= getattr(self, name) < math.inf:
                raise FormatError(f"a cost grid has {name} = {getattr(self, name)!r} seconds: measure it again")
        if not 0 <= self.part <= 1:
            raise FormatError(f"a cost grid has part = {self.part!r}, a share: measure it again")
        for name in ("packed_slope", "rectangular_slope", "draft_slope"):
            if not all(map(math.isfinite, getattr(self, name).values())):
                raise FormatError(f"a cost grid has a {name} that is no number: measure it again")
        if not self.layouts:
            raise FormatError("a cost grid holds no verify forward: measure it again")
        for layout in self.layouts:
            for requests in {requests for requests, _ in getattr(self, layout)}:
                plain = (requests, requests if layout == PACKED else 1)
                if plain not in getattr(self, layout):
                    raise FormatError(f"a cost grid lacks {layout}[{plain}], a plain round: measure it again")

    @cached_property
    def layouts(self) -> tuple[str, ...]:
        """Those that were measured."""
        return tuple(layout for layout in LAYOUTS if getattr(self, layout))

    @cached_property
    def widest(self) -> int:
        """The most rows of a request for which every measured count of requests has a measured price."""
        packed = [max(counts) // requests for requests, counts in self._table(PACKED).known.items()]
        return min(packed + [max(counts) for counts in self._table(RECTANGULAR).known.values()])

    @property
    def most_requests(self) -> int:
        """The largest count of requests that was measured."""
        return max(max(self._table(layout).known) for layout in self.layouts)

    def only(self, layout: str) -> CostGrid:
        """The grid without the other layout. Raises ValueError if this one was not measured."""
        if layout not in self.layouts:
            raise ValueError(f"layout {layout!r} was not measured: use {' or '.join(self.layouts)}")
        if layout == PACKED:
            return replace(self, rectangular={}, rectangular_slope={})
        return replace(self, packed={}, packed_slope={})

    def load(self, requests: int) -> int:
        """The measured count of requests by which this one is priced."""
        return self._table(self.layouts[0]).load(requests)

    def verify(self, layout: str, rows: Sequence[int], depths: Sequence[int] = ()) -> float:
        """Seconds of one verify forward, as it is executed.

        rows: of every request, drafts + 1. depths: context positions of every request; without them the
        depth that the grid was measured at.
        """
        count = sum(rows) if layout == PACKED else max(rows)
        return self._at_depth(layout, *self._entry(layout, len(rows), count), depths)

    def cheaper(self, rows: Sequence[int], depths: Sequence[int] = ()) -> tuple[str, float]:
        """(layout, seconds) of the cheaper way to run these rows."""
        seconds = {layout: self.verify(layout, rows, depths) for layout in self.layouts}
        layout = min(seconds, key=seconds.__getitem__)
        return layout, seconds[layout]

    def prices(self, requests: int, most: int, depths: Sequence[int] = ()) -> Prices:
        """What a verify forward of this round may cost, each request having up to `most` drafts."""
        return Prices(self._prices(PACKED, requests, requests * most, depths),
                      self._prices(RECTANGULAR, requests, most, depths))

    def drafting(self, requests: int, slots: int, among: int = 0, depths: Sequence[int] = ()) -> float:
        """Seconds of one batched proposal: this many tokens for each of so many requests.

        among: how many take part in the round. Where a proposal for half of them was measured, others lie on the line
        through it and the one for all: timings of other counts are of another minute, and of rounds of so many alone.
        depths: context positions of the requests, as for `verify`.
        """
        if not (self.draft and requests and slots):
            return 0.0
        if self.part and requests < among:
            share = max(requests / among, 1 - 2 * (1 - self.part) * (1 - requests / among))
            return share * self._proposal(among, slots, depths)
        return self._proposal(requests, slots, depths)

    def _proposal(self, requests: int, slots: int, depths: Sequence[int]) -> float:
        return self._at_depth(PACKED, *self._entry("draft", requests, slots), depths)

    def around(self, requests: int) -> float:
        """Host seconds of a round."""
        return self.host + requests * self.host_request

    def reading(self, requests: int) -> float:
        """Seconds that a look at the confidences adds to a round."""
        return self.read + requests * self.read_request

    def ranking(self, requests: int) -> float:
        """Seconds that a round takes longer where the device shares out the rows."""
        return requests * self.rank_request

    def deciding(self, requests: int) -> float:
        """Seconds that a round takes longer where a decision is worked out from what was learned."""
        return requests * self.decide_request

    def to_dict(self) -> dict[str, Any]:
        """As JSON; a table is {requests: {count: seconds}}."""
        tables = {name: {str(n): {str(m): seconds for m, seconds in row.items()}
                         for n, row in _by_requests(getattr(self, name)).items()} for name in TABLES}
        return {**tables, "depth": self.depth, "part": self.part, **{name: getattr(self, name) for name in SECONDS},
                "about": dict(self.about)}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> CostGrid:
        """The inverse of `to_dict`. Raises FormatError for anything else."""
        try:
            packed, rectangular, packed_slope, rectangular_slope, draft, draft_slope = (
                {(int(n), int(m)): float(seconds) for n, row in facts.get(name, {}).items()
                 for m, seconds in row.items()} for name in TABLES)
            return cls(packed, rectangular, int(facts.get("depth", 0)), packed_slope, rectangular_slope, draft,
                       draft_slope, **{name: float(facts.get(name, 0)) for name in ("part", *SECONDS)},
                       about=dict(facts.get("about", {})))
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError(f"a stored cost grid is damaged ({error}): measure it again") from None

    @classmethod
    def from_curve(cls, curve: CostCurve, requests: Iterable[int], slots: int) -> CostGrid:
        """A grid for a machine that was only measured with one request. `about` says that it is derived.

        requests: the counts that forwards are priced for; proposals are priced for every count up to the largest.
        It assumes that a row costs the same whoever owns it, so the curve is asked for the rows of all
        requests together; that more rows than the curve knows cost what several forwards cost; that a batched
        proposal grows as the verify forward does, from `slots` rows to requests x `slots`, and is never dearer
        than one proposal per request; and that context costs each request what it costs a request alone.
        """
        counts = sorted(set(requests))
        packed = {(n, rows): _split(curve, rows) for n in counts for rows in range(n, n * (slots + 1) + 1)}
        slope = {(n, rows): n * curve.further(-(-rows // n)) for n, rows in packed} if curve.slope else {}
        rectangular, rectangular_slope = (
            {(n, rows // n): value for (n, rows), value in table.items() if rows % n == 0} for table in (packed, slope))
        draft = {(n, asked): seconds * min(n, _split(curve, n * asked) / _split(curve, asked))
                 for n in range(1, counts[-1] + 1) for asked, seconds in curve.draft.items()}
        draft_slope = {(n, asked): n * curve.draft_slope for n, asked in draft} if curve.draft_slope else {}
        about = {**curve.about, "derived": "from the cost curve of one request, by the rows of all requests together"}
        return cls(packed, rectangular, curve.depth, slope, rectangular_slope, draft, draft_slope, host=curve.host,
                   read=curve.read, about=about)

    @cached_property
    def _measured(self) -> dict[str, _Table]:
        return {name: _Table(_by_requests(getattr(self, name)), name.startswith(PACKED)) for name in TABLES}

    @cached_property
    def _entries(self) -> dict[tuple[str, int, int], tuple[float, float]]:
        return {}

    @cached_property
    def _cached(self) -> dict[tuple[str, int, int], tuple[list[float], list[float]]]:
        return {}

    def _table(self, name: str) -> _Table:
        return self._measured[name]

    def _entry(self, layout: str, requests: int, count: int) -> tuple[float, float]:
        """(seconds, seconds more per position of context)."""
        key = layout, requests, count
        if key not in self._entries:
            slopes = self._table(f"{layout}_slope")
            slope = max(0.0, slopes.price(requests, count)) if slopes.known else 0.0
            self._entries[key] = self._table(layout).price(requests, count), slope
        return self._entries[key]

    def _at_depth(self, layout: str, seconds: float, slope: float, depths: Sequence[int]) -> float:
        return _moved(seconds, slope * self._further(layout, depths)) if depths and slope else seconds

    def _further(self, layout: str, depths: Sequence[int]) -> float:
        """Positions beyond the grid's, or short of it: packed attention reads each owner's keys, rectangular as many
        for all as for the deepest."""
        return (sum(depths) / len(depths) if layout == PACKED else max(depths)) - self.depth

    def _prices(self, layout: str, requests: int, most: int, depths: Sequence[int]) -> Sequence[float]:
        if layout not in self.layouts:
            return [math.inf] * (most + 1)
        key = layout, requests, most
        if key not in self._cached:
            first = requests if layout == PACKED else 1
            entries = [self._entry(layout, requests, first + more) for more in range(most + 1)]
            self._cached[key] = [seconds for seconds, _ in entries], [slope for _, slope in entries]
        seconds, slopes = self._cached[key]
        if not depths or not any(slopes):
            return seconds
        further = self._further(layout, depths)
        return [_moved(base, slope * further) for base, slope in zip(seconds, slopes, strict=True)]


TABLES = ("packed", "rectangular", "packed_slope", "rectangular_slope", "draft", "draft_slope")


class _Table:
    """Measured entries {requests: {count: seconds}}; together: a count is of all requests, not of each."""

    def __init__(self, known: Mapping[int, Mapping[int, float]], together: bool):
        self.known, self._together = known, together
        self._requests = sorted(known)
        self._counts = {n: sorted(counts) for n, counts in known.items()}

    def load(self, requests: int) -> int:
        """The next larger measured count of requests, or the largest."""
        return self._requests[min(bisect_left(self._requests, requests), len(self._requests) - 1)]

    def price(self, requests: int, count: int) -> float:
        load = self.load(requests)
        over = max(1.0, requests / load)
        wanted = math.ceil(count / over) if self._together else count
        counts = self._counts[load]
        at = counts[min(bisect_left(counts, wanted), len(counts) - 1)]
        return self.known[load][at] * over * max(1.0, wanted / at)


def _moved(seconds: float, by: float) -> float:
    """A price at another depth; at most halved, however steep noise has made the slope."""
    return max(seconds / 2, seconds + by)


def _by_requests(table: Mapping[Pair, float]) -> dict[int, dict[int, float]]:
    grouped: dict[int, dict[int, float]] = {}
    for (requests, count), seconds in sorted(table.items()):
        grouped.setdefault(requests, {})[count] = seconds
    return grouped


def _is_pair(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(n, int) and n >= 1 for n in pair)


def _split(curve: CostCurve, rows: int) -> float:
    """Seconds of so many rows, run as several forwards where the curve does not know them."""
    whole, rest = divmod(rows, curve.widest)
    return whole * curve.verify(curve.widest) + (curve.verify(rest) if rest else 0.0)
