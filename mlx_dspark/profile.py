"""Measure what rounds cost here: `python -m mlx_dspark.profile`, and the short version before first use.

Each row count is timed on its own, at two context depths, over a synthetic KV cache; repeats are
interleaved so that a slow moment of the machine hits all of them. Nothing is interpolated. A larger
row count that came out cheaper is only evened out when the difference is within the noise.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .commands import SETTINGS, Notes, counts, open_pair, pair_options, run_command
from .plot import check_plot, plot_costs
from .schedule.cost import CostCurve
from .schedule.grid import CostGrid
from .schedule.policies import Fixed, Policy
from .structs import KVOptions, Round

if TYPE_CHECKING:
    from .load import Pair
    from .target import Target

WIDE_ROWS = (10, 12, 13, 16)  # around the kernel steps known from MLX's sources
NEAR, FAR = 512, 4096  # context depths; the far one is a quarter of the window if that is more
REPEATS = 7
SHORT_SECONDS = 2.0  # of model time, for the automatic measurement
KEPT = 2  # rows that a round has committed, which the next proposal takes in
READS = 50
LOOKS = 15  # rounds with a look and rounds without
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Timing:
    """Seconds: median of the repeats, and half the distance between the outer quartiles; and how many repeats."""

    median: float
    spread: float
    repeats: int = 1

    @property
    def error(self) -> float:
        """Standard error of the median, were the repeats normally distributed."""
        return 1.86 * self.spread / math.sqrt(self.repeats)


def measure(pair: Pair, short: bool = False, progress: Callable[[str], None] = lambda text: None) -> CostCurve:
    """The cost curve of a pair on this machine; `short` measures one depth and as often as two seconds allow."""
    from .backend import machine

    gamma = pair.draft.gamma if pair.draft is not None else 7
    counts = [*range(1, gamma + 2), *(() if short else [n for n in WIDE_ROWS if n > gamma + 1])]
    near, far = depths(pair.target.context)
    budget = SHORT_SECONDS if short else None
    at_near = _verify_times(pair.target, counts, near, budget, progress)
    draft = _draft_times(pair, near, budget, progress)
    slope: dict[int, float] = {}
    draft_slope = 0.0
    if not short and far > near:
        at_far = _verify_times(pair.target, counts, far, None, progress)
        slope = {n: max(0.0, (at_far[n].median - at_near[n].median) / (far - near)) for n in counts}
        further = [timing.median - draft[n].median for n, timing in _draft_times(pair, far, None, progress).items()]
        draft_slope = max(0.0, statistics.fmean(further) / (far - near)) if further else 0.0
    return CostCurve(
        rows=evened(at_near), depth=near, slope=slope, draft={n: t.median for n, t in draft.items()},
        draft_slope=draft_slope, host=_host_seconds(pair), read=_read_seconds(pair, budget),
        about={"machine": machine(), "measured": time.strftime("%Y-%m-%d %H:%M:%S"), "short": short,
               "spread": {str(n): at_near[n].spread for n in counts}},
    )


def depths(context: int | None) -> tuple[int, int]:
    """(near, far) context depths that leave room for the widest verify."""
    if context is None:
        return NEAR, FAR
    room = max(1, context - 2 * max(WIDE_ROWS))
    return min(NEAR, room), min(max(FAR, context // 4), room)


def evened(times: Mapping[int, Timing]) -> dict[int, float]:
    """Medians, made monotone where a drop is within the noise; a real drop stays."""
    counts = sorted(times)
    rows = {n: times[n].median for n in counts}
    for smaller, larger in zip(reversed(counts[:-1]), reversed(counts[1:]), strict=True):
        drop = rows[smaller] - rows[larger]
        if 0 < drop <= times[smaller].spread + times[larger].spread:
            rows[smaller] = rows[larger]
    return rows


def timed(
    works: Mapping[Key, Callable[[], Any]], repeats: int, budget: float | None, progress: Callable[[str], None]
) -> dict[Key, Timing]:
    """Time each work once per repeat, interleaved, after one warm-up each; at least three repeats."""
    for work in works.values():
        work()
    samples: dict[Key, list[float]] = {n: [] for n in works}
    started = time.perf_counter()
    for repeat in range(repeats):
        if budget is not None and repeat >= 3 and time.perf_counter() - started > budget:
            break
        progress(f"repeat {repeat + 1} of {repeats}")
        for n, work in works.items():
            since = time.perf_counter()
            work()
            samples[n].append(time.perf_counter() - since)
    return {n: timing_of(values) for n, values in samples.items()}


def timing_of(values: Sequence[float]) -> Timing:
    """What so many repeats say."""
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return Timing(statistics.median(values), (quartiles[2] - quartiles[0]) / 2, len(values))


def _verify_times(
    target: Target, counts: Iterable[int], depth: int, budget: float | None, progress: Callable[[str], None]
) -> dict[int, Timing]:
    import mlx.core as mx

    cache = target.start(KVOptions())
    cache.fill(lambda tokens: target.forward(tokens, cache).logits, depth)

    def work(rows: int) -> Callable[[], None]:
        tokens = mx.zeros((1, rows), dtype=mx.int32)

        def run() -> None:
            mx.eval(target.forward(tokens, cache).logits)
            cache.advance(rows, 0 if rows > 1 or cache.full else rows)

        return run

    works = {n: work(n) for n in counts}
    return timed(works, REPEATS, budget, lambda text: progress(f"verify at depth {depth}: {text}"))


def _draft_times(
    pair: Pair, depth: int, budget: float | None, progress: Callable[[str], None]
) -> dict[int, Timing]:
    import mlx.core as mx

    from .sampling import make_rule
    from .structs import Sampling

    if pair.draft is None:
        return {}
    draft, rule = pair.draft, make_rule(Sampling())
    state = draft.start()
    width = len(draft.taps) * (pair.target.hidden_size or 1)
    taps = mx.zeros((1, depth, width), dtype=pair.target.dtype) if draft.taps else None
    draft.observe(state, mx.zeros((1, depth), dtype=mx.int32), taps)
    anchor = mx.zeros((1,), dtype=mx.int32)
    kept = mx.zeros((1, KEPT), dtype=mx.int32), None if taps is None else taps[:, :KEPT]

    def work(slots: int) -> Callable[[], None]:
        def run() -> None:
            draft.observe(state, *kept)
            mx.eval(draft.propose(state, anchor, slots, rule.picker(None, None, slots)).tokens)

        return run

    works = {n: work(n) for n in range(1, draft.gamma + 1)}
    return timed(works, REPEATS, budget, lambda text: progress(f"draft at depth {depth}: {text}"))


def _host_seconds(pair: Pair) -> float:
    """Seconds of a plain round outside its forward, over a short run."""
    from .decode import DecodeOptions, decode
    from .sampling import make_rule
    from .schedule import Plain
    from .structs import Sampling

    options = DecodeOptions(rule=make_rule(Sampling()), policy=Plain(), max_tokens=16, timing=True)
    rounds = decode(pair, [0, 0], options)
    next(rounds)
    since = time.perf_counter()
    landed = list(rounds)
    forwards = sum(r.seconds["verify"] + r.seconds["draft"] for r in landed)
    return max(0.0, (time.perf_counter() - since - forwards) / max(1, len(landed)))


def _read_seconds(pair: Pair, budget: float | None) -> float:
    """Seconds that a look at this round's confidences costs.

    One more host read, and more than that: the host only builds the verify forward when the draft has ended, instead of
    meanwhile. So whole rounds are compared, with a look and without.
    """
    read = _bare_read_seconds()
    if pair.draft is None or not pair.draft.has_confidence:
        return read
    rounds = {looks: _rounds(pair, Fixed(pair.draft.gamma, "fixed", reads_confidence=looks)) for looks in (False, True)}
    times = timed({looks: partial(next, own) for looks, own in rounds.items()}, LOOKS, budget, lambda text: None)
    return max(read, times[True].median - times[False].median)


def _rounds(pair: Pair, policy: Policy) -> Iterator[Round]:
    """Endless rounds of the real loop."""
    from .decode import DecodeOptions, decode
    from .sampling import make_rule
    from .structs import Sampling

    rounds = decode(pair, [0, 0], DecodeOptions(make_rule(Sampling()), policy))
    next(rounds)
    return rounds


def _bare_read_seconds() -> float:
    """Median seconds of a host read: a tiny graph, submitted and waited for."""
    import mlx.core as mx

    base, seconds = mx.zeros((8,)), []
    mx.eval(base)
    for step in range(READS):
        since = time.perf_counter()
        (base + step).tolist()
        seconds.append(time.perf_counter() - since)
    return statistics.median(seconds)


@click.command("profile", context_settings=SETTINGS)
@pair_options
@click.option("--short", is_flag=True, help="The quick version that runs before first use.")
@click.option("--json", "as_json", is_flag=True, help="Print the curve as one JSON document.")
@click.option("--requests", "loads", callback=counts, metavar="N,...",
              help="Measure so many requests at once as well, as in 1,2,4,8,16.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the curve: a .png or .svg file (needs matplotlib).")
@run_command
def command(short: bool, as_json: bool, loads: list[int], plot: Path | None, **pair_fields: Any) -> None:
    """Measure what one round costs on this machine and store it for the scheduler."""
    notes = Notes()
    if plot is not None:
        check_plot(plot)
    pair = open_pair(notes, **pair_fields)
    from .candidates import find_walk, prepare
    from .draft import BlockDraft
    from .store import save_curve

    if not short and isinstance(pair.draft, BlockDraft):
        said = prepare(pair.draft, notes.progress)
        by_candidates = find_walk(pair.draft)
        if by_candidates is not None:
            pair.draft.use(replace(pair.draft.kernels, walk_greedy=by_candidates))
        notes.progress("")
        if said is not None:
            notes.say(said)
    curve = measure(pair, short, notes.progress)
    notes.progress("")
    notes.say(f"stored in {save_curve(pair, curve)}")
    grid = _measure_requests(pair, loads, curve, short, notes) if loads else None
    if plot is not None:
        plot_costs(plot, {pair.target.name: curve})
    if as_json:
        click.echo(json.dumps(curve.to_dict() if grid is None else {"curve": curve.to_dict(), "grid": grid.to_dict()}))
    else:
        click.echo(table(curve) if grid is None else f"{table(curve)}\n\n{grid_table(grid)}")


def _measure_requests(pair: Pair, loads: Sequence[int], curve: CostCurve, short: bool, notes: Notes) -> CostGrid:
    from .serve.costs import FAR as FAR_TOGETHER
    from .serve.costs import NEAR as NEAR_TOGETHER
    from .serve.costs import Together, measure_around, measure_grid, with_around
    from .store import save_grid

    near, far = depths(pair.target.context)
    near, far = min(near, NEAR_TOGETHER), min(far, FAR_TOGETHER)
    grid = measure_grid(partial(Together, pair), loads, (near, far), curve, short, notes.progress)
    around = {}
    for requests in loads:
        notes.progress(f"{requests} requests: rounds of the loop")
        around[requests] = measure_around(pair, requests, grid, short)
    grid = with_around(grid, around)
    notes.progress("")
    notes.say(f"stored in {save_grid(pair, grid)}")
    return grid


def table(curve: CostCurve) -> str:
    """The curve for reading: milliseconds by rows, the ratio to one row, and the slope with depth."""
    one = curve.verify(1)
    lines = [f"rows   ms at depth {curve.depth}   of one row   ms per 1000 positions more"]
    lines += [f"{n:4d}   {1e3 * s:14.3f}   {s / one:10.2f}   {1e6 * curve.slope.get(n, 0.0):10.3f}"
              for n, s in sorted(curve.rows.items())]
    if curve.draft:
        draft = "  ".join(f"{n}: {1e3 * s:.3f}" for n, s in sorted(curve.draft.items()))
        lines.append(f"draft ms by proposals: {draft}, {1e6 * curve.draft_slope:.3f} per 1000 positions more")
    lines.append(f"host {1e3 * curve.host:.3f} ms a round, a look at the confidences {1e3 * curve.read:.3f} ms")
    return "\n".join(lines)


def grid_table(grid: CostGrid) -> str:
    """The grid for reading: milliseconds of both layouts by requests, at so many rows of each request."""
    widths = range(1, grid.widest + 1)
    lines = [f"requests   layout        ms at depth {grid.depth} by rows of each request: {' '.join(map(str, widths))}"]
    for requests in sorted({requests for requests, _ in grid.packed}):
        for layout in grid.layouts:
            cells = "  ".join(f"{1e3 * grid.verify(layout, [width] * requests):.3f}" for width in widths)
            lines.append(f"{requests:8d}   {layout:11s}   {cells}")
        if grid.draft:
            slots = max(slots for _, slots in grid.draft)
            part = f", {100 * grid.part:.0f}% of that for half of them" if grid.part and requests > 1 else ""
            whole = 1e3 * grid.drafting(requests, slots)
            lines.append(f"{requests:8d}   draft         {whole:.3f} ({slots} slots){part}")
    most = grid.most_requests
    lines.append(f"host {1e3 * grid.around(most):.3f} ms a round of {most}, a look at the confidences "
                 f"{1e3 * grid.reading(most):.3f} ms, ranking by the device {1e3 * grid.ranking(most):.3f} ms, "
                 f"a decision {1e3 * grid.deciding(most):.3f} ms")
    return "\n".join(lines)


def main() -> None:
    """Entry point of `mlx_dspark.profile`."""
    command(prog_name="mlx_dspark.profile")


if __name__ == "__main__":
    main()
