"""What a run did, in numbers: kept while it streams, printed at its end."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .structs import Round


@dataclass
class Statistics:
    """Running totals of one generation. Rounds with rows = 0 (the prefill) do not count in tau.

    prefill_seconds: until the first token was read; decode_seconds: from there on.
    part_seconds: host seconds by part of the round. `wait` is where the device's work shows, unless
        the run was made with synchronised timing.
    """

    prompt_tokens: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    generated_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    round_tokens: int = 0
    parked: int = 0
    rows: Counter[int] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    part_seconds: Counter[str] = field(default_factory=Counter)
    peak_memory_bytes: int = 0

    def add(self, landed: Round) -> None:
        """Count one round."""
        self.generated_tokens += len(landed.tokens)
        if landed.rows == 0:
            return
        self.rounds += 1
        self.drafted += landed.proposed
        self.verified += len(landed.drafts)
        self.accepted += landed.accepted
        self.round_tokens += len(landed.tokens)
        self.rows[landed.rows] += 1
        self.parked += not landed.proposed
        self.reasons[_kind(landed.schedule.reason)] += 1
        self.part_seconds.update(landed.seconds)

    @property
    def tau(self) -> float | None:
        """Committed tokens per round, bonus included; None before the first round."""
        return self.round_tokens / self.rounds if self.rounds else None

    @property
    def prefill_tps(self) -> float | None:
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else None

    @property
    def decode_tps(self) -> float | None:
        """Tokens per second after the first one."""
        return (self.generated_tokens - 1) / self.decode_seconds if self.decode_seconds and self.rounds else None

    def to_dict(self) -> dict[str, Any]:
        """The `stats` object of `--json`."""
        return {
            "tau": _rounded(self.tau, 4),
            "rounds": self.rounds,
            "drafted": self.drafted,
            "verified": self.verified,
            "accepted": self.accepted,
            "rows": sum(rows * count for rows, count in self.rows.items()),
            "rows_histogram": {str(rows): self.rows[rows] for rows in sorted(self.rows)},
            "parked_share": _rounded(self.parked / self.rounds, 4) if self.rounds else None,
            "reasons": dict(self.reasons.most_common()),
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "prefill_seconds": _rounded(self.prefill_seconds, 6),
            "decode_seconds": _rounded(self.decode_seconds, 6),
            "prefill_tps": _rounded(self.prefill_tps, 2),
            "decode_tps": _rounded(self.decode_tps, 2),
            "ms_per_round": self.ms_per_round(),
            "peak_memory_gb": round(self.peak_memory_bytes / 1e9, 4),
            **self.facts,
        }

    def ms_per_round(self) -> dict[str, float]:
        """Milliseconds per round by part."""
        return {part: round(1e3 * s / self.rounds, 3) for part, s in self.part_seconds.items()} if self.rounds else {}

    def summary(self) -> str:
        """The compact block for a terminal."""
        draft = "no rounds"
        if self.rounds:
            draft = (f"tau {self.tau:.2f} over {self.rounds} rounds; drafted {self.drafted}, "
                     f"accepted {self.accepted}, rows {sum(r * n for r, n in self.rows.items())}")
        parts = ", ".join(f"{part} {ms:.2f}" for part, ms in self.ms_per_round().items())
        speed = [f"decode {self.decode_tps:.1f} tokens/s" if self.decode_tps else None,
                 f"prefill {self.prefill_tps:.1f} tokens/s ({self.prompt_tokens} tokens)" if self.prefill_tps else None,
                 f"peak memory {self.peak_memory_bytes / 1e9:.2f} GB"]
        shown = ("policy", "costs", "calibration", "dtype", "device", "blas", "certified_share", "seed")
        where = ", ".join(f"{key} {self.facts[key]}" for key in shown if self.facts.get(key) is not None)
        lines = [draft, self._decisions(), "; ".join(part for part in speed if part),
                 f"ms per round: {parts}" if parts else "", where]
        return "\n".join(line for line in lines if line)

    def _decisions(self) -> str:
        """How many rounds ran how many rows, how often drafting was parked, and the commonest reasons."""
        if not self.rounds or not self.drafted:
            return ""
        histogram = " ".join(f"{rows}:{self.rows[rows]}" for rows in sorted(self.rows))
        reasons = ", ".join(f"{reason} ({count})" for reason, count in self.reasons.most_common(3))
        return f"rounds by rows {histogram}; parked {self.parked / self.rounds:.0%}; {reasons}"


def _kind(reason: str) -> str:
    """A reason without its numbers, so that equal ones are counted together."""
    return re.sub(r"\d+(\.\d+)?", "n", reason)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
