"""How much of what a draft proposes the target keeps, from finished rounds.

The definitions are those of DeepSeek's evaluation code, so that numbers can be compared, and Figure 2 of
the paper for the conditional acceptance. Rounds without rows (the prefill) count nowhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .record import judged
from .structs import Round


@dataclass(frozen=True)
class Acceptance:
    """Counts over rounds. [k] of a tuple is slot k + 1.

    committed: tokens, bonus or correction included. proposed_at: rounds whose proposal reached the slot,
    where one that a stop token cut ends at that token. accepted_at: rounds that kept the slot.
    reached_at: rounds that proposed the slot and kept every slot before it.
    """

    rounds: int
    committed: int
    proposed_at: tuple[int, ...]
    accepted_at: tuple[int, ...]
    reached_at: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """tau: committed tokens per round, the target's own included; 0 without rounds."""
        return self.committed / self.rounds if self.rounds else 0.0

    @property
    def draft_tokens_per_proposal(self) -> float:
        """Verified drafts per round."""
        return sum(self.proposed_at) / self.rounds if self.rounds else 0.0

    @property
    def verify_rate(self) -> float:
        """Committed tokens per verified row (drafts and anchors)."""
        return self.committed / (sum(self.proposed_at) + self.rounds) if self.rounds else 0.0

    @property
    def survival(self) -> tuple[float | None, ...]:
        """Share of the proposals that reach a slot which keep everything up to it; None where none reaches it."""
        return _shares(self.accepted_at, self.proposed_at)

    @property
    def conditional(self) -> tuple[float | None, ...]:
        """Share that keeps a slot among those that proposed it and kept all slots before it (paper, Figure 2)."""
        return _shares(self.accepted_at, self.reached_at)

    def to_dict(self) -> dict[str, Any]:
        """As JSON, under the names of DeepSeek's evaluation code."""
        return {
            "rounds": self.rounds,
            "committed": self.committed,
            "acceptance_length": round(self.acceptance_length, 6),
            "draft_tokens_per_proposal": round(self.draft_tokens_per_proposal, 6),
            "verify_rate": round(self.verify_rate, 6),
            "accept_rates_by_position": _rounded(self.survival),
            "conditional_acceptance_by_position": _rounded(self.conditional),
            "proposed_by_position": list(self.proposed_at),
            "accepted_by_position": list(self.accepted_at),
        }


def acceptance(rounds: Iterable[Round], gamma: int) -> Acceptance:
    """Count rounds of a draft that proposes at most `gamma` tokens."""
    counted = committed = 0
    proposed_at, accepted_at, reached_at = [0] * gamma, [0] * gamma, [0] * gamma
    for landed in rounds:
        if landed.rows == 0:
            continue
        counted += 1
        committed += len(landed.tokens)
        for slot in range(judged(len(landed.drafts), landed.accepted, len(landed.tokens))):
            proposed_at[slot] += 1
            accepted_at[slot] += landed.accepted > slot
            reached_at[slot] += landed.accepted >= slot
    return Acceptance(counted, committed, tuple(proposed_at), tuple(accepted_at), tuple(reached_at))


def cut_at(rounds: Sequence[Round], threshold: float) -> tuple[Round, ...] | None:
    """What greedy decoding under `threshold:X` would have done, from rounds that verified the whole block.

    Exact where no round would have cut off a draft that it kept: the tokens, so the anchors and the
    proposals, are then the same, and only rejected drafts go unverified. None where that is not so.
    """
    found = []
    for landed in rounds:
        confidences = (landed.confidences or ())[: len(landed.drafts)]
        kept = next((slot for slot, c in enumerate(confidences) if c < threshold), len(landed.drafts))
        if kept < landed.accepted:
            return None
        found.append(dataclasses.replace(landed, drafts=landed.drafts[:kept],
                                         rows=kept + 1 if landed.rows else 0))
    return tuple(found)


def _shares(parts: Sequence[int], wholes: Sequence[int]) -> tuple[float | None, ...]:
    return tuple(part / whole if whole else None for part, whole in zip(parts, wholes, strict=True))


def _rounded(values: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 6) for value in values]
