"""Measuring what several requests cost: what is run, what is kept, and where."""

import functools
import json
import re
from dataclasses import replace

import mlx.core as mx
import pytest
from click.testing import CliRunner
from helpers import build_model, embedded_pair, pair_of

from mlx_dspark import profile, scheduling, store
from mlx_dspark.errors import FormatError
from mlx_dspark.profile import Timing
from mlx_dspark.schedule.cost import CostCurve
from mlx_dspark.schedule.grid import CostGrid
from mlx_dspark.serve import batch, costs
from mlx_dspark.serve.costs import Around, Together, dealt, measure_grid, packed_rows

CURVE = CostCurve({1: 1.0, 2: 1.5}, host=0.2, read=0.3, about={"machine": "m"})


class Clock:
    """Forwards whose seconds are known: the clock is set on by what they cost."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(profile.time, "perf_counter", lambda: self.now)

    def begin(self, requests, depth):
        self.calls.append(("begin", requests, depth))
        return Fake(self, requests, depth)


class Fake:
    slots, layouts = 3, ("packed", "rectangular")

    def __init__(self, clock, requests, depth):
        self.clock, self.requests, self.depth = clock, requests, depth

    def verify(self, layout, rows):
        assert len(rows) == self.requests
        self.clock.calls.append((layout, tuple(rows), self.depth))
        row = 0.1 if layout == "packed" else 0.08
        self.clock.now += 1 + row * (sum(rows) if layout == "packed" else len(rows) * max(rows)) + self.depth * 1e-3

    def propose(self, slots):
        self.clock.calls.append(("draft", slots, self.depth))
        self.clock.now += 0.01 * self.requests + 0.02 * slots + self.depth * 1e-4 * slots


pytestmark = pytest.mark.usefixtures("unmeasured")


def test_every_count_is_timed_in_both_layouts_at_two_depths(monkeypatch):
    clock = Clock(monkeypatch)
    grid = measure_grid(clock.begin, [4, 1, 2, 2], (500, 2000), CURVE)
    assert [call[1:] for call in clock.calls if call[0] == "begin"] == [
        (1, 500), (1, 2000), (2, 500), (2, 2000), (4, 500), (4, 2000)]
    assert grid.depth == 500 and grid.about["machine"] == "m" and not grid.about["short"]
    assert (grid.host, grid.read, grid.widest, grid.most_requests) == (0.2, 0.3, 4, 4)
    for requests in (1, 2, 4):
        for rows in range(requests, 4 * requests + 1):
            assert grid.packed[requests, rows] == pytest.approx(1.5 + 0.1 * rows)
        for width in range(1, 5):
            row = 0.1 if requests == 1 else 0.08  # one request is run as packed
            assert grid.rectangular[requests, width] == pytest.approx(1.5 + row * requests * width)
        assert {slots for n, slots in grid.draft if n == requests} == {1, 2, 3}
        assert grid.draft[requests, 3] == pytest.approx(0.01 * requests + 0.06 + 0.15)
        assert [grid.draft_slope[requests, slots] for slots in (1, 2, 3)] == pytest.approx([2e-4] * 3), "one for all"
    assert [*grid.packed_slope.values(), *grid.rectangular_slope.values()] == pytest.approx([1e-3] * 36)
    assert grid.verify("packed", [2, 1], [1500, 1500]) == pytest.approx(1.8 + 1.0)


def test_the_short_measurement_has_one_depth_and_fewer_rows(monkeypatch):
    clock = Clock(monkeypatch)
    grid = measure_grid(clock.begin, [8], (500, 2000), CURVE, short=True)
    assert {call[2] for call in clock.calls} == {500} and grid.packed_slope == {} and grid.about["short"]
    assert sorted(rows for _, rows in grid.packed) == [8, 12, 16, 20, 24, 28, 32]
    timed = [call for call in clock.calls if call[:2] == ("packed", (1,) * 8)]
    assert len(timed) == 1 + 3, "a warm-up and three repeats, however long they take"


def test_a_target_with_windows_is_measured_packed_only(monkeypatch):
    monkeypatch.setattr(Fake, "layouts", ("packed",))
    monkeypatch.setattr(Fake, "slots", 0)
    grid = measure_grid(Clock(monkeypatch).begin, [1, 2], (500, 500), CURVE)
    assert grid.layouts == ("packed",) and grid.draft == {} and grid.packed_slope == grid.draft_slope == {}
    assert grid.widest == 8, "without a draft as wide as the usual block"


@pytest.mark.parametrize(("requests", "widest", "rows"), [
    (1, 8, list(range(1, 9))), (3, 3, list(range(3, 10))), (8, 3, [8, 10, 12, 14, 16, 18, 20, 22, 24]),
    (16, 2, [16, 20, 24, 28, 32])])
def test_rows_that_are_timed(requests, widest, rows):
    assert packed_rows(requests, widest) == rows


@pytest.mark.parametrize(("rows", "requests", "each"), [(4, 4, [1, 1, 1, 1]), (7, 3, [3, 2, 2]), (5, 1, [5])])
def test_rows_are_dealt_out_evenly(rows, requests, each):
    assert dealt(rows, requests) == each


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_real_requests_stay_where_they_are(kind):
    together = Together(pair_of(build_model(kind), None), 2, 30)
    assert together.layouts == (("packed", "rectangular") if kind == "qwen3" else ("packed",))
    assert together.slots == 0
    for layout in together.layouts:
        for rows in ([2, 3], [4, 2]):
            together.verify(layout, rows)
            assert {part.offset for cache in together._caches for part in cache.layers} == {30}
    assert [cache.offset for cache in together._caches] == [30, 30]


def test_real_proposals_leave_no_trace():
    together = Together(embedded_pair(), 2, 20)
    before = [mx.array(together._anchor), together.slots]
    together.propose(3)
    assert mx.array_equal(before[0], together._anchor) and together.slots == embedded_pair().draft.gamma


def test_a_grid_is_kept_beside_the_curve_and_found_by_the_engine(monkeypatch):
    pair = embedded_pair()
    assert store.find_grid(pair) is None
    grid = CostGrid({(1, n): 1.0 for n in range(1, 9)} | {(2, n): 1.0 for n in range(2, 17)}, about={"x": 1})
    assert store.save_grid(pair, grid) == store.grid_path(pair)
    assert store.find_grid(pair) == grid
    policy = scheduling.batch_policy_for(pair, None, 2, ("packed",), profile=False)
    assert policy.name == "auto" and policy.grid == grid
    store.grid_path(pair).write_text("{}", encoding="utf-8")
    with pytest.raises(FormatError, match="is damaged.*profile --requests again"):
        store.find_grid(pair)


def test_the_command_measures_stores_and_prints(monkeypatch, unmeasured):
    monkeypatch.setattr(profile, "measure", lambda pair, short, progress: CURVE)
    clock = Clock(monkeypatch)
    monkeypatch.setattr(costs, "Together", lambda pair, requests, depth: clock.begin(requests, depth))
    monkeypatch.setattr(costs, "measure_around", lambda pair, requests, grid, short: Around(
        host=CURVE.host + 0.25 * requests, surplus={width: 0.2 * requests * width for width in (1, 2, 3)}, further=0.1,
        read=CURVE.read + 0.1 * requests,
        rank=0.2 * requests, decide=0.05 * requests))
    done = CliRunner().invoke(profile.command, ["--requests", "2,1", "--short"])
    assert done.exit_code == 0, done.output
    text = done.stdout.split("\n\n")[1]
    assert re.findall(r"^ +(\d+)   (\w+)", text, re.M) == [
        (n, what) for n in "12" for what in ("packed", "rectangular", "draft")]
    (path,) = (unmeasured / "grids").iterdir()
    stored = CostGrid.from_dict(json.loads(path.read_text(encoding="utf-8")))
    assert stored.most_requests == 2
    assert (stored.around(2), stored.reading(2), stored.deciding(2)) == pytest.approx((0.7, 0.5, 0.1))
    for n in (1, 2):
        surplus = stored.verify("packed", [4] * n) - stored.verify("packed", [1] * n) + stored.drafting(n, 3)
        assert surplus == pytest.approx(0.6 * n)
    assert ("host 700.000 ms a round of 2, a look at the confidences 500.000 ms, ranking by the device 400.000 ms, "
            "a decision 100.000 ms") in text
    both = json.loads(CliRunner().invoke(profile.command, ["--requests", "2", "--short", "--json"]).stdout)
    assert CostCurve.from_dict(both["curve"]) == CURVE and CostGrid.from_dict(both["grid"]).most_requests == 2


def test_real_requests_are_measured(monkeypatch):
    monkeypatch.setattr(costs, "REPEATS", 1)
    pair = pair_of(build_model("qwen3"), None)
    grid = measure_grid(functools.partial(Together, pair), [1, 2], (8, 16), CURVE)
    assert min([*grid.packed.values(), *grid.rectangular.values()]) > 0
    assert sorted(rows for n, rows in grid.packed if n == 2) == list(range(2, 17))
    assert grid.packed_slope.keys() == grid.packed.keys() and grid.rectangular_slope.keys() == grid.rectangular.keys()


def test_rounds_are_priced_beside_their_forwards(monkeypatch):
    """By a clock: a round takes three, a forward ten and one a row, a slot two, a look a half, a decision a quarter."""
    now, pair = [0.0], embedded_pair()
    monkeypatch.setattr(profile.time, "perf_counter", lambda: now[0])

    def tick(module, name, seconds):
        work = getattr(module, name)

        def run(*args, **options):
            now[0] += seconds(args)
            return work(*args, **options)
        monkeypatch.setattr(module, name, run)

    for module in (costs, batch):
        tick(module, "forward_many", lambda args: 10.0 + sum(tokens.shape[1] for tokens in args[1]))
    tick(batch, "propose_many", lambda args: 2.0 * max(args[3]))
    tick(costs.BatchAuto, "before", lambda args: 0.25)
    tick(batch, "_read_confidences", lambda args: 0.5 if args[0] else 0.0)
    tick(costs.Batch, "step", lambda args: 3.0)
    grid = CostGrid({(3, rows): 10.0 + rows for rows in range(3, 25)})
    expected = Around(host=3.0, surplus={width: 3 * width + 2.0 * width for width in range(1, 8)}, further=12.0,
                      read=0.5, rank=3 * 3, decide=0.25, part=1.0)
    assert costs.measure_around(pair, 3, grid) == expected
    alone = pair_of(build_model("qwen3"), None)
    assert costs.measure_around(alone, 3, grid) == Around(host=3.0)
    slower = replace(grid, packed={key: 2 * seconds for key, seconds in grid.packed.items()})
    assert costs.measure_around(alone, 3, slower) == Around(host=6.0), "in the grid's seconds"


def test_rounds_of_the_loop_begin_at_the_depth_of_the_forwards(monkeypatch):
    """In the target's caches and in the drafts' contexts, most of it made up."""
    joined, join = [], batch.Batch.join
    monkeypatch.setattr(costs.Batch, "join", lambda self, member, flight: (
        joined.append((member.run.cache.offset, member.run)), join(self, member, flight)))
    step = costs._rounds(embedded_pair(), 2, costs.BatchFixed(3, "fixed"))
    assert [offset for offset, _ in joined] == [len(costs.PROMPT)] * 2 and len(costs.PROMPT) >= costs.NEAR
    step()
    for _, run in joined:
        committed = run.cache.offset
        assert committed > len(costs.PROMPT)
        assert run.context.waiting + run.context.caches[0].length == committed


def test_a_proposal_for_half_of_the_requests_has_its_share():
    """Rows less what they cost: of one row for each of four, and for two of them."""
    grid = CostGrid({(4, rows): 10.0 + rows for rows in range(4, 33)})
    assert costs._share(grid, 4, 2.0 + 7.0, 4.0 + 10.0) == pytest.approx(0.7)
    assert costs._share(grid, 4, 2.0 + 3.0, 4.0 + 10.0) == 0.5, "a request costs no more beside few than beside many"
    assert costs._share(grid, 4, 2.0 + 11.0, 4.0 + 10.0) == 1.0
    assert costs._share(grid, 4, 0.0, 0.0) == costs._share(grid, 4, 3.0, 4.0) * 0 == 0.0, "nothing to go by"


def test_rounds_are_timed_by_turns_in_random_order_and_texts_begin_anew(monkeypatch):
    now, calls = [0.0], []
    monkeypatch.setattr(costs.time, "perf_counter", lambda: now[0])

    def kind(name, seconds):
        def begin():
            calls.append(f"begin {name}")

            def round():
                calls.append(name)
                now[0] += seconds * (1 + len(calls) / 1000)  # ever slower
            return round
        return begin

    kinds = {"a": kind("a", 1.0), "b": kind("b", 2.0)}
    seconds = costs._by_turns(kinds, None)
    assert {name: len(own) for name, own in seconds.items()} == {"a": costs.LOOP_ROUNDS, "b": costs.LOOP_ROUNDS}
    assert calls.count("begin a") == costs.LOOP_ROUNDS / costs.LOOP_TEXT
    turns = [call for call in calls if not call.startswith("begin")]
    pairs = list(zip(turns[::2], turns[1::2], strict=True))
    assert {tuple(sorted(pair)) for pair in pairs} == {("a", "b")} and len(set(pairs)) == 2
    assert len(costs._by_turns(kinds, 0.0)["a"]) == 3, "a short measurement"


def test_what_a_round_takes_longer_is_told_turn_by_turn():
    """Slow turns are slow for both; a mishap in one is left out."""
    other = [10.0, 20.0, 10.0, 30.0, 10.0]
    assert costs.seconds_more([12.0, 22.0, 12.0, 32.0, 500.0], other).median == pytest.approx(2.0)
    assert costs.seconds_more([other[0] + 1], other[:1]) == Timing(1.0, 0.0, 1)


def test_noise_is_drawn_to_the_line_and_a_step_stays():
    def timings(*medians, spread=0.1):
        return {n: Timing(median, spread, 7) for n, median in enumerate(medians, start=1)}

    noisy = costs.drawn(timings(1.0, 1.95, 3.06, 4.02, 4.97, 6.0))
    assert [own.median for own in noisy.values()] == pytest.approx([1, 2, 3, 4, 5, 6], abs=0.06)
    assert noisy[3].median < 3.03 and noisy[2].median > 1.96
    stepped = timings(1.0, 1.0, 1.0, 5.0, 5.0, 5.0)
    assert [own.median for own in costs.drawn(stepped).values()] == pytest.approx([1, 1, 1, 5, 5, 5], abs=0.02)
    exact = timings(1.0, 7.0, 2.0, 9.0, spread=0.0)
    assert costs.drawn(exact) == exact
    assert costs.drawn(timings(3.0)) == timings(3.0)


@pytest.mark.parametrize(("row", "kept"), [(0.08, True), (0.1, False), (0.12, False)])
def test_rectangles_are_kept_where_they_are_cheaper(monkeypatch, row, kept):
    def verify(self, layout, rows):
        self.clock.now += 1 + (0.1 if layout == "packed" else row) * len(rows) * max(rows)
    monkeypatch.setattr(Fake, "verify", verify)
    grid = measure_grid(Clock(monkeypatch).begin, [1, 2], (500, 2000), CURVE)
    assert (grid.layouts == ("packed", "rectangular")) == kept


def test_rectangles_that_noise_makes_cheaper_are_left_out():
    grid = CostGrid({(2, n): 1.0 + 0.1 * n for n in range(2, 9)}, {(2, n): 0.95 + 0.2 * n for n in range(1, 5)})
    assert costs._has_use_for_rectangles(grid, {2: 0.009}) and not costs._has_use_for_rectangles(grid, {2: 0.011})


def test_a_drafting_round_is_priced_as_it_was_measured():
    """The slots after a proposal's first by what they add; verify forwards by what is left, in proportion between."""
    grid = CostGrid({(1, 1): 0.5, (1, 4): 0.6} | {(2, n): 0.8 + 0.1 * n for n in range(2, 9)},
                    {(2, n): 0.9 + 0.2 * n for n in range(1, 5)},
                    draft={(2, 1): 0.2, (2, 2): 0.3, (2, 3): 0.4}, host=0.2, read=0.1)
    around = Around(host=0.6, surplus={1: 0.2, 2: 0.35, 3: 0.7}, further=0.1, read=0.3, rank=0.04, decide=0.06)
    whole = costs.with_around(grid, {2: around})
    assert whole.draft == pytest.approx({(2, 1): 0.1, (2, 2): 0.15, (2, 3): 0.2})
    assert whole.packed == pytest.approx({(1, 1): 0.5, (1, 4): 0.6, (2, 2): 1.0, (2, 3): 1.05, (2, 4): 1.1,
                                          (2, 5): 1.15, (2, 6): 1.2, (2, 7): 1.35, (2, 8): 1.5})
    assert whole.rectangular == pytest.approx({(2, 1): 1.1, (2, 2): 1.2, (2, 3): 1.3, (2, 4): 1.6})
    assert (whole.host_request, whole.read_request, whole.rank_request, whole.decide_request) == pytest.approx(
        (0.2, 0.1, 0.02, 0.03))
    for width, surplus in around.surplus.items():
        priced = whole.verify("packed", [width + 1] * 2) - whole.verify("packed", [1] * 2) + whole.drafting(2, width)
        assert priced == pytest.approx(surplus)
    assert costs.with_around(grid, {2: Around(host=0.1)}) == grid, "less than what one request takes is noise"


def test_forwards_between_measured_rounds_keep_their_shape():
    """A step lies where it was, what was measured cheaper is cheaper; where forwards cost the same, it goes evenly."""
    flat = {(2, 2): 1.0, (2, 3): 1.0, (2, 4): 1.0, (2, 5): 1.0, (2, 6): 2.0, (2, 7): 2.0, (2, 8): 2.0}
    whole = costs.with_around(CostGrid(flat), {2: Around(host=0.0, surplus={1: 0.1, 2: 1.4, 3: 1.3})})
    assert whole.packed == pytest.approx({(2, 2): 1.0, (2, 3): 1.05, (2, 4): 1.1, (2, 5): 1.1, (2, 6): 2.4,
                                          (2, 7): 2.35, (2, 8): 2.3})
    cheap = costs.with_around(CostGrid(flat), {2: Around(host=0.0, surplus={1: -0.2, 2: 0.4, 3: 0.3})})
    assert cheap.packed[2, 4] == 1.0, "but not cheaper than without drafts"


@pytest.mark.parametrize("text", ["0", "x", "1,,2", "1000"])
def test_wrong_counts_are_a_usage_error(text):
    done = CliRunner().invoke(profile.command, ["--requests", text])
    assert done.exit_code == 2 and "1,4,16" in done.stderr
