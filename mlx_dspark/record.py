"""Recorded rounds (the JSON lines of `generate --record`), as content for a replay.

What a recorded round tells: drafts 1..accepted passed, and the one after them failed if it was verified.
Slots behind that failure are never reached, however wide a policy verifies, so they need no outcome. A
round that accepted all it verified, or that a stop cut short, leaves its further slots unknown: they
pass by chance, with their own confidence and a fixed seed. Rounds drafted at less than the widest
proposal of the file have no confidences there and are left out, so record with `--policy fixed`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import FormatError
from .structs import Round, Schedule

if TYPE_CHECKING:
    from .schedule.rate import Calibrate
    from .schedule.simulate import Content


def judged(drafts: int, accepted: int, tokens: int) -> int:
    """How many drafts of a round have a known outcome: all verified ones, or those kept when a stop cut the round.

    A complete round commits one token more than it accepts; a cut one ends inside its accepted run.
    """
    return drafts if tokens > accepted else accepted


def round_from(row: Mapping[str, Any]) -> Round:
    """The round of a record's line, as far as it is kept there. Raises KeyError, TypeError or ValueError."""
    drafts, confidences, logprobs = tuple(row["drafts"]), row["confidences"], row["logprobs"]
    tops = row.get("top_logprobs")  # older records have none
    accepted = int(row["accepted"])
    if not 0 <= accepted <= len(drafts) <= row["proposed"] or not all(0 <= c <= 1 for c in confidences or ()):
        raise ValueError("drafts, accepted and confidences do not fit together")
    return Round(
        index=int(row["index"]), start=int(row["start"]), rows=int(row["rows"]), proposed=int(row["proposed"]),
        drafts=drafts, accepted=accepted, tokens=tuple(row["tokens"]),
        schedule=Schedule(len(drafts), row["policy"], row["reason"]),
        seconds={part: ms / 1e3 for part, ms in row["ms"].items()},
        logprobs=None if logprobs is None else tuple(logprobs),
        top_logprobs=None if tops is None else tuple(tuple((token, value) for token, value in best) for best in tops),
        confidences=None if confidences is None else tuple(map(float, confidences)), finish=row["finish"],
    )


@dataclass(frozen=True)
class Recording:
    """Rounds of a record file: confidences [rounds, gamma], and by round how many passed and how many are judged."""

    confidences: Sequence[Sequence[float]]
    accepted: Sequence[int]
    judged: Sequence[int]
    left_out: int

    def content(self, seed: int, calibrate: Calibrate = tuple) -> Content:
        """The rounds for a replay; unknown outcomes are drawn (see the module's text)."""
        import numpy as np

        from .schedule.simulate import Content

        confidences = np.array(self.confidences)
        chance = np.array([calibrate(row) for row in self.confidences])
        drawn = np.random.default_rng(seed).random(chance.shape) < chance
        slots = np.arange(confidences.shape[1])
        passed = slots < np.array(self.accepted)[:, None]
        known = (slots < np.array(self.judged)[:, None]) | passed
        return Content(confidences, np.where(known, passed, drawn))


def read_recording(path: Path) -> Recording:
    """Read what `generate --record` wrote. Raises FormatError with the line for anything else."""
    rounds = [landed for landed in _drafted_rounds(path) if landed[0]]
    widest = max((len(confidences) for confidences, _, _ in rounds), default=0)
    kept = [landed for landed in rounds if len(landed[0]) == widest]
    if not kept:
        raise FormatError(f"{path} holds no round with confidences: record with generate --policy fixed --record FILE "
                          "and a draft that has a confidence head")
    confidences, accepted, known = zip(*kept, strict=True)
    return Recording(confidences, accepted, known, len(rounds) - len(kept))


def _drafted_rounds(path: Path) -> Iterator[tuple[tuple[float, ...], int, int]]:
    """(confidences, accepted, judged) of each round that drafted."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise FormatError(f"{path} is not UTF-8 text: give a file written by generate --record") from None
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line) if line.strip() else {"run": {}}
            if "run" in row or not row["proposed"]:
                continue
            drafts, accepted, tokens = len(row["drafts"]), int(row["accepted"]), len(row["tokens"])
            confidences = tuple(float(c) for c in row["confidences"] or ())
            if not 0 <= accepted <= drafts <= row["proposed"] or not all(0 <= c <= 1 for c in confidences):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise FormatError(f"{path}, line {number}: not a round as generate --record writes it: record it again"
                              ) from None
        yield confidences, accepted, judged(drafts, accepted, tokens)
