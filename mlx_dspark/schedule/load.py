"""Replay many requests at once under any batch policy on any cost grid.

The number of requests is constant, and nobody waits. Each has a text of its own, whose content swings by itself and
waits: a round begins where the last one of the request has ended, and a text that is through begins anew. So passages
that are hard to draft for take most of the rounds, as in life. The policies are the real ones; only the seconds come
from the grid.
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

STAY = 60  # mean tokens between two switches of swinging content
SEEDS = 1000  # between the seeds of two runs, for the requests of one


@dataclass(frozen=True)
class LoadReplay:
    """A simulation of so many requests, in modelled seconds.

    tokens, rows, drafted: over all requests and rounds. drafted: how often a request was drafted for. promised: tokens
    by the confidences of what was verified, which are right on average in made-up content.
    """

    policy: str
    requests: int
    rounds: int
    tokens: int
    rows: int
    drafted: int
    seconds: float
    packed: int
    promised: float

    @property
    def rate(self) -> float:
        """Tokens per second of all requests."""
        return self.tokens / self.seconds

    @property
    def promised_rate(self) -> float:
        """The same without the chance of the draws, for comparisons on made-up content."""
        return self.promised / self.seconds

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
    """A made-up text of each request, as many tokens as rounds, independent of the others'."""
    return [made_up(kind, rounds, SEEDS * seed + request, gamma, STAY) for request in range(requests)]


def replay_load(policy: BatchPolicy, contents: Sequence[Content], grid: CostGrid) -> LoadReplay:
    """Decode every request's text under a policy, for as many rounds as the shortest has tokens."""
    requests, rounds = len(contents), min(map(len, contents))
    places = [0] * requests
    confidences = [content.confidences.tolist() for content in contents]
    runs = [np.cumprod(content.passes, axis=1).sum(axis=1).tolist() for content in contents]  # leading passes
    lines = [Line(request, left=sys.maxsize, depth=grid.depth) for request in range(requests)]
    promises = [_promised(content) for content in contents]
    tokens, rows, drafted, seconds, packed, promised = 0, 0, 0, 0.0, 0, 0.0
    for index in range(rounds):
        seen = [own[place % len(own)] for own, place in zip(confidences, places, strict=True)]
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
        accepted = [min(own[place % len(own)], plan.drafts[line.request])
                    for line, own, place in zip(lines, runs, places, strict=True)]
        widths = [plan.drafts[line.request] + 1 for line in lines]
        proposing = [line.proposed for line in asked if line.proposed]
        seconds += (grid.verify(plan.layout, widths)
                    + grid.drafting(len(proposing), max(proposing, default=0), requests)
                    + grid.around(requests) + grid.reading(requests) * reads + grid.ranking(requests) * ranks)
        promised += sum(own[place % len(own)][plan.drafts[line.request]]
                        for line, own, place in zip(lines, promises, places, strict=True))
        places = [place + kept + 1 for place, kept in zip(places, accepted, strict=True)]
        tokens, rows = tokens + sum(accepted) + requests, rows + sum(widths)
        drafted, packed = drafted + len(proposing), packed + (plan.layout == PACKED)
        policy.reflect()
        policy.learn({
            line.request: landed(index + 1, line.proposed, kept, plan.schedule(line.request),
                                 own if policy.uses_confidence else None, grid.depth)
            for line, kept, own in zip(asked, accepted, seen, strict=True)})
    return LoadReplay(policy.name, requests, rounds, tokens, rows, drafted, seconds, packed, promised)


def fixed_load(width: int, contents: Sequence[Content], grid: CostGrid) -> LoadReplay:
    """Always verifying `width` drafts of every request (0: plain decoding), without a policy."""
    requests, rounds = len(contents), min(map(len, contents))
    tokens, promised = 0, 0.0
    for content in contents:
        runs = np.cumprod(content.passes[:, :width], axis=1).sum(axis=1).tolist()
        promises, place = _promised(content), 0
        for _ in range(rounds):
            promised += promises[place % len(runs)][width]
            place += runs[place % len(runs)] + 1
        tokens += place
    layout, verify = grid.cheaper([width + 1] * requests)
    seconds = grid.drafting(requests, width) + verify + grid.around(requests)
    return LoadReplay(f"fixed:{width}" if width else "plain", requests, rounds, tokens, rounds * requests * (width + 1),
                      rounds * requests * bool(width), rounds * seconds, rounds * (layout == PACKED), promised)


def best_fixed_load(contents: Sequence[Content], grid: CostGrid, least: int = 0) -> LoadReplay:
    """Of all widths from `least` on, in hindsight, the one that is promised most tokens per second."""
    widths = range(least, min(contents[0].passes.shape[1], grid.widest - 1) + 1)
    return max((fixed_load(width, contents, grid) for width in widths), key=lambda run: run.promised_rate)


def _promised(content: Content) -> list[list[float]]:
    """Tokens of a round on average, by where it begins and how many drafts are verified."""
    survivals = np.cumprod(content.confidences, axis=1)
    tokens: list[list[float]] = np.cumsum(np.pad(survivals, [(0, 0), (1, 0)], constant_values=1.0), axis=1).tolist()
    return tokens


def _asked(line: Line, slots: int, confidences: Sequence[float] | None) -> Line:
    return replace(line, proposed=slots, confidences=confidences[:slots] if confidences and slots else None)


def landed(
    index: int, proposed: int, accepted: int, schedule: Schedule, confidences: Sequence[float] | None, depth: int = 0
) -> Round:
    """A finished round as the loop would hand it back; depth: positions behind it."""
    return Round(index=index, start=max(0, depth - accepted - 1), rows=schedule.drafts + 1, proposed=proposed,
                 drafts=(), accepted=accepted, tokens=(0,) * (accepted + 1), schedule=schedule, seconds={},
                 confidences=tuple(confidences[:proposed]) if confidences and proposed else None)
