"""Replay many requests at once under any batch policy on any cost grid.

The number of requests is constant: where one ends the next begins, and nobody waits. Each has content
of its own that swings by itself. The policies are the real ones; only the seconds come from the grid.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..structs import Round, Schedule
from .batch import BatchPolicy
from .batch_rate import ByCost
from .grid import PACKED, CostGrid
from .lines import Line
from .simulate import Content, made_up

SEEDS = 1000  # between the seeds of two runs, for the requests of one


@dataclass(frozen=True)
class LoadReplay:
    """A simulation of so many requests, in modelled seconds.

    tokens, rows, drafted: over all requests and rounds. drafted: how often a request was drafted for.
    """

    policy: str
    requests: int
    rounds: int
    tokens: int
    rows: int
    drafted: int
    seconds: float
    packed: int

    @property
    def rate(self) -> float:
        """Tokens per second of all requests."""
        return self.tokens / self.seconds

    @property
    def rows_per_request(self) -> float:
        return self.rows / (self.requests * self.rounds)

    @property
    def tau(self) -> float:
        """Committed tokens per request and round."""
        return self.tokens / (self.requests * self.rounds)

    @property
    def parked(self) -> float:
        """Share of the request-rounds without a draft."""
        return 1 - self.drafted / (self.requests * self.rounds)

    @property
    def packed_share(self) -> float:
        """Share of the rounds that ran packed."""
        return self.packed / self.rounds


def made_up_load(kind: str, requests: int, rounds: int, seed: int, gamma: int = 7) -> list[Content]:
    """Made-up content of each request, independent of the others'."""
    return [made_up(kind, rounds, SEEDS * seed + request, gamma) for request in range(requests)]


def replay_load(policy: BatchPolicy, contents: Sequence[Content], grid: CostGrid) -> LoadReplay:
    """Feed every request's content to a policy, one entry per round (a parked round's entry goes by unseen)."""
    requests, rounds = len(contents), min(map(len, contents))
    confidences = [content.confidences.tolist() for content in contents]
    runs = [np.cumprod(content.passes, axis=1).sum(axis=1).tolist() for content in contents]  # leading passes
    lines = [Line(request, left=sys.maxsize) for request in range(requests)]
    tokens, rows, drafted, seconds, packed = 0, 0, 0, 0.0, 0
    for index in range(rounds):
        seen = [own[index] for own in confidences]
        slots = policy.before(lines)
        reads = policy.reads_confidence and any(slots.values())
        asked = [_asked(line, slots[line.request], own if reads else None)
                 for line, own in zip(lines, seen, strict=True)]
        plan = policy.after(asked)
        ranks = plan.ranked is not None
        if isinstance(policy, ByCost):
            seconds += grid.deciding(requests) * policy.decides
            # The device's part, which costs no read.
            plan = policy.share_out(plan, [_asked(line, slots[line.request], own)
                                           for line, own in zip(lines, seen, strict=True)])
        accepted = [min(own[index], plan.drafts[line.request]) for line, own in zip(lines, runs, strict=True)]
        widths = [plan.drafts[line.request] + 1 for line in lines]
        proposing = [line.proposed for line in asked if line.proposed]
        seconds += (grid.verify(plan.layout, widths) + grid.drafting(len(proposing), max(proposing, default=0))
                    + grid.around(requests) + grid.reading(requests) * reads + grid.ranking(requests) * ranks)
        tokens, rows = tokens + sum(accepted) + requests, rows + sum(widths)
        drafted, packed = drafted + len(proposing), packed + (plan.layout == PACKED)
        policy.learn({
            line.request: landed(index + 1, line.proposed, kept, plan.schedule(line.request),
                                  own if policy.uses_confidence else None)
            for line, kept, own in zip(asked, accepted, seen, strict=True)})
    return LoadReplay(policy.name, requests, rounds, tokens, rows, drafted, seconds, packed)


def fixed_load_rate(width: int, contents: Sequence[Content], grid: CostGrid) -> float:
    """Tokens per second of always verifying `width` drafts of every request (0: plain), without a loop."""
    requests = len(contents)
    kept = [np.cumprod(content.passes[:, :width], axis=1).sum(axis=1).mean() if width else 0.0 for content in contents]
    seconds = (grid.drafting(requests, width) + grid.cheaper([width + 1] * requests)[1] + grid.around(requests))
    return float((sum(kept) + requests) / seconds)


def best_fixed_load(contents: Sequence[Content], grid: CostGrid) -> tuple[int, float]:
    """The best width in hindsight, plain decoding included, and its tokens per second."""
    widths = range(min(contents[0].passes.shape[1], grid.widest - 1) + 1)
    return max(((width, fixed_load_rate(width, contents, grid)) for width in widths), key=lambda pair: pair[1])


def _asked(line: Line, slots: int, confidences: Sequence[float] | None) -> Line:
    return replace(line, proposed=slots, confidences=confidences[:slots] if confidences and slots else None)


def landed(
    index: int, proposed: int, accepted: int, schedule: Schedule, confidences: Sequence[float] | None
) -> Round:
    """A finished round as the loop would hand it back."""
    return Round(index=index, start=0, rows=schedule.drafts + 1, proposed=proposed, drafts=(), accepted=accepted,
                 tokens=(0,) * (accepted + 1), schedule=schedule, seconds={},
                 confidences=tuple(confidences[:proposed]) if confidences and proposed else None)
