"""Many requests at once, simulated: what `mlx_dspark.simulate --requests` computes, prints and draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .schedule.batch import make_batch_policy
from .schedule.cost import CostCurve
from .schedule.grid import CostGrid

if TYPE_CHECKING:
    from .schedule.simulate import Content

POLICIES = "plain,fixed,paper,search,lagged,auto"
ROUNDS = 200
SLOTS = 7

Case = tuple[str, CostCurve | CostGrid, float]  # name, costs, draft's share of a plain step of one request


@dataclass(frozen=True)
class LoadResult:
    """One policy on one curve at one load.

    speedup_over_plain: tokens per second of all requests, relative to plain decoding of as many at once.
    rows_per_request, tau: per round. parked: share of the request-rounds without a draft. width: of the best
    fixed one.
    """

    curve: str
    content: str
    draft_share: float
    requests: int
    policy: str
    speedup_over_plain: float
    rows_per_request: float
    tau: float
    parked: float
    width: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """An entry of `--json`."""
        return {name: value for name, value in asdict(self).items() if name != "width"}


def load_results(
    cases: Sequence[Case], kinds: Sequence[str], loads: Sequence[int], policies: Sequence[str],
    rounds: int, seed: int, progress: Callable[[str], None] = lambda text: None,
) -> list[LoadResult]:
    """Every policy on every curve at every count of requests; a policy wider than the curve is left out."""
    from .schedule.load import made_up_load

    found = []
    for kind in kinds:
        for requests in loads:
            contents = made_up_load(kind, requests, rounds, seed, SLOTS)
            for name, costs, share in cases:
                grid = costs if isinstance(costs, CostGrid) else (
                    CostGrid.from_curve(costs, [requests], min(SLOTS, costs.widest - 1)))
                for policy in policies:
                    progress(f"{kind}, {requests} requests, draft {share:g}, {name}, {policy}")
                    outcome = _outcome(policy, contents, grid)
                    if outcome is not None:
                        found.append(LoadResult(name, kind, share, requests, policy, *outcome))
    progress("")
    return found


def grid_cases(grids: Mapping[str, CostGrid]) -> list[Case]:
    """Measured grids, with what a proposal for one request costs there."""
    return [(name, grid, round(grid.drafting(1, SLOTS) / grid.cheaper([1])[1], 4)) for name, grid in grids.items()]


def _outcome(
    text: str, contents: Sequence[Content], grid: CostGrid
) -> tuple[float, float, float, float, int | None] | None:
    """(speed over plain, rows per request, tau, parked, best fixed width)."""
    from .schedule.load import best_fixed_load, fixed_load, replay_load

    slots = min(SLOTS, grid.widest - 1)
    plain, width = fixed_load(0, contents, grid), None
    if text == "fixed":
        run = best_fixed_load(contents, grid, least=1)
        width = int(run.policy.removeprefix("fixed:"))
    elif text.startswith("fixed:") and int(text.removeprefix("fixed:")) > slots:
        return None
    else:
        run = replay_load(make_batch_policy(text, slots, True, grid), contents, grid)
    speed, tau = run.promised_rate / plain.promised_rate, run.promised / (run.requests * run.rounds)
    return round(speed, 4), round(run.rows_per_request, 4), round(tau, 4), round(run.parked, 4), width


def load_report(found: Sequence[LoadResult], rounds: int) -> str:
    """A table per content, draft share and curve: a line per policy, a column per count of requests."""
    parts = ["Speed relative to plain decoding of as many requests, in brackets the rows of a request. Simulated, a\n"
             "curve of one request being asked for the rows of all together: these are no measurements."]
    for (kind, share, curve), group in _grouped(found, lambda r: (r.content, r.draft_share, r.curve)):
        loads = list(dict.fromkeys(result.requests for result in group))
        lines = [["requests", *map(str, loads)]]
        for policy, results in _grouped(group, lambda r: r.policy):
            cells = {r.requests: f"{r.speedup_over_plain:.2f} ({r.rows_per_request:.1f})" for r in results}
            lines.append([policy, *(cells.get(requests, "-") for requests in loads)])
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        table = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
        what = f"{curve}: {kind}, {rounds} rounds; a proposal for one request costs {share:g} of its plain step"
        parts.append("\n".join([what, *table]))
    if any(result.policy == "fixed" for result in found):
        parts.append("fixed: the best width in hindsight for each count of requests.")
    return "\n\n".join(parts)


def load_panels(found: Sequence[LoadResult]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """For `plot_lines`: speed and rows per request over the count of requests, a line per policy."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for (kind, share, curve), group in _grouped(found, lambda r: (r.content, r.draft_share, r.curve)):
        where = f"{curve}, {kind}, draft {share:g}"
        for policy, results in _grouped(group, lambda r: r.policy):
            speeds = [(float(r.requests), r.speedup_over_plain) for r in results]
            rows = [(float(r.requests), r.rows_per_request) for r in results]
            panels.setdefault(f"{where}: speed over plain", {})[policy] = speeds
            panels.setdefault(f"{where}: rows per request", {})[policy] = rows
    return panels


def _grouped(found: Iterable[LoadResult], key: Callable[[LoadResult], Any]) -> Iterable[tuple[Any, list[LoadResult]]]:
    groups: dict[Any, list[LoadResult]] = {}
    for result in found:
        groups.setdefault(key(result), []).append(result)
    return groups.items()
