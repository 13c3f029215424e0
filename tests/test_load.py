"""Many requests in modelled time: the replay itself, the bars, and rows that shrink as load grows.

The bars hold for 1,200 rounds of every request. The suite runs fewer; MLX_DSPARK_TEST_LOAD_ROUNDS=1200 runs them all.
"""

import functools
import itertools
import os
from dataclasses import replace

import numpy as np
import pytest

from mlx_dspark.schedule import load as sim
from mlx_dspark.schedule.batch import Line, make_batch_policy
from mlx_dspark.schedule.cost import CostCurve
from mlx_dspark.schedule.grid import CostGrid
from mlx_dspark.schedule.simulate import Content, best_fixed, fixed_rate, made_up
from mlx_dspark.simulate import published_curves, with_draft

ROUNDS = int(os.environ.get("MLX_DSPARK_TEST_LOAD_ROUNDS", 150))
RUN_IN = 2.0  # rounds whose tokens a run may lose before it knows its content
GAMMA = 7
LOADS = (4, 8, 16)
PUBLISHED = {name: with_draft(curve, 0.12, GAMMA) for name, curve in published_curves().items()}
MADE_UP = {  # relative to one row; the draft costs 5% of it
    "rising": {n: 0.97 + 0.03 * n for n in range(1, 129)},
    "steep": {n: 0.65 + 0.38 * n for n in range(1, 129)},
    "stepped": {n: 1 + 0.5 * ((n - 1) // 5) for n in range(1, 129)},
}
CURVES = {**PUBLISHED, **{name: CostCurve(rows, draft={GAMMA: 0.05}) for name, rows in MADE_UP.items()}}
WORTH_FOLLOWING = [*itertools.product(["rising", "stepped"], LOADS), ("m4pro-27b-4bit", 4),
                   ("m4pro-9b-bf16-mlx0320", 4), ("m3ultra-mlp-4bit", 4), ("m3ultra-mlp-4bit", 8),
                   ("m5max-70b-4bit", 4)]


@functools.cache
def contents_of(kind, requests, rounds=ROUNDS, seed=1):
    return sim.made_up_load(kind, requests, rounds, seed)


@functools.cache
def grid_of(name, requests):
    return CostGrid.from_curve(CURVES[name], [requests], GAMMA)


@functools.cache
def run_of(name, requests, text="auto", kind="swinging", rounds=ROUNDS):
    grid = grid_of(name, requests)
    return sim.replay_load(make_batch_policy(text, GAMMA, True, grid), contents_of(kind, requests, rounds), grid)


# The bars


@pytest.mark.parametrize("kind", ["steady", "swinging"])
@pytest.mark.parametrize("requests", LOADS)
@pytest.mark.parametrize("name", CURVES)
def test_auto_is_never_behind_plain_and_the_best_fixed_width(name, requests, kind):
    run, (width, best) = run_of(name, requests, kind=kind), sim.best_fixed_load(contents_of(kind, requests),
                                                                               grid_of(name, requests))
    told = f"auto {run.rate:.4f}, fixed:{width} {best:.4f}, rows {run.rows_per_request:.2f}, parked {run.parked:.2f}"
    print(f"BAR {name:24s} {kind:9s} {requests:2d} {run.rate / best:.3f} {told}")
    assert run.rate >= (0.99 - RUN_IN / ROUNDS) * best, told


@pytest.mark.parametrize(("name", "requests"), WORTH_FOLLOWING)
def test_where_rows_differ_in_worth_auto_is_ahead(name, requests):
    best = sim.best_fixed_load(contents_of("swinging", requests), grid_of(name, requests))[1]
    assert run_of(name, requests).rate >= 1.05 * best


@pytest.mark.parametrize("text", ["paper", "search", "lagged", "auto"])
def test_rows_per_request_shrink_as_load_grows(text):
    """The paper's figure 8: rows go from most of the block to next to none, without a jump back."""
    rows = [run_of("rising", requests, text, "steady", 40).rows_per_request for requests in (1, 2, 4, 8, 16, 32, 64)]
    assert all(b <= a + 0.05 for a, b in itertools.pairwise(rows)), rows
    assert rows[0] > 4.5 and rows[-1] < 0.65 * rows[0] and max(a - b for a, b in itertools.pairwise(rows)) < 2, rows


def test_old_confidences_are_worth_less_than_this_rounds():
    """The order of the paper's forms: budget and ranking old, budget old, neither old."""
    rates = [run_of("rising", 8, text).rate for text in ("search", "lagged", "paper")]
    assert rates == sorted(rates) and rates[0] < 0.95 * rates[-1]


@pytest.mark.parametrize("requests", LOADS)
def test_where_nothing_pays_everybody_is_parked_and_probes_back_off(requests):
    grid = CostGrid.from_curve(CostCurve({n: float(n) for n in range(1, 200)}, draft={GAMMA: 0.25}), [requests], GAMMA)
    contents = contents_of("swinging", requests, 300)
    run = sim.replay_load(make_batch_policy("auto", GAMMA, True, grid), contents, grid)
    plain = sim.fixed_load_rate(0, contents, grid)
    assert run.parked > 0.95 and run.rate > 0.985 * plain


def test_probes_back_off_though_their_rounds_land_late():
    """The engine starts the next round before one without drafts has landed."""
    grid = CostGrid.from_curve(CostCurve({n: float(n) for n in range(1, 64)}, draft={GAMMA: 0.1}), [4], GAMMA)
    policy, drafted, late = make_batch_policy("auto", GAMMA, True, grid), [], None
    poor = (0.2,) * GAMMA
    for index in range(1, 1500):
        slots = policy.before([Line(b, left=99) for b in range(4)])
        plan = policy.after([Line(b, 99, proposed=slots[b], confidences=poor if slots[b] else None) for b in range(4)])
        assert not any(plan.drafts.values()) or index < 10
        if late is not None:
            policy.learn(late)
        late = {b: sim.landed(index, slots[b], 0, plan.schedule(b), poor) for b in range(4)}
        drafted.append(sum(map(bool, slots.values())))
    assert 0 < sum(drafted[-500:]) < 0.5 * sum(drafted[:500])


def test_a_poor_request_is_parked_beside_a_good_one():
    grid = CostGrid.from_curve(CostCurve({n: 1 + 0.3 * n for n in range(1, 64)}, draft={GAMMA: 0.1}), [1, 2], GAMMA)
    good, poor = (np.full((400, GAMMA), level) for level in (0.95, 0.2))
    rng = np.random.default_rng(0)
    contents = [Content(own, rng.random(own.shape) < own) for own in (good, poor)]
    drafted = {0: 0, 1: 0}
    policy = make_batch_policy("auto", GAMMA, True, grid)
    before = policy.before

    def counted(lines):
        slots = before(lines)
        for request in slots:
            drafted[request] += bool(slots[request])
        return slots

    policy.before = counted
    sim.replay_load(policy, contents, grid)
    assert drafted[0] > 390 and drafted[1] < 120, "a probe beside a proposal costs little"


def test_the_second_read_is_not_bought_where_it_is_dear():
    contents = contents_of("steady", 4)
    rates = []
    for read in (0.0, 0.3):
        grid = replace(grid_of("rising", 4), read=read)
        rates.append(sim.replay_load(make_batch_policy("auto", GAMMA, True, grid), contents, grid).rate)
    assert 0.93 * rates[0] < rates[1] < rates[0]
    paid = replace(grid_of("rising", 4), read=0.3)
    assert rates[1] > 1.05 * sim.replay_load(make_batch_policy("paper", GAMMA, True, paid), contents, paid).rate


@pytest.mark.parametrize("name", ["rising", "stepped"])
def test_where_looks_are_dear_the_device_ranks_better_than_forecasts(name):
    """A calibration that is no temperatures keeps the device from ranking; it changes nothing else."""
    grid, contents = replace(grid_of(name, 8), read=0.2), contents_of("swinging", 8, 300)
    by_device, by_forecast = (sim.replay_load(make_batch_policy("auto", GAMMA, True, grid, calibrate), contents, grid)
                              for calibrate in (tuple, lambda confidences: tuple(confidences)))
    assert by_device.rate > 1.02 * by_forecast.rate


def test_the_device_does_not_rank_where_that_is_dear():
    contents, rates = contents_of("swinging", 4), {}
    for dear in (0.0, 0.1):
        grid = replace(grid_of("rising", 4), read=0.5, rank_request=dear)
        for text in ("auto", "lagged"):
            rates[text, dear] = sim.replay_load(make_batch_policy(text, GAMMA, True, grid), contents, grid).rate
    assert rates["lagged", 0.1] < 0.85 * rates["lagged", 0.0]
    assert 0.97 * rates["auto", 0.0] < rates["auto", 0.1] < rates["auto", 0.0]


def test_slots_that_do_not_pay_are_not_proposed():
    """A draft that costs by its slots, beside rows that are dear: few slots; now and then all, to see."""
    dear = CostCurve({n: 0.8 + 0.2 * n for n in range(1, 129)}, draft={n: 0.05 * n for n in range(1, GAMMA + 1)})
    grid, contents = CostGrid.from_curve(dear, [4], GAMMA), contents_of("swinging", 4, 600)
    policy, asked = make_batch_policy("auto", GAMMA, True, grid), []
    before = policy.before

    def counted(lines):
        slots = before(lines)
        asked.append(max(slots.values()))
        return slots

    policy.before = counted
    run = sim.replay_load(policy, contents, grid)
    late = [slots for slots in asked[200:] if slots]
    assert np.mean(late) < 4 and GAMMA in late
    whole = make_batch_policy("auto", GAMMA, True, grid)
    whole._propose = lambda drafting, *more: GAMMA if drafting else 0
    assert run.rate > 1.02 * sim.replay_load(whole, contents, grid).rate


def test_the_cheaper_layout_is_executed():
    derived = grid_of("rising", 4)
    square = replace(derived, rectangular={key: 0.8 * seconds for key, seconds in derived.rectangular.items()})
    contents = contents_of("swinging", 4)
    runs = {name: sim.replay_load(make_batch_policy("auto", GAMMA, True, grid), contents, grid)
            for name, grid in {"both": square, "packed": square.only("packed"),
                               "rectangular": square.only("rectangular")}.items()}
    assert runs["packed"].packed_share == 1 and runs["rectangular"].packed_share == 0
    assert runs["both"].packed_share < 1
    assert runs["both"].rate >= 0.99 * max(runs["packed"].rate, runs["rectangular"].rate)


# The replay itself


def test_made_up_load_swings_request_by_request():
    contents = sim.made_up_load("swinging", 3, 2000, 5)
    high = [content.confidences.mean(axis=1) > 0.65 for content in contents]
    assert all(abs(np.corrcoef(a, b)[0, 1]) < 0.2 for a, b in itertools.combinations(high, 2))
    again = sim.made_up_load("swinging", 3, 2000, 5)
    assert all(np.array_equal(a.passes, b.passes) for a, b in zip(contents, again, strict=True))
    other = sim.made_up_load("swinging", 3, 2000, 6)
    assert not any(np.array_equal(a.passes, b.passes) for a in contents for b in other)


@pytest.mark.parametrize("requests", [1, 3, 8])
@pytest.mark.parametrize("width", [0, 1, 4, 7])
def test_a_replay_of_a_fixed_width_equals_the_sum(width, requests):
    grid = replace(grid_of("m5max-70b-4bit", requests), host=0.05, host_request=0.01, read=9.0)
    contents = sim.made_up_load("swinging", requests, 80, 8)
    policy = make_batch_policy(f"fixed:{width}" if width else "plain", GAMMA, True, grid)
    run = sim.replay_load(policy, contents, grid)
    assert run.rate == pytest.approx(sim.fixed_load_rate(width, contents, grid), rel=1e-12)
    assert run.rows_per_request == width + 1 and run.parked == float(width == 0)
    passes = sum(int(np.cumprod(content.passes[:, :width], axis=1).sum()) for content in contents)
    assert run.tau == pytest.approx(1 + passes / (80 * requests))
    assert (run.requests, run.rounds, run.policy) == (requests, 80, policy.name)


def test_one_request_is_the_single_stream():
    curve, content = CURVES["m4max-30b-4bit"], made_up("swinging", 300, 1000)
    grid = CostGrid.from_curve(curve, [1], GAMMA)
    for width in range(GAMMA + 1):
        assert sim.fixed_load_rate(width, [content], grid) == pytest.approx(fixed_rate(width, content, curve))
    width, rate = best_fixed(content, curve)
    assert sim.best_fixed_load([content], grid) == (width, pytest.approx(rate))


def test_reads_are_paid_by_rounds_that_read():
    contents = sim.made_up_load("steady", 3, 50, 9)
    for text, reads in (("paper", 50), ("lagged", 0), ("search", 0), ("plain", 0)):
        grids = [replace(grid_of("rising", 3), read=read) for read in (0.0, 0.5)]
        runs = [sim.replay_load(make_batch_policy(text, GAMMA, True, grid), contents, grid) for grid in grids]
        assert runs[1].seconds - runs[0].seconds == pytest.approx(0.5 * reads), text
