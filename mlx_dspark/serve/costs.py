"""Measure what rounds of several requests cost here: `python -m mlx_dspark.profile --requests 1,2,4,8`.

For every count of requests both layouts are timed over synthetic caches: packed by rows of all requests
together (dealt out evenly), rectangular by rows of each. The more requests, the coarser the rows: about thirty
points each, and what lies between them is priced like the next larger one.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx

from ..decode import Run
from ..draft import propose_many
from ..profile import REPEATS, Timing, evened, timed, timing_of
from ..sampling import make_rule
from ..schedule.batch import BatchFixed
from ..schedule.batch_auto import BatchAuto
from ..schedule.cost import CostCurve
from ..schedule.grid import PACKED, RECTANGULAR, CostGrid
from ..schedule.lines import Line, Plan, Ranked
from ..structs import KVOptions, Round, Sampling
from .batch import Batch, join_at_once
from .packed import LAYOUTS, forward_many, layouts_of

if TYPE_CHECKING:
    from ..cache import TargetCache
    from ..load import Pair

# Positions. Prices below NEAR are those of NEAR, and at FAR all requests are that deep at once: their caches must fit.
NEAR, FAR = 256, 2048
SHORT_SECONDS = 2.0  # of model time for one count of requests
DRAFT = "draft"
LOOP_ROUNDS = 128
LOOP_TEXT = 16  # rounds after which the texts of the loop begin anew, so that none is much deeper than the others
SURE = 5  # errors by which a layout must be cheaper
REACH = 2  # neighbours on either side whose line says where a timing should be
PROMPT = (0,) * (NEAR + 8)  # of the rounds of the loop; all but the end of it is made up


class Forwards(Protocol):
    """Several requests at one depth, as they are timed."""

    @property
    def layouts(self) -> Sequence[str]:
        """Those that can be run."""

    @property
    def slots(self) -> int:
        """Of the draft, 0 without one."""

    def verify(self, layout: str, rows: Sequence[int]) -> None:
        """Run one verify forward, these rows of each request, and wait for it; the requests stay where they are."""

    def propose(self, slots: int) -> None:
        """Run one batched proposal and wait for it."""


@dataclass(frozen=True)
class Measured:
    """Timings of one count of requests at one depth, by what was run and its count of rows or slots."""

    times: Mapping[str, Mapping[int, Timing]]

    def seconds(self, what: str) -> dict[int, float]:
        """By count, without what noise explains."""
        return evened(drawn(self.times[what]))

    def slopes(self, near: Measured, what: str, positions: int) -> dict[int, float]:
        """Seconds more per position, this being measured so many positions deeper than `near`.

        One for all proposals: their slots attend together, so how many they are hardly matters.
        """
        shallow = near.times[what]
        found = {n: max(0.0, (self.times[what][n].median - shallow[n].median) / positions) for n in shallow}
        return dict.fromkeys(found, statistics.fmean(found.values())) if what == DRAFT else found


def measure_grid(
    begin: Callable[[int, int], Forwards], requests: Sequence[int], depths: tuple[int, int], curve: CostCurve,
    short: bool = False, progress: Callable[[str], None] = lambda text: None,
) -> CostGrid:
    """The cost grid of a machine.

    begin(requests, depth): what is timed. requests: the counts. depths: near and far; `short` measures near only,
    fewer rows, and as often as two seconds allow. curve: of one request, for host and read.
    """
    near, far = depths
    tables: dict[str, dict[tuple[int, int], float]] = {}
    errors: dict[int, float] = {}
    for count in sorted(set(requests)):
        at_near = _measure(begin(count, near), count, short, progress)
        at_far = None if short or far <= near else _measure(begin(count, far), count, short, progress)
        errors[count] = max(_usual_error(at_near.times.get(layout, {})) for layout in LAYOUTS)
        for what in at_near.times:
            for rows, seconds in at_near.seconds(what).items():
                tables.setdefault(what, {})[count, rows] = seconds
        for what in at_near.times if at_far else ():
            for rows, slope in at_far.slopes(at_near, what, far - near).items():
                tables.setdefault(f"{what}_slope", {})[count, rows] = slope
    about = {**curve.about, "measured": time.strftime("%Y-%m-%d %H:%M:%S"), "short": short}
    grid = CostGrid(
        tables[PACKED], tables.get(RECTANGULAR, {}), near, tables.get(f"{PACKED}_slope", {}),
        tables.get(f"{RECTANGULAR}_slope", {}), tables.get(DRAFT, {}), tables.get(f"{DRAFT}_slope", {}),
        host=curve.host, read=curve.read, about=about)
    return grid if _has_use_for_rectangles(grid, errors) else grid.only(PACKED)


def _has_use_for_rectangles(grid: CostGrid, errors: Mapping[int, float]) -> bool:
    """Whether they are somewhere cheaper by more than noise explains; else noise would choose between the layouts."""
    return RECTANGULAR in grid.layouts and any(
        grid.verify(PACKED, [width] * count) - grid.verify(RECTANGULAR, [width] * count) > SURE * errors[count]
        for count in errors for width in range(1, grid.widest + 1))


@dataclass(frozen=True)
class Around:
    """Rounds of so many requests in the real loop, in seconds.

    host: what a plain one takes beside its forward. surplus: by slots, what proposing and verifying so many of each
    adds to a plain one. further: what proposing whole blocks adds to proposing one slot of each, one being verified.
    read: what a look at the confidences adds to a drafting round. rank: what the device's sharing out of half the rows
    adds to a round with as many. part: what a proposal for half of the requests takes over one for all, 0 where it was
    not measured. decide: what `auto` adds by working out a decision, which is then not followed.
    """

    host: float
    surplus: Mapping[int, float] = field(default_factory=dict)
    further: float = 0.0
    read: float = 0.0
    rank: float = 0.0
    decide: float = 0.0
    part: float = 0.0


def measure_around(pair: Pair, requests: int, grid: CostGrid, short: bool = False) -> Around:
    """Time rounds of all these kinds by turns, in seconds of the grid. grid: what decisions go by."""
    gamma = 0 if pair.draft is None else pair.draft.gamma
    policies: dict[Any, BatchFixed] = {"plain": BatchFixed(0, "plain")}
    widths = range(1, gamma + 1)
    policies |= {width: BatchFixed(width, "fixed") for width in widths}
    if gamma:
        policies["wide"] = _First(gamma, "fixed")
    if gamma and requests > 1:
        policies["part"] = _Part(gamma, "fixed")
    if gamma and pair.draft.has_confidence:
        policies["looked"] = BatchFixed(gamma, "fixed", reads_confidence=True)
        policies["half"] = _Half(gamma, "fixed")
        policies["ranked"] = _Ranked(gamma, "fixed")
        policies["decided"] = _Decided(gamma, "fixed", uses_confidence=True, decides=BatchAuto("auto", gamma, grid))
    forward = partial(Together(pair, requests, NEAR).verify, PACKED, [1] * requests)
    seconds = _by_turns({"forward": lambda: forward} | {
        name: partial(_rounds, pair, requests, policy) for name, policy in policies.items()
    }, SHORT_SECONDS if short else None)

    # The grid was measured minutes before, when the machine may have been slower or faster.
    unit = grid.packed[requests, requests] / statistics.median(seconds["forward"])

    def more(one: Any, other: Any) -> float:
        return max(0.0, unit * seconds_more(seconds[one], seconds[other]).median) if one in seconds else 0.0

    surplus = drawn({width: seconds_more(seconds[width], seconds["plain"]) for width in widths})
    return Around(
        host=more("plain", "forward"),
        surplus={width: max(0.0, unit * own.median) for width, own in surplus.items()},
        further=more("wide", 1), read=more("looked", gamma), rank=more("ranked", "half"),
        decide=more("decided", gamma), part=_share(grid, requests, more("part", "plain"), more("wide", "plain")))


def _share(grid: CostGrid, requests: int, some: float, all_of_them: float) -> float:
    """Of a proposal for half of the requests, given what it and one for all add to a plain round, with a row each."""
    if not some or not all_of_them:
        return 0.0
    asked = requests // 2
    plain, few, many = (grid.verify(PACKED, [2] * more + [1] * (requests - more)) for more in (0, asked, requests))
    whole = all_of_them - (many - plain)
    half = (some - (few - plain)) / whole if whole > 0 else 0.0
    return min(1.0, max(0.5, half))


class _First(BatchFixed):
    """Verify one draft."""

    def after(self, lines: Sequence[Line]) -> Plan:
        plan = super().after(lines)
        return replace(plan, drafts={request: min(1, drafts) for request, drafts in plan.drafts.items()})


class _Part(_First):
    """The same of the first half of the requests."""

    def before(self, lines: Sequence[Line]) -> dict[Hashable, int]:
        few = len(lines) // 2
        return {**super().before(lines), **{line.request: 0 for line in lines[few:]}}


@dataclass(frozen=True)
class _Decided(BatchFixed):
    """Work out every decision of another policy and do not follow it."""

    decides: BatchAuto | None = None

    def before(self, lines: Sequence[Line]) -> dict[Hashable, int]:
        self.decides.before(lines)
        return super().before(lines)

    def after(self, lines: Sequence[Line]) -> Plan:
        self.decides.after(lines)
        return super().after(lines)

    def learn(self, landed: Mapping[Hashable, Round]) -> None:
        self.decides.learn(landed)

    def reflect(self) -> None:
        self.decides.reflect()


class _Half(BatchFixed):
    """Verify every other draft."""

    def after(self, lines: Sequence[Line]) -> Plan:
        plan = super().after(lines)
        return replace(plan, drafts={request: (drafts + 1) // 2 for request, drafts in plan.drafts.items()})


class _Ranked(_Half):
    """Verify as many, of all requests' drafts."""

    def after(self, lines: Sequence[Line]) -> Plan:
        plan, most = super().after(lines), {line.request: line.proposed for line in lines if line.proposed}
        return replace(plan, drafts=most, ranked=Ranked(tuple(most), sum(plan.drafts.values()))) if most else plan


def _by_turns(kinds: Mapping[Any, Callable[[], Callable[[], Any]]], budget: float | None) -> dict[Any, list[float]]:
    """Seconds of every kind of round, turn by turn: all of them once, in random order, each waited for.

    kinds: begin, and return what runs one round. budget: seconds after which it is enough; at least three turns.
    """
    seconds: dict[Any, list[float]] = {name: [] for name in kinds}
    order, started = random.Random(0), time.perf_counter()
    for turn in range(LOOP_ROUNDS):
        if turn % LOOP_TEXT == 0:
            rounds = {name: begin() for name, begin in kinds.items()}
        if budget is not None and turn >= 3 and time.perf_counter() - started > budget:
            break
        for name in order.sample(list(kinds), len(kinds)):
            since = time.perf_counter()
            rounds[name]()
            mx.synchronize()
            seconds[name].append(time.perf_counter() - since)
    return seconds


def seconds_more(one: Sequence[float], other: Sequence[float]) -> Timing:
    """Seconds more, by turns, for within a turn the machine is equally fast: the mean of the middle three fifths."""
    differences = sorted(a - b for a, b in zip(one, other, strict=True))
    ends = len(differences) // 5
    return replace(timing_of(differences), median=statistics.fmean(differences[ends : len(differences) - ends]))


def _rounds(pair: Pair, requests: int, policy: BatchFixed) -> Callable[[], Any]:
    """A round of the real loop, every time it is called, at the depth of the forwards."""
    batch = Batch(pair, policy)

    def deepen(run: Run) -> None:
        _fill(pair, run.cache, NEAR)
        if run.draft is not None:
            run.context = _context(pair, NEAR)

    for number in range(requests):
        join_at_once(batch, number, PROMPT, begin=deepen)
    batch.step()
    return batch.step


def with_around(grid: CostGrid, measured: Mapping[int, Around]) -> CostGrid:
    """The grid with rounds of the loop as they are, by counts of requests.

    Forwards were timed one by one, and minutes apart on a machine that is not always equally fast. In the loop, host
    work hides behind the draft, contexts are copied and more rows judged. So what a drafting round adds to a plain one
    is what was measured there; forwards say how it rises between. Host, read, rank and decide are spread over the
    requests of the largest count.
    """
    right = {requests: _Corrected.by(grid, requests, around) for requests, around in measured.items() if around.surplus}
    most = max(measured)
    return replace(
        grid,
        packed={(n, m): right[n].packed(m / n - 1, seconds) if n in right else seconds
                for (n, m), seconds in grid.packed.items()},
        rectangular={(n, m): right[n].rectangular(m - 1, seconds) if n in right else seconds
                     for (n, m), seconds in grid.rectangular.items()},
        draft={(n, m): right[n].draft(seconds) if n in right else seconds for (n, m), seconds in grid.draft.items()},
        part=measured[most].part,
        host_request=max(0.0, measured[most].host - grid.host) / most,
        read_request=max(0.0, measured[most].read - grid.read) / most,
        rank_request=measured[most].rank / most,
        decide_request=measured[most].decide / most,
    )


@dataclass(frozen=True)
class _Corrected:
    """What was priced one way and measured another, at one count of requests.

    first: a proposal of one slot, as priced. proposal: what it takes, over that. further: the same of the slots after
    it. priced, real: packed verify forwards of one row each, two rows each and so on. More rows may take less time:
    four requests were measured to verify three drafts each faster than two.
    """

    first: float
    proposal: float
    further: float
    priced: Sequence[float]
    real: Sequence[float]

    @classmethod
    def by(cls, grid: CostGrid, requests: int, around: Around) -> _Corrected:
        widths = sorted(around.surplus)
        plain, *wider = (grid.verify(PACKED, [width + 1] * requests) for width in (0, *widths))
        first, whole = (grid.drafting(requests, slots) for slots in (1, widths[-1]))
        proposal = _over(around.surplus[1], first + wider[0] - plain)
        one = cls(first, proposal, _over(around.further, whole - first), (), ())
        real = [plain + around.surplus[width] - one.draft(grid.drafting(requests, width)) for width in widths]
        return replace(one, priced=[plain, *wider], real=[max(plain, seconds) for seconds in (plain, *real)])

    def draft(self, seconds: float) -> float:
        """A proposal that was priced so."""
        return self.proposal * self.first + self.further * (seconds - self.first)

    def packed(self, drafts: float, seconds: float) -> float:
        """A verify forward that was priced so, with so many drafts of each request."""
        low = int(drafts)
        if low == drafts:
            return self.real[low]
        step = self.priced[low + 1] - self.priced[low]
        share = (seconds - self.priced[low]) / step if step > 0 else drafts - low
        return self.real[low] + min(1.0, max(0.0, share)) * (self.real[low + 1] - self.real[low])

    def rectangular(self, drafts: int, seconds: float) -> float:
        """The same in the other layout: as much more or less as was priced."""
        return max(0.0, self.real[drafts] + seconds - self.priced[drafts])


def _over(measured: float, priced: float) -> float:
    return measured / priced if measured > 0 and priced > 0 else 1.0


def drawn(times: Mapping[int, Timing]) -> dict[int, Timing]:
    """Timings moved towards the line through their neighbours, as far as noise explains how far off they are.

    A step that is larger than the noise stays. What is off by d is left off by d (1 - 2 e^2 / d^2), e being the median
    error of all; the first and the last stay where they are.
    """
    counts, moved, error = sorted(times), dict(times), _usual_error(times)
    for at, count in enumerate(counts[1:-1], start=1):
        near = counts[max(0, at - REACH) : at] + counts[at + 1 : at + 1 + REACH]
        slope, start = statistics.linear_regression(near, [times[n].median for n in near])
        off = times[count].median - (start + slope * count)
        kept = max(0.0, 1 - 2 * error**2 / off**2) if off else 1.0
        moved[count] = replace(times[count], median=start + slope * count + kept * off)
    return moved


def _usual_error(times: Mapping[int, Timing]) -> float:
    """Of one timing, in seconds; 0 where nothing was timed."""
    return statistics.median(own.error for own in times.values()) if times else 0.0


def packed_rows(requests: int, widest: int, short: bool = False) -> list[int]:
    """Rows of all requests together that are timed: from one each to the widest each."""
    step = max(1, requests // (2 if short else 4))
    return [*range(requests, requests * widest, step), requests * widest]


def dealt(rows: int, requests: int) -> list[int]:
    """Rows of each request, as even as they can be."""
    each, more = divmod(rows, requests)
    return [each + (own < more) for own in range(requests)]


def _measure(forwards: Forwards, requests: int, short: bool, progress: Callable[[str], None]) -> Measured:
    widest = (forwards.slots or 7) + 1
    works: dict[tuple[str, int], Callable[[], None]] = {}
    for rows in packed_rows(requests, widest, short):
        works[PACKED, rows] = partial(forwards.verify, PACKED, dealt(rows, requests))
    if RECTANGULAR in forwards.layouts and requests > 1:  # one request is run the same way in both
        for rows in range(1, widest + 1):
            works[RECTANGULAR, rows] = partial(forwards.verify, RECTANGULAR, [rows] * requests)
    some = {1, (forwards.slots + 1) // 2, forwards.slots}
    for slots in (slots for slots in range(1, forwards.slots + 1) if slots in some or not short):
        works[DRAFT, slots] = partial(forwards.propose, slots)
    times = timed(works, REPEATS, SHORT_SECONDS if short else None,
                  lambda text: progress(f"{requests} requests: {text}"))
    found: dict[str, dict[int, Timing]] = {}
    for (what, count), timing in times.items():
        found.setdefault(what, {})[count] = timing
    if RECTANGULAR in forwards.layouts and requests == 1:
        found[RECTANGULAR] = found[PACKED]
    return Measured(found)


class Together:
    """Requests of a pair over synthetic caches."""

    def __init__(self, pair: Pair, requests: int, depth: int):
        self._pair = pair
        target = pair.target
        self._caches = [target.start(KVOptions()) for _ in range(requests)]
        for cache in self._caches:
            _fill(pair, cache, depth)
        self.slots = 0 if pair.draft is None else pair.draft.gamma
        self.layouts = layouts_of(target)
        self._states = [] if pair.draft is None else [_context(pair, depth) for _ in range(requests)]
        self._anchor = mx.zeros((requests,), dtype=mx.int32)
        self._rule = make_rule(Sampling())

    def verify(self, layout: str, rows: Sequence[int]) -> None:
        """One forward; afterwards the caches are where they were, as far as they can be rolled back."""
        tokens = [mx.zeros((1, own), dtype=mx.int32) for own in rows]
        mx.eval([one.logits for one in forward_many(self._pair.target, tokens, self._caches, layout=layout)])
        for own, cache in zip(rows, self._caches, strict=True):
            cache.advance(own, 0 if own > 1 or cache.full else own)

    def propose(self, slots: int) -> None:
        """One proposal of all."""
        count = len(self._states)
        picks = [self._rule.picker(None, None, slots) for _ in range(count)]
        proposals = propose_many(self._pair.draft, self._states, self._anchor, [slots] * count, picks)
        mx.eval([one.tokens for one in proposals])


def _fill(pair: Pair, cache: TargetCache, depth: int) -> None:
    """So many made-up positions of the target."""
    cache.fill(lambda tokens: pair.target.forward(tokens, cache).logits, depth)


def _context(pair: Pair, depth: int) -> Any:
    """A draft's state after so many positions."""
    draft = pair.draft
    state, width = draft.start(), len(draft.taps) * (pair.target.hidden_size or 1)
    taps = mx.zeros((1, depth, width), dtype=pair.target.dtype) if draft.taps else None
    draft.observe(state, mx.zeros((1, depth), dtype=mx.int32), taps)
    return state
