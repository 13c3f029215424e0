"""Not drafting where it loses, and looking again now and then: shared by `auto` for one request and for many.

A parked request probes: it drafts one round to see whether the content has changed. The pause between
probes is the one that balances the probe's cost against what is missed, sqrt(2 cost / (chance of a
change per round x gain of noticing)), with both learned from the run; probes that fail make the chance
smaller, so they back off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .forecast import Forecast

WARM_UP = 8  # rounds drafted before anything is parked, while an optimist would
OPTIMISM = 0.35  # added to every expected confidence before the first round, less with every round seen
STAKE = 0.01  # share of the run's tokens that probing may cost, when drafting has earned nothing
FIRST_GAIN = 0.3  # tokens per round gained by drafting, before it is known
PAUSE_LIMIT = 256  # rounds; a run never stops looking altogether
GAIN_MEMORY = 0.02
PROBE_MEMORY = 0.995
READ_MEMORY = 0.01
PROBE = "probe"  # the reason of a round that looks whether the content has changed


class Mean:
    """A running mean: of all values at first, later mostly of the last 1 / READ_MEMORY."""

    def __init__(self) -> None:
        self.value, self.count = 0.0, 0

    def add(self, value: float) -> None:
        """Count one more value."""
        self.count += 1
        self.value += max(READ_MEMORY, 1 / self.count) * (value - self.value)


class Odds:
    """How often probes find a change, and what drafting then gains."""

    def __init__(self) -> None:
        self.changes, self.watched = 1.0, 8.0  # changes noticed in how many parked rounds (a prior of one in eight)
        self.gain = FIRST_GAIN

    def pause(self, cost: float) -> float:
        """Rounds between two probes that cost so many tokens each."""
        chance = self.changes / self.watched
        return min(PAUSE_LIMIT, max(2.0, math.sqrt(2 * (cost + 0.02) / (chance * self.gain))))

    def probed(self, waited: int, changed: bool) -> None:
        """A probe after so many parked rounds has landed."""
        self.watched = PROBE_MEMORY * (self.watched + waited)
        self.changes = PROBE_MEMORY * (self.changes + changed)

    def gained(self, value: float) -> None:
        """After a drafted round the next one is worth so many tokens."""
        if value > 0:
            self.gain += GAIN_MEMORY * (value - self.gain)


class Parking:
    """One request: how long it has been parked, and why it does what it does.

    waited: rounds from the draft before the last one to the last one. follow: a probe paid, draft once more.
    """

    def __init__(self) -> None:
        self.parked = self.waited = 0
        self.follow = False
        self.why = "warming up"

    def draft(self, why: str) -> None:
        """This round drafts."""
        self.why = why
        self.waited, self.parked = self.parked + 1, 0

    def park(self, loss: float) -> None:
        """This round does not draft."""
        self.parked += 1
        self.why = f"parked: a draft is expected to lose {loss:.2f} tokens"


def hoped(forecast: Forecast, expected: Sequence[float]) -> list[float]:
    """Confidences that the few rounds seen so far do not rule out."""
    hope = OPTIMISM / math.sqrt(forecast.rounds + 1)
    return [min(0.97, confidence + hope) for confidence in expected]
