"""`python -m mlx_dspark.simulate`: would a draft help on that machine, and under which policy?

Policies are the real ones; only the seconds come from a cost curve, published by others or stored here.
Nothing is measured. Content is made up, or read from rounds that `generate --record` wrote (see `record.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .commands import SETTINGS, Notes, counts, run_command
from .errors import FormatError
from .loads import POLICIES as LOAD_POLICIES
from .loads import ROUNDS as LOAD_ROUNDS
from .loads import SLOTS, Case, grid_cases, load_panels, load_report, load_results
from .plot import check_plot, plot_lines, plot_policies
from .record import read_recording
from .schedule.batch import make_batch_policy
from .schedule.cost import CostCurve
from .schedule.grid import LAYOUTS, CostGrid
from .schedule.policies import make_policy

if TYPE_CHECKING:
    from .schedule.rate import Calibrate
    from .schedule.simulate import Content

PUBLISHED = Path(__file__).parent / "schedule" / "curves.json"
ROUNDS = 2000
POLICIES = "plain,fixed,paper,lagged,rate,lookahead,auto"
CONTENTS = ("steady", "swinging")
MARK = "*"  # after the name of a curve whose first row was not published


@dataclass(frozen=True)
class Result:
    """One policy on one curve. width: of the best fixed one."""

    curve: str
    content: str
    draft_share: float
    policy: str
    speedup_over_plain: float
    width: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """An entry of `--json`."""
        return {
            "curve": self.curve, "content": self.content, "draft_share": self.draft_share, "policy": self.policy,
            "speedup_over_plain": self.speedup_over_plain,
        }


def published_curves() -> dict[str, CostCurve]:
    """The published cost curves that come with the package, by name; see each one's `about`.

    Where the first row was not published it is priced like the next larger one, as every gap is; those
    curves say so in about["first_row"].
    """
    curves = {}
    for entry in json.loads(PUBLISHED.read_text(encoding="utf-8"))["curves"]:
        scale = 1e-3 if entry["unit"] == "ms" else 1.0
        rows = {int(n): scale * cost for n, cost in entry["rows"].items()}
        about = {**entry, "first_row": "published" if 1 in rows else "priced like the next larger one"}
        curves[entry["name"]] = CostCurve({1: rows[min(rows)], **rows}, about=about)
    return curves


def read_curve(path: Path) -> CostCurve:
    """A cost curve stored by `mlx_dspark.profile`. Raises FormatError for anything else."""
    try:
        return CostCurve.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, UnicodeDecodeError, FormatError) as error:
        raise FormatError(f"{path} is no stored cost curve ({error}): give a file written by mlx_dspark.profile"
                          ) from None


def read_grid(path: Path) -> CostGrid | None:
    """A cost grid stored by `mlx_dspark.profile --requests`, None for anything else. Raises FormatError if damaged."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # what it is instead is found out by who reads it next
    if not isinstance(document, dict) or not any(layout in document for layout in LAYOUTS):
        return None
    try:
        return CostGrid.from_dict(document)
    except FormatError as error:
        raise FormatError(f"{path} is no stored cost grid ({error}): give a file written by mlx_dspark.profile "
                          "--requests") from None


def simulate(
    text: str, curve: CostCurve, content: Content, calibrate: Calibrate = tuple
) -> tuple[float, int | None] | None:
    """(speed relative to plain decoding, width of the best fixed one) of a policy given by name.

    `fixed` is the best fixed width in hindsight. None when the curve is not known for the width asked.
    """
    from .schedule.simulate import fixed_rate, replay

    gamma = min(content.confidences.shape[1], curve.widest - 1)
    plain = fixed_rate(0, content, curve)
    if text == "fixed":
        rates = {width: fixed_rate(width, content, curve) / plain for width in range(1, gamma + 1)}
        best = max(rates, key=rates.__getitem__)
        return rates[best], best
    if text.startswith("fixed:") and int(text.removeprefix("fixed:")) > gamma:
        return None
    return replay(make_policy(text, gamma, True, curve, calibrate), content, curve).rate / plain, None


def with_draft(curve: CostCurve, share: float, gamma: int) -> CostCurve:
    """The curve with a draft that costs this share of a plain step, unless its draft was measured."""
    return curve if curve.draft else replace(curve, draft={gamma: share * curve.rows[1]})


def results(
    curves: Mapping[str, CostCurve], contents: Mapping[str, Content], shares: Sequence[float], policies: Sequence[str],
    calibrate: Calibrate = tuple, progress: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """Every policy on every curve, content by content."""
    found = []
    for kind, content in contents.items():
        gamma = content.confidences.shape[1]
        for name, curve, share in _cases(curves, shares, gamma):
            for policy in policies:
                progress(f"{kind}, draft {share:g}, {name}, {policy}")
                outcome = simulate(policy, curve, content, calibrate)
                if outcome is not None:
                    found.append(Result(name, kind, share, policy, round(outcome[0], 4), outcome[1]))
    progress("")
    return found


def _cases(
    curves: Mapping[str, CostCurve], shares: Sequence[float], gamma: int
) -> Iterator[tuple[str, CostCurve, float]]:
    """Curves with the draft's share of a plain step: each one asked, or the measured one."""
    for share in shares:
        for name, curve in curves.items():
            if not curve.draft:
                yield name, with_draft(curve, share, gamma), share
    for name, curve in curves.items():
        if curve.draft:
            yield name, curve, round(curve.drafting(gamma) / curve.verify(1), 4)


def _numbers(ctx: click.Context, option: click.Parameter, text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = [-1]
    if not all(0 <= share < 100 for share in shares):
        raise click.BadParameter(f"{text!r} is not a list of shares, as in 0.12,0.25")
    return list(dict.fromkeys(shares))


def _kinds(ctx: click.Context, option: click.Parameter, text: str) -> list[str]:
    kinds = list(dict.fromkeys(text.split(",")))
    for kind in kinds:
        if kind not in CONTENTS:
            raise click.BadParameter(f"{kind!r} is unknown: {' and '.join(CONTENTS)} are there")
    return kinds


@click.command("simulate", context_settings=SETTINGS)
@click.argument("records", nargs=-1, metavar="[RECORD]...",
                type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--content", "kinds", default=",".join(CONTENTS), callback=_kinds, metavar="KIND,...",
              help="Without a RECORD: made-up content, steady or swinging.")
@click.option("--rounds", type=click.IntRange(1), help="How many rounds of made-up content, of every request. "
              f"Default: {ROUNDS}, with --requests {LOAD_ROUNDS}.")
@click.option("--requests", "loads", callback=counts, metavar="N,...",
              help="Made-up content of so many requests at once, as in 1,2,4,8,16,32,64.")
@click.option("--seed", type=click.IntRange(0), default=0)
@click.option("--curve", "names", multiple=True, metavar="NAME|FILE.json",
              help="A published curve or a stored one, with --requests a stored grid too; repeatable. Default: all "
                   "published ones.")
@click.option("--draft-share", "shares", default="0.12", callback=_numbers, metavar="X,...",
              help="What a proposal costs, as a share of a plain step, where the curve does not tell.")
@click.option("--policy", "policies", metavar="NAME,...",
              help="Policies to compare; fixed is the best fixed width in hindsight. "
                   f"Default: {POLICIES}, with --requests {LOAD_POLICIES}.")
@click.option("--calibration", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Temperatures written by mlx_dspark.calibrate, for recorded confidences.")
@click.option("--json", "as_json", is_flag=True, help="One JSON list instead of the tables.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the tables: .png or .svg.")
@run_command
def command(
    records: tuple[Path, ...], kinds: list[str], rounds: int | None, loads: list[int], seed: int,
    names: tuple[str, ...], shares: list[float], policies: str | None, calibration: Path | None, as_json: bool,
    plot: Path | None,
) -> None:
    """Would a draft help on that machine? Speed of each policy relative to plain decoding, simulated.

    RECORD: files written by mlx_dspark.generate --record (use --policy fixed there).
    """
    if plot is not None:
        check_plot(plot)
    if loads:
        if records or calibration:
            raise click.UsageError("--requests replays made-up content: leave RECORD and --calibration out")
        wanted = list(dict.fromkeys((policies or LOAD_POLICIES).split(",")))
        _simulate_loads(names, kinds, loads, shares, wanted, rounds or LOAD_ROUNDS, seed, as_json, plot)
        return
    curves = _curves(names)
    calibrate = _calibrate(calibration)
    contents = _recorded(records, seed, calibrate, Notes()) if records else _made_up(kinds, rounds or ROUNDS, seed)
    wanted = list(dict.fromkeys((policies or POLICIES).split(",")))
    for text in wanted:  # a wrong name costs no waiting
        make_policy(text, min(c.confidences.shape[1] for c in contents.values()), True, CostCurve({1: 1.0}))
    found = results(curves, contents, shares, wanted, calibrate, Notes.progress)
    click.echo(json.dumps([result.to_dict() for result in found]) if as_json else _report(found, contents, curves))
    if plot is not None:
        plot_policies(plot, _panels(found))


def _simulate_loads(
    names: Sequence[str], kinds: Sequence[str], loads: Sequence[int], shares: Sequence[float],
    policies: Sequence[str], rounds: int, seed: int, as_json: bool, plot: Path | None,
) -> None:
    grids = {Path(name).stem: grid for name in names if (grid := read_grid(Path(name))) is not None}
    others = [name for name in names if Path(name).stem not in grids]
    curves = _curves(others) if others or not grids else {}
    for text in policies:  # a wrong name costs no waiting
        make_batch_policy(text, SLOTS, True, CostGrid({(1, 1): 1.0}))
    cases: list[Case] = [*grid_cases(grids), *_cases(curves, shares, SLOTS)]
    found = load_results(cases, kinds, loads, policies, rounds, seed, Notes.progress)
    click.echo(json.dumps([result.to_dict() for result in found]) if as_json else load_report(found, rounds))
    if plot is not None:
        plot_lines(plot, load_panels(found), "requests at once (simulated)", logarithmic=True)


def _curves(names: Sequence[str]) -> dict[str, CostCurve]:
    shipped = published_curves()
    curves = {}
    for name in names or shipped:
        if name in shipped:
            curves[name] = shipped[name]
        elif name.endswith(".json") or Path(name).exists():
            curves[Path(name).stem] = read_curve(Path(name))
        else:
            raise click.UsageError(f"no published curve is called {name!r}: use one of {', '.join(shipped)}, "
                                   "or a file ending in .json")
    for name, curve in curves.items():
        if curve.widest < 2:
            raise ValueError(f"the cost curve {name} knows one row only: measure it again with mlx_dspark.profile")
    return curves


def _calibrate(path: Path | None) -> Calibrate:
    if path is None:
        return tuple
    from .schedule.calibration import calibrator
    from .store import read_calibration

    return calibrator(read_calibration(path))


def _made_up(kinds: Sequence[str], rounds: int, seed: int) -> dict[str, Content]:
    from .schedule.simulate import made_up

    return {kind: made_up(kind, rounds, seed) for kind in kinds}


def _recorded(paths: Sequence[Path], seed: int, calibrate: Calibrate, notes: Notes) -> dict[str, Content]:
    contents = {}
    for path in paths:
        recording = read_recording(path)
        contents[path.name] = recording.content(seed, calibrate)
        if recording.left_out:
            notes.say(f"{path.name}: {recording.left_out} rounds drafted less than the block and are left out")
    return contents


def _report(found: Sequence[Result], contents: Mapping[str, Content], curves: Mapping[str, CostCurve]) -> str:
    """A table per content and draft share, under a sentence that says what these numbers are."""
    parts = [_origin(curves)]
    for (kind, share), group in _grouped(found).items():
        what = f"{kind}, {len(contents[kind])} rounds; a proposal costs {share:g} of a plain step"
        parts.append(f"{what}\n{_table(group, curves)}")
    if any(result.policy == "fixed" for result in found):
        parts.append("fixed: the best width in hindsight, in brackets.")
    if any(_unpublished(curve) for curve in curves.values()):
        parts.append(f"{MARK} its first row was not published and is priced like the next one.")
    return "\n\n".join(parts)


def _origin(curves: Mapping[str, CostCurve]) -> str:
    published = sum("source" in curve.about for curve in curves.values())
    where = "published by others" if published == len(curves) else "stored on this machine"
    if 0 < published < len(curves):
        where = f"of which {published} were published by others and {len(curves) - published} stored on this machine"
    return f"Speed relative to plain decoding. Simulated on cost curves {where}: these are no measurements."


def _unpublished(curve: CostCurve) -> bool:
    return bool(curve.about.get("first_row", "published") != "published")


def _grouped(found: Sequence[Result]) -> dict[tuple[str, float], list[Result]]:
    groups: dict[tuple[str, float], list[Result]] = {}
    for result in found:
        groups.setdefault((result.content, result.draft_share), []).append(result)
    return groups


def _table(group: Sequence[Result], curves: Mapping[str, CostCurve]) -> str:
    policies = list(dict.fromkeys(result.policy for result in group))
    cells = {(r.curve, r.policy): f"{r.speedup_over_plain:.2f}{f' ({r.width})' if r.width else ''}" for r in group}
    lines = [["curve", *policies]]
    for name in dict.fromkeys(result.curve for result in group):
        mark = MARK if _unpublished(curves[name]) else ""
        lines.append([name + mark, *(cells.get((name, policy), "-") for policy in policies)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)


def _panels(found: Sequence[Result]) -> dict[str, dict[str, dict[str, float]]]:
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for (kind, share), group in _grouped(found).items():
        table = panels.setdefault(f"simulated: {kind}, draft {share:g} of a plain step", {})
        for result in group:
            table.setdefault(result.curve, {})[result.policy] = result.speedup_over_plain
    return panels


def main() -> None:
    """Entry point of `mlx_dspark.simulate`."""
    command(prog_name="mlx_dspark.simulate")


if __name__ == "__main__":
    main()
