"""One order of all slots of all requests, and the searches that all batch policies are made of.

Slots are ranked by survival. Survivals of a request never rise from slot to slot, so the first so many
of the ranking always are a prefix of every request: whatever number is verified, no gap is left.

`search` looks at everything it is given and is therefore only for confidences that are old. `climb` is for this
round's: it goes down the ranking and decides about a slot before it looks at anything behind it, in
this request or another. What it has looked at by then are confidences of slots that follow admitted tokens;
so no admission depends on the token it admits, and texts of different requests stay independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import accumulate
from operator import mul

from .grid import Prices

Survivals = Sequence[Sequence[float]]  # [requests][slots], each row falling
Worth = Callable[[float, float], float]  # (expected tokens beyond one each, verify seconds) -> what is maximised
Admits = Callable[[int, int, float, Sequence[int], int, int], bool]


def survivals(confidences: Sequence[float]) -> list[float]:
    """a_1..a_N of c_1..c_N."""
    return list(accumulate(confidences, mul))


def ranked(rows: Survivals) -> list[tuple[float, int, int]]:
    """(-survival, slot, request) of every slot from 1 on, best first; equal ones by slot, then request."""
    return sorted((-survival, slot, request) for request, row in enumerate(rows)
                  for slot, survival in enumerate(row, start=1))


def top(rows: Survivals, budget: int) -> list[int]:
    """Drafts of each request when the `budget` best slots are verified."""
    drafts = [0] * len(rows)
    for _, _, request in ranked(rows)[:budget]:
        drafts[request] += 1
    return drafts


def search(rows: Survivals, taken: Sequence[int], prices: Prices, worth: Worth) -> list[int]:
    """Drafts of each request that are worth most: the best of all prefixes of the ranking and of all rectangles.

    taken: drafts of each request that are verified in any case; its row must then be empty.
    """
    further, widest = sum(taken), max(taken, default=0)
    best, found = worth(0.0, prices.seconds(further, widest)), (0, 0)
    order = ranked(rows)
    tokens, reach, packed, rectangular = 0.0, widest, prices.packed, prices.rectangular
    for count, (survival, slot, _) in enumerate(order, start=1):
        tokens -= survival
        if slot > reach:
            reach = slot
        seconds, by_width = packed[further + count], rectangular[reach]
        value = worth(tokens, seconds if seconds < by_width else by_width)
        if value > best:
            best, found = value, (count, 0)
    rectangle = _best_rectangle(rows, taken, prices, worth) if prices.by_width else (best, 0)
    if rectangle[0] > best:
        found = (0, rectangle[1])
    if found[1]:
        return [own or min(found[1], len(row)) for own, row in zip(taken, rows, strict=True)]
    drafts = list(taken)
    for _, _, request in order[: found[0]]:
        drafts[request] += 1
    return drafts


def _best_rectangle(rows: Survivals, taken: Sequence[int], prices: Prices, worth: Worth) -> tuple[float, int]:
    """(worth, drafts) of the best width given to every request that has so many slots."""
    best, tokens, further = (float("-inf"), 0), 0.0, sum(taken)
    for width in range(1, max(map(len, rows), default=0) + 1):
        column = [row[width - 1] for row in rows if len(row) >= width]
        tokens, further = tokens + sum(column), further + len(column)
        best = max(best, (worth(tokens, prices.seconds(further, max(width, *taken))), width))
    return best


def climb(rows: Survivals, taken: Sequence[int], admits: Admits, stop: bool) -> list[int]:
    """Drafts of each request, deciding slot by slot down the ranking.

    admits(request, slot, survival, drafts so far, further rows so far, widest so far) may look at the confidences
    of slots up to drafts + 1 of each request and no others. stop: the first refusal ends it all; otherwise
    it ends its request.
    """
    drafts, further, widest = list(taken), sum(taken), max(taken, default=0)
    heap = [(-row[0], 1, request) for request, row in enumerate(rows) if row]
    heapify(heap)
    while heap:
        survival, slot, request = heap[0]
        if admits(request, slot, -survival, drafts, further, widest):
            drafts[request] += 1
            further, widest = further + 1, max(widest, slot)
            if slot < len(rows[request]):
                heapreplace(heap, (-rows[request][slot], slot + 1, request))
                continue
        elif stop:
            break
        heappop(heap)
    return drafts
