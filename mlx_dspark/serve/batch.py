"""The round loop of many requests: propose, schedule, verify, accept, commit, as in `decode.py`.

Every request is a `Run` of its own, judged, committed and cut by the code of the single stream. What is
shared is the work: one block pass of the draft, one verify forward of the target, one host read, and the
decision how many rows each request gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import mlx.core as mx

from ..decode import DecodeOptions, Run, admit, clear_cache, judge, prefill_steps, settle
from ..draft import propose_many
from ..flight import Flight, floats
from ..load import Pair
from ..sampling import make_rule
from ..schedule import Policy
from ..schedule.batch import BatchPolicy
from ..schedule.lines import Line, Plan, Ranked
from ..structs import Round, Sampling, Schedule
from .packed import Shares, forward_many
from .prefix import Hit
from .ranked import share_out


@dataclass(frozen=True)
class Follows:
    """The policy of a request whose rows are decided for the whole batch; so confidences are read for all at once."""

    name: str
    reads_confidence: bool = False
    uses_confidence: bool = False

    def before(self, history: Sequence[Round]) -> int:
        raise AssertionError("the batch decides")

    def after(self, proposed: int, confidences: Sequence[float] | None) -> Schedule:
        raise AssertionError("the batch decides")


class Member:
    """One request in the batch.

    own: the policy it brought along, None where the batch decides. hit: what another request left, to begin behind.
    """

    def __init__(self, number: int, run: Run, prompt: Sequence[int], own: Policy | None, hit: Hit | None = None):
        self.number, self.run, self.own = number, run, own
        if hit is not None:
            run.cache = hit.cache
            if run.draft is not None:
                run.context = hit.state
        self.steps: Iterator[Flight | None] = prefill_steps(run, prompt)


@dataclass(frozen=True)
class Departure:
    """A round of one member on its way to the device and back."""

    member: Member
    flight: Flight


@dataclass(frozen=True)
class Wave:
    """Rounds that were launched together.

    teaching: flights whose confidences the batch's policy learns from. confidences: all of these, int32 by their bits.
    """

    departures: Sequence[Departure]
    teaching: Sequence[Flight] = ()
    confidences: mx.array | None = None

    @property
    def settled(self) -> bool:
        """Whether nothing of it can be rejected."""
        return all(departure.flight.settled for departure in self.departures)


@dataclass(frozen=True)
class Landed:
    """A finished round of one member."""

    member: Member
    round: Round


class Batch:
    """The members that are past their prefill, and the rounds in flight.

    The policy must only plan layouts that the target can run.
    """

    def __init__(self, pair: Pair, policy: BatchPolicy):
        self.pair, self.policy = pair, policy
        self.members: dict[int, Member] = {}
        self.taps = () if pair.draft is None or policy.name == "plain" else pair.draft.taps
        self.generated = 0
        self._flying: list[Wave] = []

    def join(self, member: Member, flight: Flight) -> None:
        """Take in a member whose prefill has been submitted; its first token is read with the next rounds."""
        self.members[member.number] = member
        self._flying.append(Wave([Departure(member, flight)]))

    def leave(self, number: int) -> None:
        """Forget a member; a round of it that is in flight will land unheard."""
        self.members.pop(number, None)

    def clear(self) -> None:
        """Forget everybody, and the rounds in flight."""
        self.members.clear()
        self._flying.clear()

    def step(self) -> list[Landed]:
        """Land the rounds in flight, having started the next ones where that needs no decision of the host."""
        flying, self._flying = self._flying, []
        settled = all(wave.settled for wave in flying)
        if settled:
            self._launch()
        landed = self._land(flying)
        for own in landed:
            if own.round.finish is not None:
                self.leave(own.member.number)
        self.policy.learn({own.member.number: own.round for own in landed})
        if not settled or not self._flying:
            self._launch()
        self.policy.reflect()
        return landed

    def _launch(self) -> None:
        """Start a round of every member that has tokens left."""
        members = [member for member in self.members.values() if member.run.left > 0]
        if not members:
            return
        flights, lines = propose(self, members)
        schedules, plan = schedule(self, members, flights, lines)
        verify(self, members, flights, schedules, plan)
        departures = [Departure(*both) for both in zip(members, flights, strict=True)]
        self._flying.append(Wave(departures, *self._teach(members, flights)))

    def _teach(self, members: Sequence[Member], flights: Sequence[Flight]) -> tuple[Sequence[Flight], mx.array | None]:
        """Start on the confidences that the policy will learn from, of those that were not read before."""
        unread = [flight for member, flight in zip(members, flights, strict=True)
                  if member.own is None and flight.proposed and flight.confidences is None]
        if not unread or not self.policy.uses_confidence:
            return (), None
        confidences = mx.view(_confidences(unread), mx.int32)
        mx.async_eval(confidences)
        return unread, confidences

    def _land(self, flying: Sequence[Wave]) -> list[Landed]:
        """One host read for all; members that left meanwhile are passed over."""
        if not flying:
            return []
        departures = [departure for wave in flying for departure in wave.departures]
        taught = [wave for wave in flying if wave.confidences is not None]
        numbers = _read([departure.flight.packed for departure in departures] + [wave.confidences for wave in taught])
        for wave, bits in zip(taught, numbers[len(departures) :], strict=True):
            _hand_out(floats(bits), wave.teaching)
        landed = [Landed(departure.member, settle(departure.member.run, departure.flight, own))
                  for departure, own in zip(departures, numbers, strict=False)
                  if self.members.get(departure.member.number) is departure.member]
        clear_cache(self, sum(len(own.round.tokens) for own in landed))
        return landed


def join_at_once(
    batch: Batch, number: int, prompt: Sequence[int], max_tokens: int | None = None,
    begin: Callable[[Run], None] = lambda run: None,
) -> None:
    """Run the whole prompt of a greedy request and take it in; for measurements, where nobody waits meanwhile.

    begin: what is done to the request's state before.
    """
    options = DecodeOptions(make_rule(Sampling()), Follows(batch.policy.name), max_tokens)
    member = Member(number, Run(batch.pair, prompt, options), prompt, None)
    begin(member.run)
    *_, flight = member.steps
    batch.join(member, flight)


def propose(batch: Batch, members: Sequence[Member]) -> tuple[list[Flight], list[Line]]:
    """Ask who drafts how many tokens, and the draft for all of them at once."""
    lines = [_line(member) for member in members]
    slots = batch.policy.before(lines)
    started = [member.run.new_flight() for member in members]
    flights = [flight for flight, _ in started]
    for line, flight in zip(lines, flights, strict=True):
        flight.proposed = min(slots[line.request], line.left)
    drafting = [(member.run, flight, key) for member, (flight, key) in zip(members, started, strict=True)
                if flight.proposed > 0]
    if drafting:
        runs = [run for run, _, _ in drafting]
        proposals = propose_many(
            batch.pair.draft, [run.context for run in runs], mx.concatenate([run.anchor for run in runs]),
            [flight.proposed for _, flight, _ in drafting],
            [run.rule.picker(run.seen, key, flight.proposed) for run, flight, key in drafting],
        )
        for (_, flight, _), proposal in zip(drafting, proposals, strict=True):
            flight.proposal = proposal
        mx.async_eval([proposal.tokens for proposal in proposals])
    lines = [replace(line, proposed=flight.proposed) for line, flight in zip(lines, flights, strict=True)]
    return flights, lines


def schedule(
    batch: Batch, members: Sequence[Member], flights: Sequence[Flight], lines: Sequence[Line]
) -> tuple[list[Schedule], Plan]:
    """Share out the rows: each request's part, and the plan for all.

    Confidences are read, all at once, where somebody on the host decides by them now.
    """
    _read_confidences([
        flight for member, flight in zip(members, flights, strict=True)
        if flight.proposed and (batch.policy if member.own is None else member.own).reads_confidence
    ])
    own = [None if member.own is None else member.own.after(flight.proposed, flight.confidences)
           for member, flight in zip(members, flights, strict=True)]
    plan = batch.policy.after([
        replace(line, confidences=flight.confidences, fixed=None if mine is None else mine.drafts)
        for line, flight, mine in zip(lines, flights, own, strict=True)
    ])
    return [plan.schedule(member.number) if mine is None else mine
            for member, mine in zip(members, own, strict=True)], plan


def verify(
    batch: Batch, members: Sequence[Member], flights: Sequence[Flight], schedules: Sequence[Schedule], plan: Plan
) -> None:
    """Run every anchor with its admitted drafts through the target, and judge them one request at a time."""
    for member, flight, own in zip(members, flights, schedules, strict=True):
        admit(member.run, flight, own)
    shares = None if plan.ranked is None else _rank(members, flights, plan.ranked)
    verified = forward_many(batch.pair.target, [flight.inputs for flight in flights],
                            [member.run.cache for member in members], batch.taps, plan.layout, shares)
    for member, flight, logits in zip(members, flights, verified, strict=True):
        judge(member.run, flight, logits)


def _rank(members: Sequence[Member], flights: Sequence[Flight], ranked: Ranked) -> Shares:
    """Let the device choose the best of the drafts that are lined up; the host will read how many they were."""
    by_number = {member.number: flight for member, flight in zip(members, flights, strict=True)}
    chosen = [by_number[request] for request in ranked.requests]
    drafts = share_out([flight.proposal.confidence_logits for flight in chosen], ranked)
    for b, flight in enumerate(chosen):
        flight.limit = drafts[b : b + 1]
    rows = [flight.limit if flight.limit is not None else mx.array([flight.schedule.drafts], dtype=mx.int32)
            for flight in flights]
    fixed = sum(flight.schedule.drafts for flight in flights if flight.limit is None)
    return Shares(mx.concatenate(rows) + 1, len(flights) + fixed + ranked.further)


def _line(member: Member) -> Line:
    run = member.run
    left = int(min(run.most_drafts(), run.draft.gamma if run.draft is not None else 0))
    fixed = None if member.own is None else min(member.own.before(run.history), left)
    return Line(member.number, left, run.cache.offset, fixed=fixed)


def _read_confidences(flights: Sequence[Flight]) -> None:
    """Give every flight its own."""
    if flights:
        _hand_out(_confidences(flights).tolist(), flights)


def _confidences(flights: Sequence[Flight]) -> mx.array:
    """c_1..c_n of every flight, one behind the other."""
    return mx.sigmoid(mx.concatenate([flight.proposal.confidence_logits for flight in flights], axis=1))[0]


def _hand_out(confidences: Sequence[float], flights: Sequence[Flight]) -> None:
    """To every flight its own."""
    rest = iter(confidences)
    for flight in flights:
        flight.confidences = tuple(islice(rest, flight.proposed))


def _read(vectors: Sequence[mx.array]) -> list[list[Any]]:
    """Vectors of one dtype on the host, by one read."""
    numbers, first = mx.concatenate(list(vectors)).tolist(), 0
    parts = []
    for vector in vectors:
        parts.append(numbers[first : first + vector.size])
        first += vector.size
    return parts
