"""The cost grid: priced as executed in either layout, never interpolated, derived from a curve when it must be."""

import json
import math
from dataclasses import replace

import pytest

from mlx_dspark.errors import FormatError
from mlx_dspark.schedule.cost import CostCurve
from mlx_dspark.schedule.grid import CostGrid

MEASURED = CostGrid(
    packed={(1, 1): 1.0, (1, 2): 1.2, (1, 8): 2.0, (4, 4): 1.5, (4, 6): 2.5, (4, 16): 4.0},
    rectangular={(1, 1): 1.0, (1, 8): 2.0, (4, 1): 1.4, (4, 2): 1.9, (4, 4): 3.0},
    depth=500, packed_slope={(1, 1): 1e-3, (1, 8): 1e-3, (4, 4): 2e-3, (4, 16): 2e-3},
    rectangular_slope={(1, 1): 1e-3, (4, 4): -1.0},
    draft={(1, 2): 0.1, (1, 7): 0.2, (4, 7): 0.5}, draft_slope={(1, 7): 1e-4, (4, 7): 4e-4},
    host=0.05, host_request=0.01, read=0.03, about={"chip": "x"})


@pytest.mark.parametrize(("layout", "rows", "seconds"), [
    pytest.param("packed", [1], 1.0, id="one-alone"),
    pytest.param("packed", [3], 2.0, id="next-larger-rows"),
    pytest.param("packed", [1, 1, 1, 1], 1.5, id="plain"),
    pytest.param("packed", [1, 4, 1, 1], 4.0, id="true-number-of-rows"),
    pytest.param("packed", [1, 2], 1.5, id="next-larger-requests"),
    pytest.param("packed", [4, 3], 4.0, id="next-larger-of-both"),
    pytest.param("packed", [8, 8, 8, 8], 8.0, id="beyond-the-rows-in-proportion"),
    pytest.param("packed", [1] * 8, 3.0, id="beyond-the-requests-in-proportion"),
    pytest.param("packed", [2, 2, 2, 2, 1, 1, 1, 1], 5.0, id="beyond-the-requests-12-rows-are-twice-6"),
    pytest.param("rectangular", [1, 4, 1, 1], 3.0, id="requests-x-widest"),
    pytest.param("rectangular", [3, 1], 3.0, id="rectangular-next-larger"),
    pytest.param("rectangular", [1] * 8, 2.8, id="rectangular-beyond-the-requests"),
    pytest.param("rectangular", [8, 1, 1, 1], 6.0, id="rectangular-beyond-the-rows"),
])
def test_a_forward_is_priced_as_it_is_executed(layout, rows, seconds):
    assert MEASURED.verify(layout, rows) == pytest.approx(seconds)


@pytest.mark.parametrize(("rows", "layout", "seconds"), [
    ([2, 2, 2, 2], "rectangular", 1.9), ([6, 1, 1, 1], "packed", 4.0), ([1, 1, 1, 1], "rectangular", 1.4),
    ([1], "packed", 1.0),
])
def test_the_cheaper_layout_is_chosen(rows, layout, seconds):
    assert MEASURED.cheaper(rows) == (layout, pytest.approx(seconds))
    for only in ("packed", "rectangular"):
        assert MEASURED.only(only).cheaper(rows) == (only, MEASURED.verify(only, rows))


@pytest.mark.parametrize(("layout", "depths", "seconds"), [
    pytest.param("packed", [500] * 4, 1.5, id="as-measured"),
    pytest.param("packed", [600, 600, 600, 1000], 1.5 + 2e-3 * 200, id="packed-by-the-mean"),
    pytest.param("packed", [400] * 4, 1.5 - 2e-3 * 100, id="shallower-is-cheaper"),
    pytest.param("packed", [0] * 4, 1.5 / 2, id="by-half-at-most"),
    pytest.param("rectangular", [9000] * 4, 1.4, id="negative-slope-is-noise"),
    pytest.param("packed", [], 1.5, id="unknown"),
])
def test_depth_is_a_slope_per_entry(layout, depths, seconds):
    assert MEASURED.verify(layout, [1] * 4, depths) == pytest.approx(seconds)


def test_rectangular_reads_as_many_keys_for_all_as_for_the_deepest():
    grid = replace(MEASURED, rectangular_slope={(4, 4): 1e-3})
    assert grid.verify("rectangular", [1, 1], [600, 1500]) == pytest.approx(1.4 + 1.0)


@pytest.mark.parametrize(("requests", "slots", "seconds"), [
    (0, 7, 0), (3, 0, 0), (1, 1, 0.1), (1, 3, 0.2), (2, 1, 0.5), (4, 7, 0.5), (8, 7, 1.0), (1, 14, 0.4)])
def test_drafting_costs_like_the_next_larger_count(requests, slots, seconds):
    assert MEASURED.drafting(requests, slots) == pytest.approx(seconds)
    assert replace(MEASURED, draft={}).drafting(requests, slots) == 0


@pytest.mark.parametrize(("requests", "among", "depths", "seconds"), [
    (4, 4, [1000] * 4, 0.7), (4, 4, [500, 500, 500, 1500], 0.6), (4, 4, [100] * 4, 0.34), (8, 8, [1000] * 8, 1.4),
    (2, 4, [1000] * 4, 0.7 * 0.8), (1, 1, [1500], 0.3)])
def test_a_proposal_costs_more_behind_more_context(requests, among, depths, seconds):
    assert replace(MEASURED, part=0.8).drafting(requests, 7, among, depths) == pytest.approx(seconds)


def test_part_of_a_proposal_lies_on_the_line_through_half_of_it():
    grid = replace(MEASURED, part=0.7)
    assert [grid.drafting(n, 7, 4) for n in (1, 2, 3, 4)] == pytest.approx([0.5 * x for x in (0.55, 0.7, 0.85, 1.0)])
    assert grid.drafting(2, 7, 2) == grid.drafting(2, 7) == MEASURED.drafting(2, 7, 4) == 0.5
    assert replace(MEASURED, part=0.5).drafting(1, 7, 4) == pytest.approx(0.125), "in proportion"
    assert grid.drafting(0, 7, 4) == grid.drafting(1, 0, 4) == 0


def test_what_it_knows():
    assert (MEASURED.widest, MEASURED.most_requests, MEASURED.layouts) == (4, 4, ("packed", "rectangular"))
    assert [MEASURED.load(n) for n in (1, 2, 4, 9)] == [1, 4, 4, 4]
    assert MEASURED.around(3) == pytest.approx(0.08)
    with pytest.raises(ValueError, match="'rectangular' was not measured: use packed"):
        MEASURED.only("packed").only("rectangular")


@pytest.mark.parametrize("grid", [MEASURED, MEASURED.only("packed"), MEASURED.only("rectangular")],
                         ids=["both", "packed", "rectangular"])
@pytest.mark.parametrize("requests", [1, 2, 4, 6])
@pytest.mark.parametrize("depth", [None, 900])
def test_prices_of_a_round_are_those_of_its_forwards(grid, requests, depth):
    depths = [] if depth is None else [depth] * requests
    prices = grid.prices(requests, 5, depths)
    for drafts in range(6):
        rows = [drafts + 1] * requests
        layout, seconds = grid.cheaper(rows, depths)
        assert prices.seconds(drafts * requests, drafts) == pytest.approx(seconds)
        assert prices.layout(drafts * requests, drafts) == layout
    assert len(prices.packed) == 5 * requests + 1 and len(prices.rectangular) == 6


def test_a_grid_survives_json():
    assert CostGrid.from_dict(json.loads(json.dumps(MEASURED.to_dict()))) == MEASURED
    assert CostGrid.from_dict({"packed": {"1": {"1": 2}}}) == CostGrid(packed={(1, 1): 2.0})


@pytest.mark.parametrize("facts", [
    pytest.param({}, id="empty"),
    pytest.param(None, id="nothing"),
    pytest.param([], id="list"),
    pytest.param({"packed": None}, id="no-table"),
    pytest.param({"packed": {"1": 1.0}}, id="curve-for-a-table"),
    pytest.param({"packed": {"1": {"2": 1.0}}}, id="no-plain-round"),
    pytest.param({"packed": {"1": {"1": 1.0}, "4": {"1": 1.0}}}, id="no-plain-round-of-4"),
    pytest.param({"rectangular": {"4": {"2": 1.0}}}, id="no-plain-rectangle"),
    pytest.param({"packed": {"one": {"1": 1.0}}}, id="word"),
    pytest.param({"packed": {"1": {"1": "fast"}}}, id="seconds-word"),
    pytest.param({"packed": {"1": {"1": -1.0}}}, id="negative"),
    pytest.param({"packed": {"1": {"1": math.nan}}}, id="nan"),
    pytest.param({"packed": {"1": {"1": math.inf}}}, id="infinite"),
    pytest.param({"packed": {"0": {"1": 1.0}, "1": {"1": 1.0}}}, id="no-requests"),
    pytest.param({"packed": {"1": {"1": 1.0}}, "draft": {"1": {"3": -0.1}}}, id="negative-draft"),
    pytest.param({"packed": {"1": {"1": 1.0}}, "packed_slope": {"1": {"1": math.nan}}}, id="slope-nan"),
    pytest.param({"packed": {"1": {"1": 1.0}}, "host_request": -1}, id="negative-host"),
    pytest.param({"packed": {"1": {"1": 1.0}}, "depth": "deep"}, id="depth-word"),
    pytest.param({"packed": {"1": {"1": 1.0}}, "about": 3}, id="about-number"),
])
def test_a_damaged_grid_is_refused_in_one_line(facts):
    with pytest.raises(FormatError, match="measure it again") as caught:
        CostGrid.from_dict(facts)
    assert "\n" not in str(caught.value)


CURVE = CostCurve({1: 1.0, 2: 1.5, 4: 2.0}, depth=100, slope={1: 1e-3, 4: 2e-3}, draft={2: 0.2, 3: 0.3}, host=0.1,
                  read=0.2, about={"chip": "y"})


def test_a_grid_from_a_curve_asks_for_the_rows_of_all_together():
    grid = CostGrid.from_curve(CURVE, [1, 2, 3], slots=3)
    for rows in ([1], [3], [1, 1], [2, 1], [1, 1, 1]):
        assert grid.verify("packed", rows) == CURVE.verify(sum(rows))
    assert grid.verify("rectangular", [2, 1]) == CURVE.verify(4)
    assert (grid.widest, grid.most_requests, grid.host, grid.read) == (4, 3, 0.1, 0.2)
    assert grid.about["chip"] == "y" and "one request" in grid.about["derived"]


@pytest.mark.parametrize(("rows", "seconds"), [(4, 2.0), (5, 3.0), (6, 3.5), (8, 4.0), (12, 6.0)])
def test_rows_that_a_curve_does_not_know_cost_several_forwards(rows, seconds):
    split = [rows - 2, 1, 1]
    assert CostGrid.from_curve(CURVE, [3], slots=9).verify("packed", split) == seconds


def test_context_and_drafting_of_a_derived_grid():
    grid = CostGrid.from_curve(CURVE, [1, 2], slots=3)
    assert grid.verify("packed", [1, 1], [1100, 1100]) == pytest.approx(1.5 + 2 * 1e-3 * 1000)
    assert grid.verify("packed", [4, 4], [1100, 1100]) == pytest.approx(4.0 + 2 * 2e-3 * 1000)
    assert grid.drafting(1, 2) == CURVE.drafting(2) and grid.drafting(1, 3) == CURVE.drafting(3)
    assert grid.drafting(2, 2) == pytest.approx(0.2 * 2.0 / 1.5)  # grows like the verify forward from 2 rows to 4
    assert grid.drafting(2, 3) == pytest.approx(0.3 * 3.5 / 2.0)
    steep = CostCurve({1: 1.0, 2: 5.0}, draft={1: 0.1})
    assert CostGrid.from_curve(steep, [2], slots=1).drafting(2, 1) == pytest.approx(0.2)  # two proposals at most
