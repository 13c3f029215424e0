"""Pictures of what the commands print: cost curves, reliability diagrams, policies by curve.

matplotlib is an optional extra and is imported when something is drawn; its drawing objects are used
directly, so no window system and no global state is involved. The file's ending chooses PNG or SVG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .schedule.calibration import SlotMetrics
    from .schedule.cost import CostCurve

ENDINGS = (".png", ".svg")
FEW = 10  # rounds in a bin of the reliability diagram
BAR_SPACE = 0.8  # of a curve's place on the axis
STYLE: Any = {"svg.hashsalt": "mlx_dspark", "svg.fonttype": "none"}  # same input, same file; text stays text


def check_plot(path: Path) -> None:
    """Raise before any work if `path` cannot become a picture: ValueError for its ending, else ImportError."""
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"{path} ends in neither .png nor .svg: name one of them")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ImportError("a plot needs matplotlib, which is not installed: pip install matplotlib") from None


def plot_costs(path: Path, curves: Mapping[str, CostCurve]) -> None:
    """Milliseconds of a verify forward by rows; points are measured, and held until the next one."""
    figure, (axes,) = _figure(path, 1, (7, 4.5))
    for name, curve in curves.items():
        counts = sorted(curve.rows)
        axes.plot(counts, [1e3 * curve.rows[n] for n in counts], "o", drawstyle="steps-pre", linestyle="-", label=name)
    axes.set(xlabel="rows of a verify forward", ylabel="ms", title="cost curve")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    _save(figure, path)


def plot_reliability(path: Path, panels: Mapping[str, Sequence[SlotMetrics]]) -> None:
    """What was predicted against what happened: a panel per title, a line per slot, larger points for more rounds.

    Bins of a few rounds are left out: they say nothing.
    """
    figure, all_axes = _figure(path, len(panels), (4.5 * len(panels), 4.5), across=True)
    for axes, (title, slots) in zip(all_axes, panels.items(), strict=True):
        axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        for slot in slots:
            _reliability_line(axes, slot)
        axes.set(xlabel="predicted survival", ylabel="drafts accepted up to the slot", title=title,
                 xlim=(0, 1), ylim=(0, 1), aspect="equal")
        axes.legend(fontsize="x-small", title="slot")
    _save(figure, path)


def plot_policies(path: Path, panels: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Bars: a panel per title, a group per curve, a bar per policy; the line at 1 is plain decoding."""
    longest = max(len(table) for table in panels.values())
    figure, all_axes = _figure(path, len(panels), (max(6.0, 1.4 * longest), 3.6 * len(panels)))
    for axes, (title, table) in zip(all_axes, panels.items(), strict=True):
        policies = list(dict.fromkeys(policy for speeds in table.values() for policy in speeds))
        width = BAR_SPACE / len(policies)
        for place, policy in enumerate(policies):
            groups = [(number, speeds[policy]) for number, speeds in enumerate(table.values()) if policy in speeds]
            shift = (place + 0.5) * width - BAR_SPACE / 2
            axes.bar([n + shift for n, _ in groups], [speed for _, speed in groups], width, label=policy)
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_xticks(range(len(table)), list(table), rotation=25, ha="right", fontsize="small")
        axes.set(ylabel="speed over plain", title=title)
        if axes is all_axes[0]:
            figure.legend(fontsize="x-small", ncols=len(policies), loc="outside upper center")
    _save(figure, path)


def plot_lines(
    path: Path, panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], xlabel: str,
    logarithmic: bool = False,
) -> None:
    """Curves over a common axis: a panel per title, a line per name, given as points (x, y).

    logarithmic: each doubling of x takes the same room.
    """
    figure, all_axes = _figure(path, len(panels), (7, 2.8 * len(panels)))
    for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
        for name, points in lines.items():
            few = len(points) < FEW
            axes.plot([x for x, _ in points], [y for _, y in points], "o-" if few else "-", linewidth=0.9, label=name)
        if logarithmic:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
        axes.set(xlabel=xlabel, title=title)
        axes.legend(fontsize="x-small")
    _save(figure, path)


def plot_acceptance(path: Path, panels: Mapping[str, Mapping[str, Sequence[float | None]]]) -> None:
    """Shares by slot: a panel per title, a line per data set; slots that were never reached are left out."""
    figure, all_axes = _figure(path, len(panels), (4.5 * len(panels), 4.0), across=True)
    for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
        for name, shares in lines.items():
            points = [(slot, share) for slot, share in enumerate(shares, start=1) if share is not None]
            axes.plot([slot for slot, _ in points], [share for _, share in points], "o-", linewidth=1, label=name)
        axes.set(xlabel="slot", ylabel="share of the drafts", title=title, ylim=(0, 1.02))
        axes.legend(fontsize="small")
    _save(figure, path)


def plot_thresholds(path: Path, lines: Mapping[str, Sequence[tuple[float, float, float]]]) -> None:
    """Two panels over the threshold: tau and verify rate; a line of (threshold, tau, verify rate) per data set."""
    figure, all_axes = _figure(path, 2, (9.0, 4.0), across=True)
    for axes, (place, label) in zip(all_axes, ((1, "tau"), (2, "verify rate")), strict=True):
        for name, points in lines.items():
            axes.plot([point[0] for point in points], [point[place] for point in points], "o-", linewidth=1, label=name)
        axes.set(xlabel="threshold", ylabel=label)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")
    _save(figure, path)


def _reliability_line(axes: Any, slot: SlotMetrics) -> None:
    bins = [(mean, outcome, count) for _, mean, outcome, count in slot.reliability if count >= FEW]
    predicted, observed = [mean for mean, _, _ in bins], [outcome for _, outcome, _ in bins]
    sizes = [4 + 60 * count / slot.count for _, _, count in bins]
    (line,) = axes.plot(predicted, observed, linewidth=0.8, label=str(slot.slot + 1))
    axes.scatter(predicted, observed, sizes, color=line.get_color())


def _figure(path: Path, panels: int, inches: tuple[float, float], across: bool = False) -> tuple[Any, list[Any]]:
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(*((1, panels) if across else (panels, 1)), squeeze=False)
    return figure, list(grid.flat)


def _save(figure: Any, path: Path) -> None:
    import matplotlib

    kind = path.suffix.lower().removeprefix(".")
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
