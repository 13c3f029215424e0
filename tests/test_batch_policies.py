"""Policies for several requests: what they ask and decide, and that no admission knows the token it admits."""

import copy
import functools
import itertools
import random
from collections import deque
from dataclasses import replace

import pytest
from scheduling import (
    APPENDIX_CURVES,
    CURVES,
    GAMMA,
    INDEPENDENT,
    landed,
    law_of_two,
    overlap,
    survivals,
    taught,
    vectors,
)

from mlx_dspark.schedule import batch_auto, make_policy
from mlx_dspark.schedule import load as sim
from mlx_dspark.schedule.batch import Line, make_batch_policy
from mlx_dspark.schedule.batch_auto import STAND, BatchAuto
from mlx_dspark.schedule.batch_parking import WATCH
from mlx_dspark.schedule.cost import CostCurve
from mlx_dspark.schedule.grid import PACKED, CostGrid
from mlx_dspark.schedule.lines import Plan
from mlx_dspark.schedule.parking import PROBE, WARM_UP, Odds
from mlx_dspark.schedule.ranking import climb, ranked, search, top
from mlx_dspark.schedule.simulate import made_up
from mlx_dspark.schedule.worth import Shares
from mlx_dspark.structs import Schedule

MODELLED = ["paper", "search", "lagged", "auto"]
EVERY_POLICY = ["plain", "fixed:4", *MODELLED]


def random_grid(seed, requests, slots=GAMMA):
    """Prices that rise by chance, in both layouts."""
    rng = random.Random(seed)

    def rising(count, most, step):
        return itertools.accumulate((rng.random() ** 4 * step for _ in range(most - count)), initial=1 + rng.random())

    def table(first, size, step):
        return {(requests, first + more): price for more, price in enumerate(rising(0, size + 1, step))}

    return CostGrid(table(requests, requests * slots, 0.5), table(1, slots, 1.2), read=0.01,
                    draft={(n, slots): 0.1 + 0.02 * n for n in range(1, requests + 1)})


@functools.cache
def grids(requests, slots=GAMMA):
    derived = {name: CostGrid.from_curve(curve, [requests], slots) for name, curve in CURVES.items()}
    random_ones = {f"grid-{seed}": random_grid(seed, requests, slots) for seed in range(3)}
    return {**derived, **random_ones, "packed": random_grid(5, requests, slots).only("packed"),
            "rectangular": random_grid(6, requests, slots).only("rectangular")}


GRID_NAMES = [*CURVES, "grid-0", "grid-1", "grid-2", "packed", "rectangular"]
every_grid = pytest.mark.parametrize("grid", GRID_NAMES)
every_policy = pytest.mark.parametrize("text", EVERY_POLICY)


def lines(*confidences, **more):
    return [Line(b, left=99, proposed=len(own), confidences=own, **more) for b, own in enumerate(confidences)]


def taught_batch(text, grid, requests, rounds=30, seed=3, kind="swinging"):
    """A policy that has seen some rounds of so many requests, and has begun another one."""
    policy = make_batch_policy(text, GAMMA, True, grid)
    sim.replay_load(policy, sim.made_up_load(kind, requests, rounds, seed), grid)
    policy.before([Line(request, left=99) for request in range(requests)])
    return policy


def drafts_of(policy, confidences):
    plan = policy.after(lines(*confidences))
    return [plan.drafts[request] for request in range(len(confidences))]


# No admission knows the token it admits


@every_grid
@every_policy
def test_admitting_a_slot_depends_on_nothing_behind_it(text, grid):
    """Slot j of a request is admitted or not whatever c_{j+1}, ... of that request are."""
    policy, rng = taught_batch(text, grids(3)[grid], 3), random.Random(5)
    pool = vectors(12, seed=1)
    for _ in range(6):
        confidences = rng.sample(pool, 3)
        drafts = drafts_of(policy, confidences)
        for request, slot in itertools.product(range(3), range(1, GAMMA + 1)):
            own = confidences[request]
            for unseen in (0.999,) * (GAMMA - slot), (0.001,) * (GAMMA - slot), rng.choice(pool)[slot:]:
                changed = [*confidences]
                changed[request] = (*own[:slot], *unseen)
                admitted = drafts_of(policy, changed)[request] >= slot
                assert admitted == (drafts[request] >= slot), (request, slot, confidences, unseen)


@every_grid
@every_policy
def test_slots_behind_the_first_refused_ones_play_no_part(text, grid):
    """The whole decision stands, for all requests at once, once each one's next slot is refused.

    This is the stronger property: what decides are tokens that were admitted, so that texts stay independent.
    """
    policy, rng = taught_batch(text, grids(3)[grid], 3, seed=4), random.Random(6)
    pool = vectors(12, seed=2)
    for _ in range(12):
        confidences = rng.sample(pool, 3)
        drafts = drafts_of(policy, confidences)
        seen = [own[: count + 1] for own, count in zip(confidences, drafts, strict=True)]
        for level in (0.999, 0.001, None, None):
            changed = [(*own, *((level or rng.random()) for _ in range(GAMMA - len(own)))) for own in seen]
            assert drafts_of(policy, changed) == drafts


@every_policy
def test_the_causality_tests_can_fail(text):
    """Policies that look at this round do change their mind when slots they may look at change."""
    policy = taught_batch(text, grids(3)["linear"], 3)
    found = {tuple(drafts_of(policy, [(a,) * GAMMA, (b,) * GAMMA, (0.5,) * GAMMA]))
             for a, b in itertools.product((0.01, 0.5, 0.99), repeat=2)}
    assert (len(found) > 1) == (text in ("paper", "lagged", "auto"))


# The paper's appendix A with two requests of the same law: the exact law of both texts, see scheduling.py.

APPENDIX_GRIDS = {
    **{name: CostGrid.from_curve(curve, [2], 2) for name, curve in APPENDIX_CURVES.items()},
    "rectangular": CostGrid({}, {(2, 1): 1.0, (2, 2): 1.9, (2, 3): 2.0}),
    "late-step": CostGrid({(2, n): p for n, p in zip(range(2, 7), (1, 1.9, 1.9, 2, 2), strict=True)}),
    "both": CostGrid({(2, n): p for n, p in zip(range(2, 7), (1, 1.4, 1.8, 2.4, 2.5), strict=True)},
                     {(2, 1): 1.0, (2, 2): 1.6, (2, 3): 2.2}),
    "step-of-two": CostGrid({(2, n): p for n, p in zip(range(2, 7), (1, 1.7, 1.7, 2.2, 2.2), strict=True)}),
}


def marginal(law):
    """Of the first request's first token."""
    return sum(chance for (text, _), chance in law.items() if text[0] == "A")


@pytest.mark.parametrize("past", [(0.8, 0.9), (0.8, 0.1), (0.3, 0.3), None], ids=["easy", "hard", "poor", "new"])
@pytest.mark.parametrize("grid", APPENDIX_GRIDS.values(), ids=APPENDIX_GRIDS)
@pytest.mark.parametrize("text", ["plain", "fixed:2", *MODELLED])
def test_appendix_a_texts_of_two_requests_are_exact_and_independent(text, grid, past):
    policy = make_batch_policy(text, 2, True, grid)
    for index in range(1, 30 if past else 1):
        policy.before([Line(0, left=9), Line(1, left=9)])
        policy.learn({b: landed(index, past, drafts=2, accepted=1) for b in range(2)})
    policy.before([Line(0, left=9), Line(1, left=9)])
    assert law_of_two(functools.partial(drafts_of, policy)) == pytest.approx(INDEPENDENT, abs=1e-12)


def test_appendix_a_asks_every_kind_of_decision():
    """The test above means something only if slots are admitted here and refused there."""
    found = set()
    for grid, text in itertools.product(APPENDIX_GRIDS.values(), MODELLED):
        policy = make_batch_policy(text, 2, True, grid)
        policy.before([Line(0, left=9), Line(1, left=9)])
        for first, second in itertools.product("AB", repeat=2):
            confidences = [(overlap(""), overlap(first)), (overlap(""), overlap(second))]
            found.add((text, *drafts_of(policy, confidences)))
    assert {drafts for _, *drafts in map(tuple, found) for drafts in drafts} == {0, 1, 2}
    assert any(a != b for text, a, b in found if text in ("paper", "auto")), "requests are told apart"


@pytest.mark.parametrize("grid", ["rectangular", "late-step"])
def test_appendix_a_retrospective_search_is_biased(grid):
    """Searching this round's confidences over the whole grid, as it may be done with old ones."""
    prices = APPENDIX_GRIDS[grid].prices(2, 2)

    def retrospective(confidences):
        return search([survivals(own) for own in confidences], [0, 0], prices, lambda t, s: (2 + t) / s)

    assert abs(marginal(law_of_two(retrospective)) - 0.70) > 0.01


def test_requests_that_peek_at_each_others_refused_tokens_are_exact_alone_and_not_together():
    """Why what a request may know of another one ends with the tokens that are admitted there."""
    easy = overlap("A")

    def peeking(confidences):
        (_, first), (_, second) = confidences
        return [int(second == easy), int(first == easy)]

    law = law_of_two(peeking)
    assert marginal(law) == pytest.approx(0.70, abs=1e-12)
    assert abs(law["AA", "AA"] - INDEPENDENT["AA", "AA"]) > 0.005


# The searches


def all_counts(rows, taken):
    return itertools.product(*(range(len(row) + 1) if row else [own] for row, own in zip(rows, taken, strict=True)))


@pytest.mark.parametrize("seed", range(12))
def test_search_finds_the_best_of_all_plans(seed):
    rng = random.Random(seed)
    grid, slots = random_grid(seed, 3, 3), 3
    if seed % 3:
        grid = grid.only(("packed", "rectangular")[seed % 2])
    prices = grid.prices(3, slots)
    for _ in range(30):
        rows = [survivals([rng.random() ** 0.3 for _ in range(rng.randint(0, slots))]) for _ in range(3)]
        taken = [0 if row else rng.randint(0, 2) for row in rows]
        price = rng.uniform(0.2, 3)
        for worth in (lambda t, s, price=price: t - price * s), (lambda t, s: (3 + t) / (0.2 + s)):
            def value(counts, rows=rows, worth=worth):
                tokens = sum(sum(row[:count]) for row, count in zip(rows, counts, strict=True))
                return worth(tokens, prices.seconds(sum(counts), max(counts)))

            best = max(map(value, all_counts(rows, taken)))
            assert value(search(rows, taken, prices, worth)) == pytest.approx(best)


def test_the_ranking_leaves_no_gap():
    rows = [survivals((1.0, 1.0, 0.5)), survivals((0.9, 1.0, 1.0)), []]
    order = [(request, slot) for _, slot, request in ranked(rows)]
    assert order == [(0, 1), (0, 2), (1, 1), (1, 2), (1, 3), (0, 3)]
    assert [top(rows, n) for n in range(7)] == [
        [0, 0, 0], [1, 0, 0], [2, 0, 0], [2, 1, 0], [2, 2, 0], [2, 3, 0], [3, 3, 0]]


@pytest.mark.parametrize("stop", [True, False])
def test_a_climb_goes_down_the_ranking(stop):
    rows = [survivals((0.9, 0.9, 0.9)), survivals((0.85, 0.5)), survivals((0.3,))]
    asked = []

    def admits(request, slot, survival, drafts, further, widest):
        asked.append((request, slot))
        assert (further, widest) == (sum(drafts), max(drafts)) and drafts[request] == slot - 1
        assert survival == rows[request][slot - 1]
        return (request, slot) != (0, 2)

    drafts = climb(rows, [0, 0, 0], admits, stop)
    assert asked == [(0, 1), (1, 1), (0, 2)] + ([] if stop else [(1, 2), (2, 1)])
    assert drafts == ([1, 1, 0] if stop else [1, 2, 1])


# What policies decide


def flat(count):
    return CostGrid.from_curve(CostCurve({n: 1 + 0.001 * n for n in range(1, 200)}), [count], GAMMA)


@pytest.mark.parametrize("text", MODELLED)
def test_rows_go_where_survival_is_high(text):
    """A budget that does not reach for all goes to the sure request first."""
    grid = CostGrid.from_curve(CostCurve({n: 1 + 0.25 * n for n in range(1, 64)}), [2], GAMMA)
    policy = make_batch_policy(text, GAMMA, True, grid)
    sure, doubtful = (0.95,) * GAMMA, (0.4,) * GAMMA
    for index in range(1, 12):
        slots = policy.before([Line("sure", left=99), Line("doubtful", left=99)])
        policy.learn({name: landed(index, own[: slots[name]], drafts=min(1, slots[name]), accepted=min(1, slots[name]))
                      for name, own in (("sure", sure), ("doubtful", doubtful))})
    slots = policy.before([Line("sure", left=99), Line("doubtful", left=99)])
    plan = policy.after([Line(name, 99, proposed=slots[name], confidences=own[: slots[name]] or None)
                         for name, own in (("sure", sure), ("doubtful", doubtful))])
    assert plan.drafts["sure"] > plan.drafts["doubtful"]


@pytest.mark.parametrize(("rows", "stops", "crosses"), [
    pytest.param({1: 1.0, 2: 1.0, 6: 1.9, 24: 9.0}, [0, 0], [2, 2], id="at-once"),
    pytest.param({1: 1.0, 4: 1.0, 8: 1.5, 40: 9.0}, [1, 1], [3, 3], id="behind-rows-that-pay"),
])
def test_auto_crosses_a_step_where_the_paper_stops(rows, stops, crosses):
    """The first row of a step does not pay, four of them do."""
    grid, good = CostGrid.from_curve(CostCurve(rows), [2], GAMMA).only("packed"), [(0.9,) * GAMMA] * 2
    assert drafts_of(taught_batch("paper", grid, 2, kind="steady"), good) == stops
    assert drafts_of(taught_batch("auto", grid, 2, kind="steady"), good) == crosses


@pytest.mark.parametrize(("layout", "drafts"), [("packed", [7, 0]), ("rectangular", [7, 7])])
@pytest.mark.parametrize("text", ["paper", "auto"])
def test_the_layout_is_chosen_by_its_price(text, layout, drafts):
    """Packed rows cost each; a rectangle is paid by its width, so that poor slots in it are free."""
    packed = {(2, n): 1 + 0.05 * (n - 2) for n in range(2, 17)}
    rectangular = {(2, n): 1 + (0.2 if layout == "packed" else 0.02) * (n - 1) for n in range(1, 9)}
    policy = make_batch_policy(text, GAMMA, True, CostGrid(packed, rectangular))
    policy.before([Line(0, left=99), Line(1, left=99)])
    plan = policy.after(lines((0.99,) * GAMMA, (0.02,) + (0.9,) * (GAMMA - 1)))
    assert plan.layout == layout
    if text == "auto":
        assert [plan.drafts[0], plan.drafts[1]] == drafts


@every_grid
def test_the_production_form_fixes_the_rows_and_leaves_the_slots_to_the_device(grid):
    """Told this round's confidences it gives as many rows as without, to the best slots."""
    policy, rng, pool = taught_batch("lagged", grids(3)[grid], 3), random.Random(2), vectors(12, seed=3)
    for _ in range(8):
        here = [replace(line, proposed=rng.randint(1, GAMMA)) for line in lines(*rng.sample(pool, 3))]
        unread, read = policy.after([replace(line, confidences=None) for line in here]), policy.after(here)
        assert unread.layout == read.layout and unread.seconds == read.seconds
        if unread.ranked is None:
            assert unread.drafts == read.drafts, "what the host decides is not this round's"
            continue
        rows = [survivals(policy.current(line)) for line in here]
        assert unread.layout == "packed" and unread.ranked.requests == (0, 1, 2)
        assert unread.drafts == {line.request: line.proposed for line in here}
        assert unread.ranked.scale == policy.refine.scale != 1
        assert read.drafts == dict(enumerate(top(rows, unread.ranked.further)))


@pytest.mark.parametrize(("fixed", "proposed", "price", "ranked"), [
    pytest.param([None, None], [7, 7], 0.1, True, id="a-choice"),
    pytest.param([None, None], [7, 7], 0.0, False, id="all-slots"),
    pytest.param([None, None], [7, 7], 9.0, False, id="no-slot"),
    pytest.param([None, None], [7, 0], 0.1, False, id="one-drafts"),
    pytest.param([None, 2], [7, 2], 0.1, False, id="one-is-free"),
])
def test_the_host_decides_where_there_is_no_choice(fixed, proposed, price, ranked):
    grid = CostGrid({(2, n): 1 + price * (n - 2) + (n > 9) * bool(price) for n in range(2, 17)})
    policy = make_batch_policy("lagged", GAMMA, True, grid)
    here = [Line(b, left=99, fixed=own) for b, own in enumerate(fixed)]
    policy.before(here)
    plan = policy.after([replace(line, proposed=count) for line, count in zip(here, proposed)])
    assert (plan.ranked is not None) == ranked
    if ranked:
        assert plan.drafts == {0: 7, 1: 7} and 0 < plan.ranked.further < 14
    else:
        assert all(plan.drafts[b] <= count for b, count in enumerate(proposed))


@every_policy
def test_a_plan_says_what_it_expects(text):
    policy, own = taught_batch(text, grids(2)["linear"], 2), [(0.9,) * GAMMA, (0.6,) * GAMMA]
    slots = policy.before([Line(0, left=99), Line(1, left=99)])
    plan = policy.after([replace(line, proposed=slots[b], confidences=own[b][: slots[b]])
                         for b, line in enumerate(lines(*own))])
    assert set(plan.drafts) == set(plan.reasons) == {0, 1} and plan.policy == text
    assert plan.schedule(1).drafts == plan.drafts[1] and plan.schedule(1).reason == plan.reasons[1]
    if text in ("paper", "lagged", "auto"):
        tokens = 2 + sum(sum(survivals(own[b])[: plan.drafts[b]]) for b in range(2))
        assert plan.expected_tokens == pytest.approx(tokens, rel=0.1)  # the refinement is not quite 1
        assert plan.seconds > grids(2)["linear"].cheaper([count + 1 for count in plan.drafts.values()])[1]


@every_policy
@pytest.mark.parametrize("left", [0, 1, 3])
def test_nothing_is_drafted_that_is_of_no_use(text, left):
    policy = make_batch_policy(text, GAMMA, True, flat(2))
    for index in range(1, 4):
        slots = policy.before([Line("short", left=left), Line("long", left=99)])
        assert slots["short"] <= left
        assert slots["long"] == {"plain": 0, "fixed:4": 4}.get(text, GAMMA)
        plan = policy.after([Line(name, 99, proposed=slots[name], confidences=(0.9,) * slots[name] or None)
                             for name in ("short", "long")])
        assert plan.drafts["short"] == slots["short"] and plan.drafts["long"] == slots["long"]
        policy.learn({name: landed(index, (0.9,) * slots[name], slots[name], slots[name]) for name in slots})


@pytest.mark.parametrize("text", MODELLED)
@pytest.mark.parametrize("fixed", [0, 2])
def test_a_fixed_width_is_kept_and_its_rows_are_priced(text, fixed):
    """A request whose width is not to choose takes rows that others would pay for."""
    step = CostGrid.from_curve(CostCurve({1: 1.0, 4: 1.0, 40: 9.0}), [2], GAMMA)
    policy = make_batch_policy(text, GAMMA, True, step)
    for index in range(1, 4):
        here = [Line("kept", left=99, fixed=fixed), Line("free", left=99)]
        slots = policy.before(here)
        assert slots["kept"] == fixed and slots["free"] in ((0, GAMMA) if text == "auto" and fixed == 2 else (GAMMA,))
        plan = policy.after([replace(line, proposed=slots[line.request],
                                     confidences=(0.95,) * slots[line.request] or None) for line in here])
        assert plan.drafts == {"kept": fixed, "free": 2 - fixed}
        policy.learn({name: landed(index, (0.95,) * slots[name], plan.drafts[name], plan.drafts[name])
                      for name in slots})


def test_confidences_of_a_fixed_width_are_no_look_at_the_others():
    """A request with a policy of its own may have been read although the batch does without."""
    policy = taught_batch("auto", grids(2)["linear"], 2)
    policy.before([Line(0, left=99), Line(1, left=99, fixed=2)])
    unread = [Line(0, 99, proposed=GAMMA), Line(1, 99, proposed=2, fixed=2)]
    read = [unread[0], replace(unread[1], confidences=(0.99, 0.99))]
    assert policy.after(read).drafts == policy.after(unread).drafts
    assert policy.after(read).reasons == {0: "from past rounds", 1: "fixed width"}


@pytest.mark.parametrize("text", EVERY_POLICY)
def test_requests_come_and_go(text):
    policy = make_batch_policy(text, GAMMA, True, flat(4))
    alive = []
    for index in range(1, 40):
        alive = [*alive, index][-(index % 4 + 1) :]
        slots = policy.before([Line(request, left=99) for request in alive])
        plan = policy.after([Line(request, 99, proposed=slots[request],
                                  confidences=(0.9,) * slots[request] if slots[request] else None)
                             for request in alive])
        assert set(plan.drafts) == set(slots) == set(alive)
        rounds = {request: landed(1, (0.9,) * slots[request], plan.drafts[request]) for request in alive}
        policy.learn({**rounds, "never seen": landed(1, (0.9,) * GAMMA), "prefill": replace(landed(0, ()), rows=0)})
        policy.learn({})


@pytest.mark.parametrize("packed", [lambda n: (1.0, 1.4, 1.2, 2.0)[n % 4], float], ids=["dips", "hopeless"])
def test_noise_in_the_measured_costs_does_no_harm(packed):
    """Two requests that draft cheaper than one, and rows that cost less than fewer."""
    grid = CostGrid({(2, n): packed(n) for n in range(2, 17)}, {(2, n): 2 * packed(n) for n in range(1, 9)},
                    draft={(1, 7): 0.5, (2, 7): 0.1})
    contents = sim.made_up_load("swinging", 2, 200, 0)
    for text in MODELLED:
        assert sim.replay_load(make_batch_policy(text, GAMMA, True, grid), contents, grid).tokens >= 400


def test_a_new_request_starts_from_what_slots_are_like():
    policy = taught_batch("auto", grids(1)["flat"], 1, kind="steady")
    policy.before([Line("new", left=99)])
    assert policy.known["new"].forecast.expected() == pytest.approx([0.75] * GAMMA, abs=0.1)
    assert policy.known["new"].forecast.rounds > WARM_UP


# One request


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
@pytest.mark.parametrize(("text", "single"), [("paper", "paper"), ("search", "lagged")])
def test_with_one_request_the_papers_policies_decide_as_alone(text, single, curve):
    grid = CostGrid.from_curve(curve, [1], GAMMA)
    alone, batch = taught(single, curve), make_batch_policy(text, GAMMA, True, grid)
    content = sim.made_up_load("swinging", 1, 40, 0)[0]
    alone = make_policy(single, GAMMA, True, curve)
    history = []
    for index, own in enumerate(map(tuple, content.confidences.tolist()), start=1):
        slots = (alone.before(history), batch.before([Line(0, left=99)])[0])
        assert slots == (GAMMA, GAMMA)
        drafts = alone.after(GAMMA, own).drafts
        if index > 2:  # before that the production form takes every slot, and this one what is expected to pay
            assert batch.after(lines(own)).drafts == {0: drafts}
        history = [landed(index, own, drafts, min(drafts, 1))]
        batch.learn({0: history[0]})


class Alone:
    """A policy of the single stream, as one for several requests of which there is one."""

    def __init__(self, policy):
        self.name, self._policy, self._history = policy.name, policy, deque(maxlen=4)

    reads_confidence = property(lambda self: self._policy.reads_confidence)
    uses_confidence = property(lambda self: self._policy.uses_confidence)

    def before(self, lines):
        return {0: self._policy.before(self._history)}

    def after(self, lines):
        own = self._policy.after(lines[0].proposed, lines[0].confidences)
        return Plan({0: own.drafts}, PACKED, self.name, {0: own.reason})

    def reflect(self):
        """The single stream learns with its next question."""

    def learn(self, landed):
        self._history.append(landed[0])


@pytest.mark.parametrize("kind", ["steady", "swinging"])
@pytest.mark.parametrize("name", ["flat", "linear", "row-cost-1", "stepped", "jump-then-flat", "dropping"])
def test_with_one_request_auto_is_as_good_as_alone(name, kind):
    curve = replace(CURVES[name], read=0.02)
    grid, contents = CostGrid.from_curve(curve, [1], GAMMA), sim.made_up_load(kind, 1, 500, 7)
    alone, batch = (sim.replay_load(policy, contents, grid).rate for policy in (
        Alone(make_policy("auto", GAMMA, True, curve)), make_batch_policy("auto", GAMMA, True, grid)))
    assert batch >= 0.985 * alone, (batch, alone)


@pytest.mark.parametrize("text", MODELLED)
@pytest.mark.parametrize(("finish", "moves"), [(None, True), ("stop", False)])
def test_a_text_that_was_cut_does_not_teach_a_rejection(text, finish, moves):
    """After a stop token nobody knows whether the next draft was right."""
    policy = make_batch_policy(text, GAMMA, True, flat(1))
    slots = policy.before([Line(0, left=99)])
    policy.after(lines((0.9,) * slots[0]))
    policy.learn({0: replace(landed(1, (0.9,) * GAMMA, 4, 2), finish=finish)})
    policy.reflect()
    assert (policy.refine.scale != 1) == moves
    assert (policy.known[0].shift.value != 0) == (moves and text == "auto")


# Names


@pytest.mark.parametrize(("text", "gamma", "grid", "name"), [
    (None, GAMMA, flat(1), "auto"), (None, GAMMA, None, "fixed"), (None, 0, None, "plain"),
    ("fixed:3", GAMMA, None, "fixed:3"), ("plain", 0, None, "plain"), ("search", GAMMA, flat(1), "search"),
])
def test_names_and_defaults(text, gamma, grid, name):
    assert make_batch_policy(text, gamma, True, grid).name == name


def test_without_a_confidence_head_the_block_is_verified():
    policy = make_batch_policy(None, GAMMA, False, flat(2))
    assert policy.before([Line(0, left=99), Line(1, left=2)]) == {0: GAMMA, 1: 2} and not policy.reads_confidence


@pytest.mark.parametrize("text", EVERY_POLICY)
def test_what_is_read(text):
    policy = make_batch_policy(text, GAMMA, True, flat(1))
    assert isinstance(policy, BatchAuto) == (text == "auto")
    assert policy.reads_confidence == (text in ("paper", "auto"))
    assert policy.uses_confidence == (text in MODELLED)


@pytest.mark.parametrize(("text", "gamma", "confidence", "grid", "fragments"), [
    pytest.param("fast", GAMMA, True, None, ["'fast'", "plain, fixed:N", "auto"], id="unknown"),
    pytest.param("threshold:0.5", GAMMA, True, None, ["'threshold:0.5'", "several requests"], id="one-request-only"),
    pytest.param("rate", GAMMA, True, flat(1), ["'rate'", "several requests"], id="one-request-only-by-costs"),
    pytest.param("fixed:9", GAMMA, True, None, ["'fixed:9'", "1 to 7"], id="too-wide"),
    pytest.param("fixed", 0, True, None, ["'fixed'", "--draft"], id="fixed-without-draft"),
    pytest.param("auto", 0, True, flat(1), ["'auto'", "--draft"], id="no-draft"),
    pytest.param("auto", GAMMA, False, flat(1), ["'auto'", "confidence head", "fixed:7"], id="no-head"),
    pytest.param("paper", GAMMA, True, None, ["'paper'", "costs of this machine"], id="no-grid"),
])
def test_errors_name_the_value_and_the_remedy(text, gamma, confidence, grid, fragments):
    with pytest.raises(ValueError) as caught:
        make_batch_policy(text, gamma, confidence, grid)
    assert "\n" not in str(caught.value)
    assert all(fragment in str(caught.value) for fragment in fragments), caught.value


# Decisions that stand


def dear(decide, curve="flat", requests=3):
    """A grid on which looking does not pay and deciding costs so much a request."""
    return replace(CostGrid.from_curve(CURVES[curve], [requests], GAMMA), read=5.0, decide_request=decide)


def watched(policy):
    """(decided anew, plan, listened to) of every round to come."""
    after, rounds = policy.after, []

    def recorded(lines):
        plan = after(lines)
        rounds.append((policy.decides, plan, policy.uses_confidence))
        return plan
    policy.after = recorded
    return rounds


def replayed(grid, kind="steady", rounds=400, requests=3, seed=2):
    policy = make_batch_policy("auto", GAMMA, True, grid)
    record = watched(policy)
    return policy, record, sim.replay_load(policy, sim.made_up_load(kind, requests, rounds, seed), grid)


def test_decisions_stand_where_new_ones_cost_more_than_they_bring():
    _, rounds, _ = replayed(dear(0.05))
    first = next(at for at, (decided, _, _) in enumerate(rounds) if decided and at >= 200)
    late = rounds[first:]
    assert any(plan.drafts[0] for _, plan, _ in late)
    starts = [at for at, (decided, _, _) in enumerate(late) if decided]
    cycles = [late[start:end] for start, end in itertools.pairwise(starts)]
    for (_, plan, _), *stood in cycles:
        assert all(later is plan for _, later, _ in stood)
    assert STAND // 2 < max(map(len, cycles)) <= STAND and len(starts) <= 0.3 * len(late)
    for cycle in cycles:
        heard = [listened for _, _, listened in cycle]
        assert heard[-1] and not any(heard[1:-1]), "in the round before the next decision"
    judged = [cycle[0][2] for cycle in cycles if len(cycle) > 1]
    assert 0.3 < sum(judged) / len(judged) < 0.7, "and in every other of a decision's own"


def test_decisions_are_made_anew_where_that_is_free():
    _, rounds, _ = replayed(dear(0.0))
    assert all(decided and listened for decided, _, listened in rounds)


def test_decisions_that_keep_badly_are_made_anew():
    """The same price of deciding: content that changes every few rounds is worth it."""
    decided = {"steady": 0, "swinging": 0}
    for kind, seed in itertools.product(decided, range(3)):
        policy = make_batch_policy("auto", GAMMA, True, dear(0.02))
        rounds, texts = watched(policy), [made_up(kind, 400, 10 * seed + own, GAMMA, 20) for own in range(3)]
        sim.replay_load(policy, texts, dear(0.02))
        decided[kind] += sum(own for own, _, _ in rounds[200:])
    assert decided["swinging"] > 1.2 * decided["steady"], decided


def test_nobody_drafts_where_context_makes_proposals_dear():
    policy, rounds, _ = replayed(replace(dear(0.0), draft_slope={(3, GAMMA): 3e-4}))
    assert rounds[-1][1].drafts[0]
    for depth, drafts in (0, True), (20000, False):
        slots = copy.deepcopy(policy).before([Line(request, left=99, depth=depth) for request in range(3)])
        assert any(slots.values()) == drafts


def test_standing_is_cheaper_in_all(monkeypatch):
    standing = replayed(dear(0.05))[2].rate
    monkeypatch.setattr(batch_auto, "STAND", 1)
    assert standing > 1.01 * replayed(dear(0.05))[2].rate


def standing(drafting=True):
    """A policy whose decision for three requests is good for the next round."""
    grid = replace(CostGrid.from_curve(CURVES["flat" if drafting else "linear"], [3, 6], GAMMA), read=5.0,
                   decide_request=0.05)
    policy, same = make_batch_policy("auto", GAMMA, True, grid), [Line(request, left=99) for request in range(3)]
    contents = sim.made_up_load("steady", 3, 400, 2)
    sim.replay_load(policy, contents if drafting else [replace(c, passes=0 * c.passes, confidences=0.1 + 0 * c.passes)
                                                       for c in contents], grid)
    while True:
        slots = policy.before(same)
        plan = policy.after([replace(line, proposed=slots[line.request]) for line in same])
        if policy.decides and not policy.uses_confidence and any(slots.values()) == drafting:
            return policy, same, slots, plan


def proposed(policy, lines):
    slots = policy.before(lines)
    return slots, policy.after([replace(line, proposed=slots[line.request]) for line in lines])


def test_a_decision_stands_while_requests_come_and_go():
    policy, same, slots, plan = standing()
    width = max(slots.values())
    joined, planned = proposed(policy, [*same[1:], Line("new", left=99)])
    assert not policy.decides and joined == {1: slots[1], 2: slots[2], "new": width}
    assert planned.drafts == {1: plan.drafts[1], 2: plan.drafts[2], "new": planned.drafts["new"]}
    least = min(count for count in plan.drafts.values() if count)
    assert 0 < planned.drafts["new"] <= width and abs(planned.drafts["new"] - least) <= 1
    assert planned.reasons.keys() == planned.drafts.keys() == {1, 2, "new"}
    ending, planned = proposed(policy, [same[1], replace(same[2], left=1), Line("new", left=0)])
    assert not policy.decides and ending == {1: slots[1], 2: 1, "new": 0}
    assert planned.drafts == {1: plan.drafts[1], 2: min(1, plan.drafts[2]), "new": 0}


def probing(gains, cost, lead=0.0, parked=0):
    """(who drafts, each one's reason, rounds until the next probe) where nobody's draft is expected to pay."""
    policy = make_batch_policy("auto", GAMMA, True, grids(4)["flat"])
    policy.before([Line(request, left=99) for request in range(len(gains))])
    lot = policy.lot
    lot.tokens, lot.lead = 1000, lead
    for request in range(len(gains)):
        lot[request].parked = parked
    drafting = lot.decide(dict.fromkeys(range(len(gains)), -1.0), dict(enumerate(gains)),
                          Shares((), [0.0] + [cost] * len(gains)), Odds(), {})
    return drafting, {lot[request].why for request in range(len(gains))}, lot.probes_in


def test_where_nobody_drafts_all_look_again_together():
    """Most of a proposal is paid with the first of them."""
    for parked, probes in (100, True), (1, False):
        drafting, reasons, _ = probing((0.0,) * 4, 1.0, parked=parked)
        assert drafting == (set(range(4)) if probes else set()) and (reasons == {PROBE}) == probes


@pytest.mark.parametrize("reasons, price, follow", [
    ((PROBE,) * 4, 0.5, {0, 1, 2, 3}), ((PROBE,) * 4, 0.6, set()), ((PROBE, PROBE, "it pays", PROBE), 0.5, {0, 1}),
], ids=["together they pay", "together they do not", "beside one that drafts"])
def test_what_probed_together_is_judged_together(reasons, price, follow):
    """Two that paid would draft alone next, and lose: what they bought was for four."""
    grid = replace(CostGrid.from_curve(CURVES["flat"], [4], GAMMA), draft={(4, GAMMA): 4 * price})
    policy = make_batch_policy("auto", GAMMA, True, grid)
    policy.before([Line(request, left=99) for request in range(4)])
    plain = policy._plain_rate([0] * 4)
    policy.grid = replace(grid, draft={(4, GAMMA): 4 * price / plain})
    policy.learn({request: sim.landed(1, GAMMA, 0, Schedule(1, "auto", reason), (0.9 if request < 2 else 0.3,) * GAMMA)
                  for request, reason in enumerate(reasons)})
    policy.reflect()
    assert {request for request in range(4) if policy.lot[request].follow} == follow


@pytest.mark.parametrize("gains, cost, lead, drafts", [
    ((0.1,) * 4, 0.41, 0.0, True), ((0.1,) * 4, 4.0, 0.0, False), ((0.1,) * 4, 0.41, -10.1, False),
    ((0.1,), 0.11, 0.0, False),
], ids=["nearly pays", "clearly loses", "has lost too much before", "alone"])
def test_a_batch_is_not_parked_for_less_than_looking_again_costs(gains, cost, lead, drafts):
    """The stake bounds what that may lose in the long run."""
    drafting, reasons, probes_in = probing(gains, cost, lead)
    assert drafting == (set(range(len(gains))) if drafts else set())
    assert (reasons == {WATCH}) == drafts and (probes_in == float("inf")) == drafts


@pytest.mark.parametrize("change", ["fixed", "many more"])
def test_a_decision_is_not_for_others(change):
    policy, same, _, _ = standing()
    other = {"fixed": [*same[:2], replace(same[2], fixed=2)],
             "many more": [*same, *(Line(request, left=99) for request in range(3, 6))]}[change]
    control = copy.deepcopy(policy)
    control.before(same)
    policy.before(other)
    assert policy.decides and not control.decides


def test_where_nobody_drafts_a_new_request_is_a_reason_to_decide():
    policy, same, slots, _ = standing(drafting=False)
    assert not any(slots.values())
    control = copy.deepcopy(policy)
    control.before(same[:2])
    policy.before([*same, Line("new", left=99)])
    assert policy.decides and not control.decides


def test_rounds_that_are_taken_in_late_decide_the_same(monkeypatch):
    late, learn = replayed(dear(0.05), "swinging"), BatchAuto.learn
    monkeypatch.setattr(BatchAuto, "learn", lambda self, landed: (learn(self, landed), self._catch_up()))
    at_once = replayed(dear(0.05), "swinging")
    assert sum(decided for decided, _, _ in late[1]) < 0.7 * len(late[1])
    late[0].reflect()  # on the last round
    assert late[1:] == at_once[1:] and late[0].lot.lead == pytest.approx(at_once[0].lot.lead)


def test_what_is_put_off_is_judged_by_what_was_known_then(monkeypatch):
    """Verdicts come a round later, and are the same."""
    monkeypatch.setattr(batch_auto.Load, "learned", True)
    verdicts, judge = [], BatchAuto._judge

    def told(self, case):
        judge(self, case)
        load = self._load(3)
        verdicts.append([case.requests, case.looked, *(mean.value for mean in load.deep.values()), load.stale.value])
    monkeypatch.setattr(BatchAuto, "_judge", told)
    policy = make_batch_policy("auto", GAMMA, True, dear(0.05))
    policy.before([Line(request, left=99) for request in range(3)])
    rng, twin = random.Random(4), copy.deepcopy(policy)
    for index in range(1, 6):
        rounds = {request: sim.landed(index, GAMMA, 1, Schedule(2, "auto", "it pays"), [rng.random() for _ in range(7)])
                  for request in range(3)}
        for own, late in (policy, False), (twin, True):
            own.learn(rounds)
            own._catch_up()
            if not late:
                own.reflect()
    at_once = len(verdicts)
    twin.reflect()
    assert at_once == 5 and verdicts[:5] == verdicts[5:]


def test_where_nobody_drafts_a_decision_stands_until_a_probe_is_due_and_affordable():
    policy, rounds, load = replayed(dear(0.05, "row-cost-1"), "swinging", rounds=1200)
    late = rounds[200:]
    probing = [plan for _, plan, _ in late if PROBE in plan.reasons.values()]
    assert load.parked > 0.98 and probing and policy.lot.lead > -0.02 * policy.lot.tokens
    assert sum(decided for decided, _, _ in late) < 0.06 * len(late)


def test_parked_requests_go_on_waiting_while_a_decision_stands(monkeypatch):
    """Pauses between probes are counted in rounds, whoever decided them; counted in decisions, few would be left."""
    found = {1: 0, STAND: 0}
    for stand, seed in itertools.product(found, range(12, 18)):  # one run alone may have ten times another's probes
        monkeypatch.setattr(batch_auto, "STAND", stand)
        _, rounds, load = replayed(dear(0.05, "linear"), "swinging", rounds=1500, seed=seed)
        assert load.parked > 0.7
        assert sum(decided for decided, _, _ in rounds) <= 0.5 * len(rounds) or stand == 1
        probes = [decided for decided, plan, _ in rounds if PROBE in plan.reasons.values()]
        assert all(probes), "a probe is a decision, and it does not stand"
        found[stand] += len(probes)
    assert found[STAND] >= 0.5 * found[1] > 30, found
