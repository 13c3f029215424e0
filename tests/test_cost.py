"""The cost curve: seconds by rows and depth, never interpolated; stored as JSON, refused when damaged."""

import json
import math

import pytest

from mlx_dspark.errors import FormatError
from mlx_dspark.schedule.cost import CostCurve

MEASURED = CostCurve(rows={1: 1.0, 2: 1.1, 5: 1.4, 8: 2.6}, depth=512, slope={1: 1e-4, 2: 2e-4, 8: -1e-3},
                     draft={1: 0.05, 4: 0.1, 7: 0.3}, draft_slope=1e-5, host=0.02, read=0.03, about={"chip": "x"})


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [(1, 1.0), (2, 1.1), (3, 1.4), (4, 1.4), (5, 1.4), (6, 2.6), (7, 2.6), (8, 2.6), (9, 2.6), (100, 2.6)],
)
def test_an_unmeasured_row_count_costs_like_the_next_larger(rows, seconds):
    assert MEASURED.verify(rows) == seconds
    assert MEASURED.verify(rows, 512) == seconds
    assert MEASURED.widest == 8


@pytest.mark.parametrize(
    ("rows", "depth", "seconds"),
    [
        pytest.param(1, 1512, 1.1, id="deeper"),
        pytest.param(2, 1512, 1.3, id="own-slope"),
        pytest.param(1, 12, 1.0, id="shallower-is-not-extrapolated"),
        pytest.param(3, 1512, 1.4, id="no-slope"),
        pytest.param(8, 1512, 2.6, id="negative-slope-is-noise"),
    ],
)
def test_depth_is_a_slope_per_row_count(rows, depth, seconds):
    assert MEASURED.verify(rows, depth) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("proposals", "seconds"), [(0, 0), (1, 0.05), (2, 0.1), (4, 0.1), (5, 0.3), (7, 0.3), (9, 0.3)])
def test_drafting_costs_like_the_next_larger_count(proposals, seconds):
    assert MEASURED.drafting(proposals) == seconds
    assert CostCurve(rows={1: 1.0}).drafting(proposals) == CostCurve(rows={1: 1.0}).drafting(proposals, 9000) == 0
    assert MEASURED.drafting(proposals, 512) == MEASURED.drafting(proposals, 12) == seconds
    assert MEASURED.drafting(proposals, 1512) == pytest.approx(seconds + 1e-2 * (proposals > 0))


def test_a_curve_survives_json():
    assert CostCurve.from_dict(json.loads(json.dumps(MEASURED.to_dict()))) == MEASURED
    assert CostCurve.from_dict({"rows": {"1": 2}}) == CostCurve(rows={1: 2.0})


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({}, id="empty"),
        pytest.param(None, id="nothing"),
        pytest.param([], id="list"),
        pytest.param({"rows": None}, id="no-rows"),
        pytest.param({"rows": {"2": 1.0}}, id="no-row-1"),
        pytest.param({"rows": {"one": 1.0}}, id="word"),
        pytest.param({"rows": {"1": "fast"}}, id="seconds-word"),
        pytest.param({"rows": {"1": -1.0}}, id="negative"),
        pytest.param({"rows": {"1": math.nan}}, id="nan"),
        pytest.param({"rows": {"1": math.inf}}, id="infinite"),
        pytest.param({"rows": {"1": 1.0, "0": 1.0}}, id="row-0"),
        pytest.param({"rows": {"1": None}}, id="null"),
        pytest.param({"rows": {"1": 1.0}, "draft": {"3": -0.1}}, id="negative-draft"),
        pytest.param({"rows": {"1": 1.0}, "slope": 3}, id="slope-number"),
        pytest.param({"rows": {"1": 1.0}, "draft_slope": -1e-6}, id="negative-draft-slope"),
        pytest.param({"rows": {"1": 1.0}, "depth": "deep"}, id="depth-word"),
        pytest.param({"rows": {"1": 1.0}, "host": []}, id="host-list"),
        pytest.param({"rows": {"1": 1.0}, "about": 3}, id="about-number"),
    ],
)
def test_a_damaged_curve_is_refused_in_one_line(facts):
    with pytest.raises(FormatError, match="measure it again") as caught:
        CostCurve.from_dict(facts)
    assert "\n" not in str(caught.value)
