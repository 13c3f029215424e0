"""The paper's scheduler across requests: Algorithm 1, its search without early stop, and the production form.

All maximise expected tokens per second inside the round, over all requests. `paper` looks at this round
and must stop at the first slot that does not help; `search` looks at every number of rows and may
therefore only use confidences that are two rounds old; `lagged` takes the number of rows from those and
fills it with the slots that survive best in this round (paper, section 5.2), which is the device's part.
"""

from __future__ import annotations

from collections.abc import Sequence

from .batch_rate import ByCost
from .grid import Prices
from .lines import LAG, Line, Plan
from .ranking import climb, search, survivals


class BatchPaper(ByCost):
    """Algorithm 1: slots of all requests by descending survival, up to the first that does not raise tokens per
    second."""

    def after(self, lines: Sequence[Line]) -> Plan:
        confidences = [self.current(line) for line in lines]
        taken = [self.taken(line) for line in lines]
        rising = _Rising(self.prices(lines), self.overhead(lines), _certain(confidences, taken), taken)
        drafts = climb(_open(lines, confidences), taken, rising, stop=True)
        return self.plan(lines, confidences, drafts)


class BatchSearch(ByCost):
    """The best number of rows and the best slots, both by confidences two rounds old: one host read a round."""

    @property
    def reads_confidence(self) -> bool:
        return False

    def after(self, lines: Sequence[Line]) -> Plan:
        old = [self.old(line) for line in lines]
        return self.plan(lines, old, self.best(lines, old), ["by confidences two rounds old"] * len(lines))

    def best(self, lines: Sequence[Line], confidences: Sequence[Sequence[float]]) -> list[int]:
        """Drafts of each request with the most tokens per second; only for confidences of past rounds."""
        taken = [self.taken(line) for line in lines]
        certain, overhead = _certain(confidences, taken), self.overhead(lines)
        return search(_open(lines, confidences), taken, self.prices(lines),
                      lambda tokens, seconds: (certain + tokens) / (overhead + seconds))

    def old(self, line: Line) -> Sequence[float]:
        """Confidences two rounds old, the expected ones of a request that is too young."""
        known = self.known[line.request]
        return (known.old[-LAG] if len(known.old) >= LAG else known.forecast.expected())[: line.proposed]


class BatchLagged(BatchSearch):
    """The production form: the number of rows by confidences two rounds old, the slots by this round's.

    The number is all that the host decides. Which slots are the best is left to the device (`Plan.ranked`), so a
    round has one host read, and the decision is made while the device drafts. Given this round's confidences,
    `after` ranks by itself: the reference, for replays, and for calibrations that are no temperatures.

    The best slots are those of a climb that admits so many and no more: it looks at nothing behind a refused slot.
    """

    @property
    def reads_confidence(self) -> bool:
        return self.temperatures is None

    def after(self, lines: Sequence[Line]) -> Plan:
        old = [self.old(line) for line in lines]
        plan = self.plan(lines, old, self.best(lines, old), ["as many rows as paid two rounds ago"] * len(lines))
        plan = self.leave_to_device(plan, lines)
        read = all(line.confidences is not None for line in lines if line.proposed)
        return self.share_out(plan, lines) if read else plan


class _Rising:
    """Whether one more slot raises tokens per second."""

    def __init__(self, prices: Prices, overhead: float, tokens: float, taken: Sequence[int]):
        self._prices, self._overhead, self._tokens = prices, overhead, tokens
        self._best = tokens / (overhead + prices.seconds(sum(taken), max(taken)))

    def __call__(
        self, request: int, slot: int, survival: float, drafts: Sequence[int], further: int, widest: int
    ) -> bool:
        tokens = self._tokens + survival
        rate = tokens / (self._overhead + self._prices.seconds(further + 1, max(widest, slot)))
        if rate <= self._best:
            return False
        self._tokens, self._best = tokens, rate
        return True


def _open(lines: Sequence[Line], confidences: Sequence[Sequence[float]]) -> list[list[float]]:
    """Survivals of the slots that are the scheduler's to choose."""
    return [survivals(own) if line.fixed is None else [] for line, own in zip(lines, confidences, strict=True)]


def _certain(confidences: Sequence[Sequence[float]], taken: Sequence[int]) -> float:
    """Expected tokens of what is verified in any case."""
    return len(taken) + sum(sum(survivals(own[:count])) for own, count in zip(confidences, taken, strict=True))
