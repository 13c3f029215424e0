"""The two questions a round asks, and the policies that answer them from fixed rules.

`before(history)` is asked before the draft runs: how many tokens to draft, from past rounds only.
`after(proposed, confidences)` is asked once the drafts exist: how many of them to verify. A policy
may look at c_1..c_j to admit slot j, because c_j is computed from x_{j-1}; it is never shown a draft
token, so it cannot bias what it admits (paper, appendix A).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ..structs import Round, Schedule
from .auto import Auto
from .cost import CostCurve
from .paper import Lagged, Paper
from .rate import Calibrate, Lookahead


class Reads(Protocol):
    """What a loop must know of a policy before it asks anything."""

    @property
    def name(self) -> str:
        """As the user wrote it."""

    @property
    def reads_confidence(self) -> bool:
        """`after` wants the confidences of this round, which costs one more host read; asked after `before`."""

    @property
    def uses_confidence(self) -> bool:
        """This round must carry its confidences when it is finished (they come with the one host read); asked after
        `after`."""


class Policy(Reads, Protocol):
    """What the round loop needs to know."""

    def before(self, history: Sequence[Round]) -> int:
        """How many tokens to draft; 0 verifies the anchor alone. A round still in flight is not in `history`."""

    def after(self, proposed: int, confidences: Sequence[float] | None) -> Schedule:
        """How many of the `proposed` drafts to verify."""


@dataclass(frozen=True)
class Plain:
    """No drafting: ordinary decoding through the same loop."""

    name: str = "plain"
    reads_confidence: bool = False
    uses_confidence: bool = False

    def before(self, history: Sequence[Round]) -> int:
        return 0

    def after(self, proposed: int, confidences: Sequence[float] | None) -> Schedule:
        return Schedule(0, self.name, "no draft asked")


@dataclass(frozen=True)
class Fixed:
    """Always draft and verify `width` tokens."""

    width: int
    name: str
    reads_confidence: bool = False
    uses_confidence: bool = False

    def before(self, history: Sequence[Round]) -> int:
        return self.width

    def after(self, proposed: int, confidences: Sequence[float] | None) -> Schedule:
        return Schedule(proposed, self.name, "fixed width" if proposed == self.width else "cut to what is left")


@dataclass(frozen=True)
class Threshold:
    """Verify up to the first slot whose confidence is below `level` (per slot, not the product)."""

    level: float
    width: int
    name: str
    reads_confidence: bool = True
    uses_confidence: bool = True

    def before(self, history: Sequence[Round]) -> int:
        return self.width

    def after(self, proposed: int, confidences: Sequence[float] | None) -> Schedule:
        if confidences is None:  # nothing was drafted
            return Schedule(0, self.name, "no draft asked")
        for slot, confidence in enumerate(confidences[:proposed]):
            if confidence < self.level:
                return Schedule(slot, self.name, f"c_{slot + 1} = {confidence:.2f} < {self.level:g}")
        return Schedule(proposed, self.name, "every confidence passed")


def needs_costs(text: str | None, gamma: int, has_confidence: bool) -> bool:
    """Whether the policy of this name (None: the default) decides by a cost curve."""
    return bool(gamma) and has_confidence and (text is None or text in _BY_RATE)


def make_policy(
    text: str | None, gamma: int, has_confidence: bool, curve: CostCurve | None = None, calibrate: Calibrate = tuple
) -> Policy:
    """Build a policy from its name.

    text: plain, fixed (the whole block), fixed:N, threshold:X, paper, lagged, rate, lookahead or auto; None
        is auto where there is a cost curve and a confidence head, else fixed, and plain without a draft.
    gamma: the draft's proposals per round, 0 without a draft. curve: the machine's costs, which all but the
        first four need. calibrate: raw confidences to probabilities.

    Raises ValueError for an unknown name, a value out of range, or something that is missing.
    """
    if text is None:
        text = "plain" if not gamma else "auto" if curve and has_confidence else "fixed"
    name, _, value = text.partition(":")
    if name == "plain" and not value:
        return Plain()
    known = name in ("fixed", "threshold") or text in _BY_RATE
    if known and gamma == 0:
        raise ValueError(f"policy {text!r} needs a draft and there is none: give --draft, or use --policy plain")
    if name == "fixed":
        return Fixed(_width(text, value, gamma), text)
    if name == "threshold" and (level := _level(text, value)) <= 0:  # every confidence passes: do not read them
        return Fixed(gamma, text)
    if not known:
        raise ValueError(f"unknown policy {text!r}: use plain, fixed:N, threshold:X, {', '.join(_BY_RATE)}")
    if not has_confidence:
        raise ValueError(f"policy {text!r} needs a confidence head and this draft has none: use fixed:{gamma}")
    if name == "threshold":
        return Threshold(level, gamma, text)
    if curve is None:
        raise ValueError(f"policy {text!r} needs the costs of this machine: leave --no-profile out, or use fixed:N")
    return _BY_RATE[text](text, gamma, curve, calibrate)


_BY_RATE: dict[str, Callable[[str, int, CostCurve, Calibrate], Policy]] = {
    "paper": Paper,
    "lagged": Lagged,
    "rate": partial(Lookahead, horizon=0),
    "lookahead": Lookahead,
    "auto": Auto,
}


def _width(text: str, value: str, gamma: int) -> int:
    if not value:
        return gamma
    if not value.isdecimal() or not 1 <= int(value) <= gamma:
        raise ValueError(f"policy {text!r}: the width must be 1 to {gamma}, the draft's block")
    return int(value)


def _level(text: str, value: str) -> float:
    try:
        level = float(value)
    except ValueError:
        level = math.nan
    if not 0 <= level <= 1:
        raise ValueError(f"policy {text!r}: the level must be 0 to 1, as in threshold:0.5")
    return level
