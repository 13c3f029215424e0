"""What a round costs on this machine: seconds of a verify forward by rows and depth, of the draft, of the host.

A curve is measured row count by row count (see `measure.py`) and never interpolated: between two
measured row counts lies perhaps a step, so an unmeasured one is priced like the next larger measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import FormatError


@dataclass(frozen=True)
class CostCurve:
    """Seconds, all of them.

    rows: one verify forward by row count, at context depth `depth` (positions).
    slope: by row count, seconds more per further position of context.
    draft: by proposals asked, at the same depth; any larger count costs like the next measured one, 0 costs nothing.
    draft_slope: seconds more of a proposal per further position, however many slots it has.
    host: per round, everything that is not a forward. read: what a look at the round's confidences adds to it.
    about: where and when it was measured.
    """

    rows: Mapping[int, float]
    depth: int = 0
    slope: Mapping[int, float] = field(default_factory=dict)
    draft: Mapping[int, float] = field(default_factory=dict)
    draft_slope: float = 0.0
    host: float = 0.0
    read: float = 0.0
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if 1 not in self.rows:
            raise FormatError("a cost curve needs the seconds of one row: measure it again")
        for name in ("rows", "draft"):
            for count, seconds in getattr(self, name).items():
                if not (isinstance(count, int) and count >= 1 and 0 <= seconds < math.inf):
                    raise FormatError(f"a cost curve has {name}[{count!r}] = {seconds!r}: measure it again")
        for name, value in (("host", self.host), ("read", self.read), ("draft_slope", self.draft_slope)):
            if not 0 <= value < math.inf:
                raise FormatError(f"a cost curve has {name} = {value!r} seconds: measure it again")
        if not all(map(math.isfinite, self.slope.values())):
            raise FormatError(f"a cost curve has the slope {dict(self.slope)!r}: measure it again")

    @property
    def widest(self) -> int:
        """The largest row count that was measured."""
        return max(self.rows)

    def verify(self, rows: int, depth: int | None = None) -> float:
        """Seconds of a verify forward of `rows` rows at context `depth`; the widest known for more rows.

        A shallower context than the measured one is priced like that: slopes are noisy, and down to nothing
        they would carry prices anywhere.
        """
        further = 0 if depth is None else max(0, depth - self.depth)
        return self.rows[self._measured(rows)] + self.further(rows) * further

    def further(self, rows: int) -> float:
        """Seconds more of such a forward per further position of context."""
        return max(0.0, self.slope.get(self._measured(rows), 0.0))

    def _measured(self, rows: int) -> int:
        return min((n for n in self.rows if n >= rows), default=self.widest)

    def drafting(self, proposals: int, depth: int | None = None) -> float:
        """Seconds of one proposal of this many tokens behind `depth` positions; a shallower one as in `verify`."""
        if proposals == 0 or not self.draft:
            return 0.0
        further = 0 if depth is None else max(0, depth - self.depth)
        asked = min((n for n in self.draft if n >= proposals), default=max(self.draft))
        return self.draft[asked] + self.draft_slope * further

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "rows": {str(n): s for n, s in self.rows.items()},
            "depth": self.depth,
            "slope": {str(n): s for n, s in self.slope.items()},
            "draft": {str(n): s for n, s in self.draft.items()},
            "draft_slope": self.draft_slope,
            "host": self.host,
            "read": self.read,
            "about": dict(self.about),
        }

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> CostCurve:
        """The inverse of `to_dict`. Raises FormatError for anything else."""
        try:
            tables = {name: {int(n): float(s) for n, s in facts.get(name, {}).items()} for name in
                      ("rows", "slope", "draft")}
            return cls(depth=int(facts.get("depth", 0)), draft_slope=float(facts.get("draft_slope", 0)),
                       host=float(facts.get("host", 0)), read=float(facts.get("read", 0)),
                       about=dict(facts.get("about", {})), **tables)
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError(f"a stored cost curve is damaged ({error}): measure it again") from None
