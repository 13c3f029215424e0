"""Looking past steps in the costs of several requests: does a slot begin a continuation that pays?"""

from __future__ import annotations

from collections.abc import Sequence

from .forecast import Forecast
from .grid import Prices
from .ranking import Survivals


class Ahead:
    """Whether a slot, or a continuation that begins with it, brings more than its rows cost."""

    def __init__(
        self, rows: Survivals, confidences: Sequence[Sequence[float]], forecasts: Sequence[Forecast], prices: Prices,
        price: float,
    ):
        self._rows, self._confidences, self._forecasts = rows, confidences, forecasts
        self._prices, self._price = prices, price
        self._by_width = prices.by_width
        self._closed: set[int] = set()
        self._refused = False  # the slot before this one
        self._tails: dict[tuple[int, int], list[tuple[float, int]]] = {}

    def __call__(
        self, request: int, slot: int, survival: float, drafts: Sequence[int], further: int, widest: int
    ) -> bool:
        here = self._prices.seconds(further, widest)
        if (survival > self._price * (self._prices.seconds(further + 1, max(widest, slot)) - here)
                or self._could_pay(survival, further, here)
                and self._continues(request, slot, drafts, further, widest, here)):
            self._refused = False
            return True
        self._closed.add(request)
        self._refused = True
        return False

    def _could_pay(self, survival: float, further: int, here: float) -> bool:
        """Whether any continuation would pay if all its slots survived like the first: none survives better."""
        limit = survival / self._price
        if self._by_width and any(limit * len(self._rows) * width > seconds - here
                                  for width, seconds in enumerate(self._prices.rectangular)):
            return True
        return any(limit * count > seconds - here
                   for count, seconds in enumerate(self._prices.packed[further + 2 :], start=2))

    def _continues(
        self, request: int, slot: int, drafts: Sequence[int], further: int, widest: int, here: float
    ) -> bool:
        first, *own = self._tail(request, drafts[request])
        rest = list(own)
        for other, count in enumerate(drafts):
            if other != request and other not in self._closed and count < len(self._rows[other]):
                rest += self._tail(other, count)
        # Behind a refusal, the way down the ranking has the same prices for poorer slots.
        return (not self._refused and self._down(first, sorted(rest), further, widest, here)) or (
            self._by_width and self._across(first, rest, further, widest, here))

    def _down(
        self, first: tuple[float, int], rest: Sequence[tuple[float, int]], further: int, widest: int, here: float
    ) -> bool:
        """A continuation by survival."""
        packed, rectangular, price = self._prices.packed, self._prices.rectangular, self._price
        tokens, reach = -first[0], max(widest, first[1])
        for count, (survival, slot) in enumerate(rest, start=further + 2):
            tokens -= survival
            if slot > reach:
                reach = slot
            seconds = packed[count] if packed[count] < rectangular[reach] else rectangular[reach]
            if tokens > price * (seconds - here):
                return True
        return False

    def _across(
        self, first: tuple[float, int], rest: Sequence[tuple[float, int]], further: int, widest: int, here: float
    ) -> bool:
        """A continuation that fills a rectangle."""
        columns, counts = [0.0] * len(self._prices.rectangular), [0] * len(self._prices.rectangular)
        for survival, slot in (first, *rest):
            columns[slot] -= survival
            counts[slot] += 1
        tokens, rows = sum(columns[: first[1]]), sum(counts[: first[1]])
        for width in range(first[1], len(columns)):
            tokens, rows = tokens + columns[width], rows + counts[width]
            seconds = self._prices.seconds(further + rows, max(width, widest))
            if tokens > self._price * (seconds - here):
                return True
        return False

    def _tail(self, request: int, drafts: int) -> list[tuple[float, int]]:
        """(-survival, slot) of a request's next slot, which is seen, and of those behind it, which are forecast."""
        key = request, drafts
        if key not in self._tails:
            seen = self._confidences[request][: drafts + 1]
            survival, total = self._rows[request][drafts], len(self._rows[request])
            tail = [(-survival, drafts + 1)]
            for slot, confidence in enumerate(self._forecasts[request].predict(seen)[: total - drafts - 1], drafts + 2):
                survival *= confidence
                tail.append((-survival, slot))
            self._tails[key] = tail
        return self._tails[key]
