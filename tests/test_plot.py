"""Pictures: the right kind of file with what it shows, and one line where it cannot be drawn."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest

from mlx_dspark.plot import (
    FEW,
    check_plot,
    plot_acceptance,
    plot_costs,
    plot_lines,
    plot_policies,
    plot_reliability,
    plot_thresholds,
)
from mlx_dspark.schedule.calibration import SlotMetrics
from mlx_dspark.schedule.cost import CostCurve

drawing = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None,
                             reason="NOT TESTED, matplotlib is missing: pip install matplotlib")
CURVES = {"a curve": CostCurve({1: 0.010, 2: 0.011, 4: 0.030}), "another": CostCurve({1: 0.02})}
SLOTS = [
    SlotMetrics(0, 100, 0.1, 0.6, 0.2, 0.5, 0.5, ((4, 0.22, 0.31, 60), (9, 0.48, 0.52, 40))),
    SlotMetrics(1, 0, *(math.nan,) * 5, ()),  # never verified
]
TABLE = {"slow machine": {"fixed": 0.8, "auto": 1.0}, "fast machine": {"auto": 2.5}}
PICTURES = {
    "costs": lambda path: plot_costs(path, CURVES),
    "reliability": lambda path: plot_reliability(path, {"raw": SLOTS, "fitted": SLOTS}),
    "policies": lambda path: plot_policies(path, {"steady": TABLE, "swinging": TABLE}),
    "lines": lambda path: plot_lines(path, {"loss": {"training": [(0, 3.0), (1, 2.0)]}, "tau": {"held out": []}},
                                     "step"),
    "acceptance": lambda path: plot_acceptance(path, {"up to": {"maths": (0.8, 0.5, None)}, "if": {"chat": (0.7,)}}),
    "thresholds": lambda path: plot_thresholds(path, {"maths": [(0.0, 4.1, 0.5), (0.5, 3.0, 0.7)]}),
}
SHOWN = {
    "costs": ["a curve", "another", "rows of a verify forward"],
    "reliability": ["raw", "fitted", "predicted survival"],
    "lines": ["loss", "training", "tau", "held out", "step"],
    "acceptance": ["up to", "if", "maths", "chat", "share of the drafts"],
    "thresholds": ["tau", "verify rate", "maths", "threshold"],
    "policies": ["slow machine", "fast machine", "steady", "swinging", "auto", "fixed"],
}


@drawing
@pytest.mark.parametrize("name", PICTURES)
def test_png(name, tmp_path):
    path = tmp_path / "picture.PNG"
    PICTURES[name](path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


@drawing
@pytest.mark.parametrize("name", PICTURES)
def test_svg_shows_its_labels_and_is_the_same_each_time(name, tmp_path):
    path, again = tmp_path / "picture.svg", tmp_path / "again.svg"
    PICTURES[name](path)
    PICTURES[name](again)
    text = path.read_text(encoding="utf-8")
    assert "<svg" in text and all(f">{label}<" in text for label in SHOWN[name])
    assert text == again.read_text(encoding="utf-8")


@drawing
def test_drawing_needs_no_window_system(tmp_path):
    PICTURES["costs"](tmp_path / "picture.png")
    assert "matplotlib.pyplot" not in sys.modules


@drawing
def test_bins_of_a_few_rounds_are_left_out(tmp_path):
    def drawn(count: int) -> str:
        slot = SlotMetrics(0, 100, 0.1, 0.6, 0.2, 0.5, 0.5, ((4, 0.22, 0.31, 60), (9, 0.48, 0.52, count)))
        plot_reliability(tmp_path / "picture.svg", {"raw": [slot]})
        return (tmp_path / "picture.svg").read_text(encoding="utf-8")

    assert drawn(FEW - 1) == drawn(1) != drawn(FEW)


@pytest.mark.parametrize("name", ["picture.pdf", "picture", "png", "picture.png.txt"])
def test_other_endings_are_refused(name):
    with pytest.raises(ValueError, match=r"\.png nor \.svg") as caught:
        check_plot(Path(name))
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", PICTURES)
def test_without_matplotlib_one_line_names_the_remedy(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        PICTURES[name](tmp_path / "picture.svg")
    assert not list(tmp_path.iterdir())
