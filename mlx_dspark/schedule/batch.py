"""The questions that a round of several requests asks, and the policies that answer them.

`before(lines)` is asked before the draft runs: how many tokens to draft for each request, 0 leaving it out of
the batched proposal. `after(lines)` is asked once the drafts exist: how many of each request's to verify,
and in which layout. `learn(rounds)` hands back what came of it, `reflect()` gives time to think about that.

The admission of a slot may use c_1..c_j of its own request, and of other requests what follows tokens that are
admitted there. It is never shown a draft token. So no request's text depends on how it was scheduled, and
texts of different requests stay independent of each other (paper, appendix A).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..structs import Round
from .batch_auto import BatchAuto
from .batch_paper import BatchLagged, BatchPaper, BatchSearch
from .batch_rate import ByCost
from .grid import PACKED, CostGrid
from .lines import Line, Plan
from .policies import Reads, make_policy
from .rate import Calibrate

__all__ = ["BatchPolicy", "Line", "Plan", "batch_needs_costs", "make_batch_policy"]


class BatchPolicy(Reads, Protocol):
    """What the loop over several requests needs to know."""

    def before(self, lines: Sequence[Line]) -> Mapping[Hashable, int]:
        """Slots to draft, by request; a request is in `lines` as long as it is served."""

    def after(self, lines: Sequence[Line]) -> Plan:
        """How many of the proposed drafts to verify."""

    def learn(self, landed: Mapping[Hashable, Round]) -> None:
        """The finished rounds of all requests that shared a forward."""

    def reflect(self) -> None:
        """Asked once the next round is on its way: work that it did not need is free while the device is busy."""


@dataclass(frozen=True)
class BatchFixed:
    """Always draft and verify `width` tokens of every request; 0 is plain decoding.

    grid: chooses the layout; without it everything is packed.
    """

    width: int
    name: str
    grid: CostGrid | None = None
    reads_confidence: bool = False
    uses_confidence: bool = False

    def before(self, lines: Sequence[Line]) -> dict[Hashable, int]:
        return {line.request: max(0, min(self._wanted(line), line.left)) for line in lines}

    def after(self, lines: Sequence[Line]) -> Plan:
        rows = [line.proposed + 1 for line in lines]
        layout = PACKED if self.grid is None else self.grid.cheaper(rows, [line.depth for line in lines])[0]
        return Plan({line.request: line.proposed for line in lines}, layout, self.name,
                    {line.request: self._reason(line) for line in lines})

    def learn(self, landed: Mapping[Hashable, Round]) -> None:
        """Nothing changes its mind."""

    def reflect(self) -> None:
        """It has nothing to think about."""

    def _wanted(self, line: Line) -> int:
        return self.width if line.fixed is None else line.fixed

    def _reason(self, line: Line) -> str:
        if not self._wanted(line):
            return "no draft asked"
        return "fixed width" if line.proposed == self._wanted(line) else "cut to what is left"


_BY_COST: dict[str, Callable[[str, int, CostGrid, Calibrate], ByCost]] = {
    "paper": BatchPaper,
    "search": BatchSearch,
    "lagged": BatchLagged,
    "auto": BatchAuto,
}


def batch_needs_costs(text: str | None, gamma: int, has_confidence: bool) -> bool:
    """Whether the policy of this name (None: the default) decides by a cost grid."""
    return bool(gamma) and has_confidence and (text is None or text in _BY_COST)


def make_batch_policy(
    text: str | None, gamma: int, has_confidence: bool, grid: CostGrid | None = None, calibrate: Calibrate = tuple
) -> BatchPolicy:
    """Build a policy for several requests from its name.

    text: plain, fixed (the whole block), fixed:N, paper, search, lagged or auto; None is auto where there is a
        cost grid and a confidence head, else fixed, and plain without a draft.
    gamma: the draft's slots, 0 without a draft. grid: the machine's costs, which the last four need.
    calibrate: raw confidences to probabilities.

    Raises ValueError for an unknown name, a value out of range, or something that is missing.
    """
    if text is None:
        text = "plain" if not gamma else "auto" if grid and has_confidence else "fixed"
    if text not in _BY_COST:
        if text.partition(":")[0] not in ("plain", "fixed"):
            raise ValueError(f"unknown policy {text!r} for several requests: use plain, fixed:N, {', '.join(_BY_COST)}")
        single = make_policy(text, gamma, has_confidence)
        return BatchFixed(single.before(()), text, grid)
    if not gamma:
        raise ValueError(f"policy {text!r} needs a draft and there is none: give --draft, or use --policy plain")
    if not has_confidence:
        raise ValueError(f"policy {text!r} needs a confidence head and this draft has none: use fixed:{gamma}")
    if grid is None:
        raise ValueError(f"policy {text!r} needs the costs of this machine: leave --no-profile out, or use fixed:N")
    return _BY_COST[text](text, gamma, grid, calibrate)
