"""`auto` across requests: every request at its own price of a token, looking past steps, and parking.

Survivals count by what a token of their request is worth (`worth.py`), in tokens of plain decoding, whose rate is the
price of a second. A slot is verified when it, or some continuation that begins with it, is worth more than its rows
cost; the continuation runs down the ranking of all requests, over slots that are seen and forecasts of those that are
not:

    max_k  sum of the k best worths from here - price * (T(rows + k) - T(rows)) > 0,   T the cheaper layout

Which requests draft at all is decided before the draft is paid for: those whose forecast pays for their share of the
batched proposal. The others are parked (`batch_parking.py`), and probe one by one as a single stream does, or all
together where nobody drafts. How many slots are proposed, and whether the round's confidences are read by the host,
ranked by the device or left alone, goes by what each has brought and what it costs (`hindsight.py`). Deciding costs the
host time as well: where a new decision brings less than that, the last one stands for some rounds, and no confidences
travel but those before the next one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..structs import Round
from .ahead import Ahead
from .batch_parking import WATCH, ParkingLot
from .batch_rate import ByCost, reason
from .forecast import Forecast
from .grid import PACKED, CostGrid, Prices
from .hindsight import FULL, LOOK, RANK, Hindsight, Insight, Load, average_seconds, most_valuable
from .lines import Known, Line, Plan
from .parking import PROBE, WARM_UP, Parking, hoped
from .ranking import Survivals, climb, survivals
from .rate import Calibrate
from .refine import Shift, Spread
from .worth import MOST, Shares, Work, row_seconds, worths

STAND = 16  # rounds for which a decision may be good
IDLE = 32  # the same where everybody is parked
JUDGED = 2  # decisions that stand: one in so many is judged by what its own round shows


@dataclass
class Decision:
    """Slots and rows of a round, and of those after it while nothing speaks against it.

    slots: by request. width: of everybody who drafts and has use for so many, 0 if nobody drafts. planned: drafts of
    each request before any of them were left to the device. plan: None where it must be drawn up for the requests that
    are there now. rounds: for so many it is good. stood: how many of them were after its own.
    """

    slots: Mapping[Hashable, int]
    width: int = 0
    planned: Mapping[Hashable, int] = field(default_factory=dict)
    plan: Plan | None = None
    rounds: float = 1
    stood: int = 0

    @property
    def stays(self) -> bool:
        """Whether it is good for the next round, too."""
        return self.stood + 1 < self.rounds


@dataclass(frozen=True)
class Case:
    """A finished round that is to be judged, by what was known when it landed.

    requests: all of them, in order; confidences and forecasts are theirs. seen: those that showed confidences, with
    their insight and their place in the lot. proposal: what each of these paid for its draft, in tokens. looked: drafts
    that were chosen by looking, None where nobody looked. old: the plan of STAND rounds before. ranks: whether rows
    went to the best slots.
    """

    past: Hindsight
    requests: Sequence[Hashable]
    confidences: Sequence[Sequence[float]]
    forecasts: Sequence[Forecast]
    seen: Mapping[Hashable, tuple[Insight, Parking]]
    probes: set[Hashable]
    proposal: float
    looked: Sequence[int] | None
    old: Mapping[Hashable, int] | None
    ranks: bool


class BatchAuto(ByCost):
    """Lookahead over all requests, with parking request by request."""

    def __init__(self, name: str, gamma: int, grid: CostGrid, calibrate: Calibrate = tuple):
        super().__init__(name, gamma, grid, calibrate)
        self.spread = Spread()
        self._loads: dict[int, Load] = {}
        self.lot = ParkingLot()
        self._insights: dict[Hashable, Insight] = {}
        self._ranks = True  # in the present round, where nobody looks
        self._reads = self._looked = True  # in the present round; in the last one that drafted
        self._width, self._drafted = self.gamma, 0  # slots proposed, and by how many decisions
        self._stood = 0  # decisions that were good for more than a round
        self._decision = Decision({})
        # Rounds that nothing was learned from yet, each with the plan of STAND rounds before it.
        self._landed: list[tuple[Mapping[Hashable, Round], Mapping[Hashable, int] | None]] = []
        self._old: Mapping[Hashable, int] | None = None
        self._cases: list[Case] = []  # rounds that were learned from and are not judged
        self._planned: deque[Mapping[Hashable, int]] = deque(maxlen=STAND + 1)  # of the last rounds and the present one
        self._price = 0.0  # tokens that a second was worth at the last decision
        self._worths: dict[Hashable, float] = {}  # of a token by request, in tokens of plain decoding

    @property
    def reads_confidence(self) -> bool:
        """Only while looking into the round pays for the read; asked after `before`."""
        return self._reads

    @property
    def uses_confidence(self) -> bool:
        """In the round before the next decision, so that it goes by fresh forecasts; asked after `after`.

        And in the round of a decision that is judged: by forecasts one round old, as they are when it is made.
        """
        return not self._decision.stays or self.decides and self._stood % JUDGED == 0

    @property
    def decides(self) -> bool:
        """Not while an old decision stands."""
        return not self._decision.stood

    def before(self, lines: Sequence[Line]) -> Mapping[Hashable, int]:
        """Draft, park or probe, request by request; as in the last round while its decision stands."""
        if self._decision.stays and self._serves(self._decision, lines):
            self._stand(self._decision, lines)
        else:
            self._stood += self._decision.stood > 0
            self._catch_up()
            slots = self._ask(lines)
            self._decision = Decision(slots, max(slots.values(), default=0))
        return self._decision.slots

    def after(self, lines: Sequence[Line]) -> Plan:
        """How many rows, and whether that is good for the next round, too."""
        decision = self._decision
        if not decision.stood or any(line.confidences is not None for line in lines):
            plan = self._complete(decision, lines)
        else:
            plan = decision.plan or self._adapt(decision, lines)
        self._planned.append(decision.planned)
        return plan

    def _serves(self, decision: Decision, lines: Sequence[Line]) -> bool:
        """Whether it is a decision for these requests, too: about as many, of which new ones do what others do."""
        return (self.grid.load(len(lines)) == self.grid.load(len(decision.slots))
                and all(line.fixed is None and (decision.width or line.request in decision.slots) for line in lines))

    def _stand(self, decision: Decision, lines: Sequence[Line]) -> None:
        """One more round by an old decision."""
        decision.stood += 1
        self._begin(lines)
        slots = {line.request: min(decision.slots.get(line.request, decision.width), line.left) for line in lines}
        for request, own in slots.items():
            if not own:
                self.lot[request].parked += 1
        if slots != decision.slots:
            decision.slots, decision.plan = slots, None

    def _adapt(self, decision: Decision, lines: Sequence[Line]) -> Plan:
        """An old decision for those who are there now: what is drafted stays, rows are shared out anew."""
        rows, taken = [self.weighed(line.request, self.current(line)) for line in lines], [0] * len(lines)
        prices = self.prices(lines)
        found = most_valuable(rows, taken, prices, self._price)
        drafts = {line.request: count for line, count in zip(lines, found, strict=True)}
        layout = prices.layout(sum(found), max(found))
        return self._draw_up(decision, lines, Plan(
            drafts, layout, self.name, {line.request: self._reason(line, drafts[line.request]) for line in lines}))

    def _keeps(self, lines: Sequence[Line]) -> float:
        """Rounds after which a new decision is worth the host's time.

        One where somebody looked, probed or saw further than usual, and where not enough was learned. Else those that
        cost least by the round, a decision growing stale in proportion to its age: saved / n + stale n / (2 STAND);
        but a quarter at most where somebody is parked, for that may have to end at once. Where nobody drafts
        nothing is learned, and all wait for the next probe.
        """
        if all(line.fixed is None and not line.proposed for line in lines):
            return min(IDLE, self.lot.probes_in)
        load = self._load(len(lines))
        if not load.learned and any(line.proposed for line in lines) or not all(
                line.fixed is None and line.confidences is None and line.proposed <= self._width
                and not (line.proposed and self.lot[line.request].why == PROBE)
                and (self.known[line.request].forecast.rounds > 0 or not line.proposed) for line in lines):
            return 1
        saved, stale = self._price * self.grid.deciding(len(lines)), max(0.0, load.stale.value)
        best = math.sqrt(2 * STAND * saved / stale) if stale else STAND if saved else 1
        everybody = all(line.proposed or not line.left for line in lines)
        return min(best, STAND if everybody else STAND / 4, self.lot.probes_in)

    def _ask(self, lines: Sequence[Line]) -> dict[Hashable, int]:
        """Slots of each request."""
        self._begin(lines)
        depths = [line.depth for line in lines]
        price, load = self._plain_rate(depths), self._load(len(lines))
        hopes = {line.request: survivals(self._hopes(line)[: min(self._width, self.slots(line))])
                 for line in lines if line.fixed is None and self.slots(line)}
        self._price, self._worths = price, self._weigh(lines, hopes, price, load.work)
        gains, together, slots = self._gains(lines, hopes, price, load)
        always = sum(line.fixed is not None and self.taken(line) > 0 for line in lines)
        proposals = [price * self.drafting(always + more, slots, depths) for more in range(len(gains) + 1)]
        shares = Shares(gains.values(), [proposals[0], *(own + together for own in proposals[1:])])
        values = {request: shares.value(gain) for request, gain in gains.items()}
        drafting = self.lot.decide(values, gains, shares, load.odds,
                                   {request: self.known[request].forecast.rounds for request in values})
        if drafting and len(drafting) < len(hopes) and self._pays_for_all(drafting, hopes, lines, slots, price):
            drafting |= self.lot.invite(hopes.keys() - drafting)
        self._reads, self._ranks = self._worth_following(drafting, price, load)
        width = self._propose(len(drafting), always, price, load, depths)
        return {line.request: self.slots(line) if line.fixed is not None
                else min(width, self.slots(line)) if line.request in drafting else 0 for line in lines}

    def _pays_for_all(
        self, drafting: set[Hashable], hopes: Mapping[Hashable, Sequence[float]], lines: Sequence[Line], slots: int,
        price: float,
    ) -> bool:
        """Whether drafting for everybody is worth more than for some, the best rows and the proposal paid.

        Where more rows take less time, those who would not pay by themselves make the others' rows cheaper.
        """
        taken, prices, depths = [self.taken(line) for line in lines], self.prices(lines), [line.depth for line in lines]
        always = sum(map(bool, taken))

        def worth(requests: Collection[Hashable]) -> float:
            rows = [self.worths(line.request, hopes[line.request]) if line.request in requests else []
                    for line in lines]
            drafts = most_valuable(rows, taken, prices, price)
            tokens = sum(sum(own[:count]) for own, count in zip(rows, drafts, strict=True))
            proposal = self.drafting(always + len(requests), slots, depths)
            return tokens - price * (prices.seconds(sum(drafts), max(drafts)) + proposal)

        return worth(hopes.keys()) > worth(drafting)

    def _begin(self, lines: Sequence[Line]) -> None:
        """A round begins, for those who are there now."""
        self.begin(lines)
        self.lot.begin(line.request for line in lines)
        self._insights = {line.request: self._insights.get(line.request) or Insight() for line in lines}

    def _complete(self, decision: Decision, lines: Sequence[Line]) -> Plan:
        """The lookahead decision where confidences were read; else the best number of rows for those expected, which
        the device gives to the best slots."""
        confidences, taken = [self.current(line) for line in lines], [self.taken(line) for line in lines]
        rows = [self.weighed(line.request, own) if line.fixed is None else []
                for line, own in zip(lines, confidences, strict=True)]
        price, prices = self._price, self.prices(lines)
        chosen = [line for line in lines if line.proposed and line.fixed is None]
        looks = any(line.confidences is not None for line in chosen)
        if chosen:
            self._looked = looks
        if looks:
            forecasts = [self.known[line.request].forecast for line in lines]
            drafts = self._look(rows, confidences, forecasts, taken, prices, price)
        else:
            drafts = most_valuable(rows, taken, prices, price)
        decision.rounds = self._keeps(lines)
        return self._draw_up(decision, lines, self.plan(
            lines, confidences, drafts, list(map(self._reason, lines, drafts))))

    def _draw_up(self, decision: Decision, lines: Sequence[Line], plan: Plan) -> Plan:
        """Keep the plan; its ranking is left to the device where nobody looked and that pays."""
        looks = any(line.confidences is not None for line in lines if line.fixed is None)
        leaves = self._ranks and not looks and self.temperatures is not None
        decision.planned, decision.plan = plan.drafts, self.leave_to_device(plan, lines) if leaves else plan
        return decision.plan

    def learn(self, landed: Mapping[Hashable, Round]) -> None:
        """Taken in with the next decision, or while the device works on a round that needs none."""
        self._landed.append((landed, self._planned[0] if len(self._planned) > STAND else None))

    def reflect(self) -> None:
        """Take in what has landed, and judge what was put off."""
        self._catch_up()
        for case in self._cases:
            self._judge(case)
        self._cases.clear()

    def _catch_up(self) -> None:
        for landed, old in self._landed:
            self._old = old
            super().learn(landed)
        self._landed.clear()

    def learn_confidences(self, landed: Mapping[Hashable, Round], seen: Mapping[Hashable, Sequence[float]]) -> None:
        """Was it good to draft, and to look? That may wait where the host's time counts, but for what probes have found
        and while little is known."""
        rounds = {request: one for request, one in landed.items() if one.rows}
        if not rounds:
            return
        depths = [one.start + len(one.tokens) for one in rounds.values()]
        self._account(list(rounds.values()), depths)
        case = self._witness(rounds, {r: own for r, own in seen.items() if not self.known[r].fixed}, depths)
        waits = self.grid.deciding(len(rounds)) > 0 and self._load(len(rounds)).learned
        if case is not None and (case.probes or not waits):
            self._judge(case)
        elif case is not None:
            self._cases.append(case)
        super().learn_confidences(landed, seen)
        self._learn_flags(rounds, seen)
        self.lot.learned({request: landed[request].schedule.reason for request in seen})

    def _learn_flags(self, rounds: Mapping[Hashable, Round], seen: Mapping[Hashable, Sequence[float]]) -> None:
        """What each text's confidences are off by; of rounds whose confidences nobody heard, what was expected."""
        for request, one in rounds.items():
            if one.finish is None and request in self.known:  # after a cut, the next draft may have been right
                known, verified = self.known[request], one.rows - 1
                known.forecast.age = one.index - known.observed
                expected = seen.get(request) or (known.forecast.expected() if verified else ())
                known.judge(expected[:verified], one.accepted, verified)

    def greet(self) -> Known:
        """With a shift, whose size is learned from all."""
        return replace(super().greet(), shift=Shift(self.spread))

    # Before the draft

    def _weigh(
        self, lines: Sequence[Line], hopes: Mapping[Hashable, Sequence[float]], price: float, work: Work
    ) -> dict[Hashable, float]:
        """What a token of each request is worth, given the survivals that are hoped for where drafting is the
        scheduler's to choose; nothing is known of it before somebody has drafted."""
        if not work.rounds or not hopes:
            return {}
        requests, prices = len(lines), self.prices(lines)
        row = row_seconds(prices, round(work.rows), sum(map(self.taken, lines)), requests)
        base = work.base(prices, row, requests) / requests
        drafting = self.drafting(len(hopes), self._width, [line.depth for line in lines])
        proposal, last = max(0.0, drafting - work.proposal) / len(hopes), self._decision
        return worths(hopes, {request: last.slots.get(request, last.width) for request in hopes},
                      1 / price, base, proposal, row)

    def worth(self, request: Hashable) -> float:
        """As `_weigh` found before the round."""
        return self._worths.get(request, 1.0)

    def _gains(
        self, lines: Sequence[Line], hopes: Mapping[Hashable, Sequence[float]], price: float, load: Load
    ) -> tuple[dict[Hashable, float], float, int]:
        """(what drafting is expected to gain for each request, its rows paid, its draft not yet; what the rows cost
        together beyond that; how many slots are of use), in tokens.

        A round is worth more than the best plan for its expected confidences, because the plan can still follow
        what is seen: that much is learned from past rounds.
        """
        rows = {request: self.worths(request, own) for request, own in hopes.items()}
        taken, prices = [self.taken(line) for line in lines], self.prices(lines)
        drafts = most_valuable([rows.get(line.request, []) for line in lines], taken, prices, price)
        average = price * average_seconds(prices, taken, drafts)
        row = min(average, price * row_seconds(prices, sum(drafts), sum(taken), len(lines)))
        costs = {RANK: self.grid.ranking(len(lines)), LOOK: self.grid.reading(len(lines))}
        costs = {what: price * seconds / max(1, len(rows)) for what, seconds in costs.items()}
        gains = {line.request: sum(rows[line.request][:count]) - row * count
                 + max(0.0, self._follows(line.request, load, costs))
                 for line, count in zip(lines, drafts, strict=True) if line.request in rows}
        return gains, (average - row) * (sum(drafts) - sum(taken)), max(drafts) or self._width

    def _follows(self, request: Hashable, load: Load, costs: Mapping[str, float]) -> float:
        """Tokens gained by following what a round shows, in the way that gains most (a look, where it is free)."""
        rank, look = (self._insight(request, load, what) or 0.0 for what in (RANK, LOOK))
        looked = rank + look - costs[LOOK]
        return max(looked, rank - costs[RANK]) if costs[LOOK] else looked

    def _hopes(self, line: Line) -> list[float]:
        """Expected confidences; those of an optimist while hardly anything was seen."""
        forecast, expected = self.known[line.request].forecast, self.expected(line)
        return hoped(forecast, expected) if forecast.rounds < WARM_UP else expected

    def _worth_following(self, drafting: set[Hashable], price: float, load: Load) -> tuple[bool, bool]:
        """(whether to look into this round, whether else to let the device rank): what brings more than it costs."""
        rank, look = ([self._insight(request, load, what) for request in drafting] for what in (RANK, LOOK))
        if None in look:
            return True, True
        ranked, looked = (max(0.0, sum(value or 0.0 for value in values)) for values in (rank, look))
        ranked_only = ranked - price * self.grid.ranking(len(self.known))
        looks = ranked + looked - price * self.grid.reading(len(self.known)) >= max(0.0, ranked_only)
        return looks, ranked_only >= 0

    def _propose(self, drafting: int, always: int, price: float, load: Load, depths: Sequence[int]) -> int:
        """Slots to propose: as many as gain most, by forecasts or where the round is followed, that being paid, too."""
        if not drafting:
            return 0
        self._drafted += 1
        if load.knows_widths:
            following = min(self.grid.ranking(len(self.known)), self.grid.reading(len(self.known)))

            def gain(slots: int) -> float:
                by_forecasts, followed = (drafting * load.deep[follows, slots].value for follows in (False, True))
                proposal = self.drafting(always + drafting, slots, depths)
                return max(by_forecasts - price * proposal, followed - price * (proposal + following))

            self._width = max(range(1, self.gamma + 1), key=gain)  # the fewest of those that gain as much
        return self._width if load.knows_widths and self._drafted % FULL else self.gamma

    # After it

    def _look(
        self, rows: Survivals, confidences: Sequence[Sequence[float]], forecasts: Sequence[Forecast],
        taken: Sequence[int], prices: Prices, price: float,
    ) -> list[int]:
        ahead = Ahead(rows, confidences, forecasts, prices, price)
        return climb(rows, taken, ahead, stop=self.grid.layouts == (PACKED,))

    def _reason(self, line: Line, drafts: int) -> str:
        parking = self.lot[line.request]
        if line.fixed is None and (not line.proposed or parking.why in (PROBE, WATCH)):
            return parking.why
        return "from past rounds" if line.proposed and line.confidences is None else reason(line, drafts)

    # After the round

    def _account(self, rounds: Sequence[Round], depths: Sequence[int]) -> None:
        """Tokens and modelled seconds of a round; not of deciding, which no probe is to blame for."""
        asked = [one.proposed for one in rounds if one.proposed]
        proposal = self.drafting(len(asked), max(asked, default=0), depths)
        other = self.grid.around(len(rounds)) + (self._following(len(rounds)) if asked else 0.0)
        seconds = self.grid.cheaper([one.rows for one in rounds], depths)[1] + proposal + other
        tokens, plain = sum(len(one.tokens) for one in rounds), seconds * self._plain_rate(depths)
        if len(asked) >= MOST * len(rounds):
            self._load(len(rounds)).work.add(sum(one.rows for one in rounds) - len(rounds), proposal, other)
        self.lot.account(tokens, plain)

    def _following(self, requests: int) -> float:
        """Seconds that the last drafting round spent on following its confidences."""
        return self.grid.reading(requests) if self._looked else self.grid.ranking(requests) * self._ranks

    def _witness(
        self, rounds: Mapping[Hashable, Round], seen: Mapping[Hashable, Sequence[float]], depths: Sequence[int]
    ) -> Case | None:
        """What can be judged of a round later; None where everybody's forecast is older than when it is needed."""
        for request in seen:
            self.known[request].forecast.age = rounds[request].index - self.known[request].observed
        probes = {request for request in seen if rounds[request].schedule.reason == PROBE}
        if not probes and not any(self.known[request].forecast.age == 1 for request in seen):
            return None
        confidences = [seen.get(request, ()) for request in rounds]
        forecasts = [self.known[request].forecast if request in seen else self._typical for request in rounds]
        rows = list(map(self.weighed, rounds, confidences))
        expected = [self.weighed(request, one.expected()[: len(own)])
                    for request, one, own in zip(rounds, forecasts, rows, strict=True)]
        taken = [0 if request in seen else one.rows - 1 for request, one in rounds.items()]
        price, prices = self._plain_rate(depths), self.grid.prices(len(rounds), max(self.gamma, *taken), depths)
        return Case(
            Hindsight(rows, expected, taken, prices, price, ranks=self.temperatures is not None), list(rounds),
            confidences, [own.kept() for own in forecasts],
            {request: (self._insights[request], self.lot[request]) for request in seen}, probes,
            price * self.drafting(len(seen), self._width, depths) / len(seen),
            [one.rows - 1 for one in rounds.values()] if self._looked else None, self._old, self._ranks)

    def _judge(self, case: Case) -> None:
        """Value of the plans made by looking, by the device and by the forecasts, under what was seen.

        Each request's gain pays for its own rows; what the seconds of the two plans differ besides is shared.
        """
        past, load = case.past, self._load(len(case.requests))
        rows, taken, prices, price = past.rows, past.taken, past.prices, past.price
        looked = case.looked or self._look(rows, case.confidences, case.forecasts, taken, prices, price)
        planned, row = past.planned, past.row(looked)
        if not any(taken) and case.old is not None:
            load.learn_staleness(past, case.requests, case.old, row, case.ranks)
        if max(map(len, rows)) == self.gamma:
            load.learn_depth(past, self.gamma)
        seconds = prices.seconds(sum(looked), max(looked)) - prices.seconds(sum(planned), max(planned))
        shared = (price * seconds - row * (sum(looked) - sum(planned))) / len(case.seen)
        paid: dict[Hashable, float] = {}  # tokens gained by drafting, its share of the proposal not counted
        gains = [past.gains(drafts, row) for drafts in (planned, past.ranked(planned), looked)]
        for request, forecast, by_forecast, by_rank, by_look in zip(case.requests, case.forecasts, *gains, strict=True):
            if request not in case.seen:
                continue
            if forecast.age == 1:  # after a pause the forecast is worse than when it is needed
                for insight in (load.insight, case.seen[request][0]):
                    insight[RANK][forecast.high].add(by_rank - by_forecast)
                    insight[LOOK][forecast.high].add(by_look - by_rank - shared)
            paid[request] = by_look
        if len(case.probes) == len(case.seen):  # nobody else drafted: the proposal is theirs, one verdict is for all
            paid = dict.fromkeys(paid, sum(paid.values()) / len(paid))
        for request in case.probes:
            case.seen[request][1].follow = paid[request] > case.proposal

    def _insight(self, request: Hashable, load: Load, what: str) -> float | None:
        """What ranking or looking into this request is worth, None before anything was learned."""
        return load.insight.of_one(self._insights[request], what, self.known[request].forecast.high)

    def _load(self, requests: int) -> Load:
        return self._loads.setdefault(self.grid.load(requests), Load())

    def _plain_rate(self, depths: Sequence[int]) -> float:
        """Tokens per second of plain decoding for so many requests."""
        count = len(depths)
        return count / (self.grid.cheaper([1] * count, depths)[1] + self.grid.around(count))
