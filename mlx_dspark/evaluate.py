"""`python -m mlx_dspark.evaluate`: how much of a draft's proposals a target keeps, on benchmark prompts.

By default the protocol of the paper and of DeepSeek's evaluation code, so that numbers can be compared with
Table 1; `--protocol product` measures what a user gets. docs/evaluation.md says what each number means.
"""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .acceptance import acceptance, cut_at
from .commands import SETTINGS, Notes, open_pair, pair_options, run_command
from .models import known_pair
from .plot import check_plot, plot_acceptance, plot_reliability, plot_thresholds
from .progress import Progress
from .prompts import CHAT_SETS, Dataset, open_datasets
from .report import to_document, to_text
from .samples import PAPER, PRODUCT, Sample, Samples, Settings, encode, room_for

if TYPE_CHECKING:
    from .calibrate import Calibration
    from .load import Pair
    from .structs import Round

PICTURES = ("acceptance.png", "thresholds.png", "reliability.png")


@dataclass
class Measured:
    """What was decoded of one data set. runs: by threshold, by the sample's place, its rounds; 0 is the main run.

    left_out: prompts that do not fit the context. shortened: samples that the context allows fewer tokens
    than asked. replayed: by threshold, how many samples followed from the main run without decoding again.
    """

    name: str
    left_out: int = 0
    shortened: int = 0
    runs: dict[float, dict[int, tuple[Round, ...]]] = field(default_factory=dict)
    replayed: dict[float, int] = field(default_factory=dict)

    def rounds(self, threshold: float = 0.0) -> Iterator[Round]:
        """All rounds of a run, with the prefills."""
        return itertools.chain.from_iterable(self.runs.get(threshold, {}).values())

    def tokens_per_second(self) -> float | None:
        """Committed tokens per host second of the rounds; the prefill and the text are left out."""
        counted = [landed for landed in self.rounds() if landed.rows]
        seconds = sum(sum(landed.seconds.values()) for landed in counted)
        return sum(len(landed.tokens) for landed in counted) / seconds if seconds else None


@dataclass(frozen=True)
class Evaluation:
    """Everything that was measured. interrupted: by the user, with samples missing."""

    settings: Settings
    gamma: int
    thresholds: tuple[float, ...]
    data: tuple[Measured, ...]
    calibration: Calibration | None
    interrupted: bool


def evaluate(
    pair: Pair, datasets: Sequence[Dataset], settings: Settings, thresholds: Sequence[float] = (),
    record: Path | None = None,
) -> Evaluation:
    """Decode every row of every set, then again under each threshold.

    Samples that are complete in `record` are not decoded again. An interrupt ends the evaluation with what
    is done. Raises ValueError, before any decoding, if the pair cannot be evaluated so.
    """
    require(pair, settings, thresholds)
    measured, todo = _plan(pair, datasets, settings)
    samples = Samples(pair, settings, record)
    progress = Progress(len(todo) * (1 + len(thresholds)))
    interrupted = False
    try:
        for threshold in (0.0, *thresholds):
            for place, sample in enumerate(todo):
                _decode(samples, sample, place, measured[sample.data], threshold, settings, progress)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        progress.clear()
    sets = tuple(measured.values())
    calibration = _calibration(sets, pair.draft.gamma) if _told(pair, settings) else None
    return Evaluation(settings, pair.draft.gamma, tuple(thresholds), sets, calibration, interrupted)


def require(pair: Pair, settings: Settings, thresholds: Sequence[float]) -> None:
    """Raise ValueError for what cannot be measured with this pair."""
    if pair.draft is None:
        raise ValueError("there is no draft to evaluate: give --draft")
    if thresholds and settings.protocol != PAPER:
        raise ValueError("thresholds belong to --protocol paper: the product's policy decides by costs")
    if thresholds and not pair.draft.has_confidence:
        raise ValueError("thresholds need confidences and this draft has no confidence head: leave --thresholds out")


def _told(pair: Pair, settings: Settings) -> bool:
    return settings.protocol == PAPER and pair.draft.has_confidence


def _plan(
    pair: Pair, datasets: Sequence[Dataset], settings: Settings
) -> tuple[dict[str, Measured], list[Sample]]:
    """Encode all rows, and set those aside that do not fit the context."""
    measured = {dataset.name: Measured(dataset.name) for dataset in datasets}
    todo = []
    for dataset in datasets:
        about = measured[dataset.name]
        for number, row in enumerate(dataset.rows):
            ids = encode(pair, row, settings)
            room = room_for(pair, len(ids), settings)
            about.left_out += room < 1
            about.shortened += 1 <= room < settings.max_tokens
            if room >= 1:
                todo.append(Sample(dataset.name, number, ids, room))
    if not todo:
        raise ValueError(f"no prompt leaves room in the context of {pair.target.context}: give shorter ones")
    return measured, todo


def _decode(
    samples: Samples, sample: Sample, place: int, about: Measured, threshold: float, settings: Settings,
    progress: Progress,
) -> None:
    """One sample under one threshold: from the main run where that is exact, from the record, or by decoding."""
    run = about.runs.setdefault(threshold, {})
    progress.what = f"{sample.data}, threshold {threshold:g}" if threshold else sample.data
    rounds = cut_at(about.runs[0.0][place], threshold) if threshold and settings.temperature <= 0 else None
    known = rounds is not None
    about.replayed[threshold] = about.replayed.get(threshold, 0) + known
    if rounds is None:
        policy = f"threshold:{threshold:g}" if threshold else settings.policy
        known = samples.known(sample, policy)
        rounds = samples.rounds(sample, policy, progress.tokens)
    run[place] = rounds
    progress.step(found=known)


def _calibration(sets: Sequence[Measured], gamma: int) -> Calibration | None:
    """Of all rounds at full width: raw, and with temperatures that were fitted on the other half of the prompts."""
    from .calibrate import Collected, fit, labelled

    found = [(place, landed) for about in sets for place, rounds in about.runs.get(0.0, {}).items()
             for landed in rounds if landed.drafts]
    if not found:
        return None
    places, rounds = zip(*found, strict=True)
    return fit(labelled(Collected(rounds, places), gamma), places)


def _levels(ctx: click.Context, option: click.Parameter, text: str | None) -> tuple[float, ...]:
    """The thresholds above 0, in order; the main run is the one at 0."""
    try:
        levels = {float(part) for part in (text or "0").split(",")}
    except ValueError:
        levels = {-1.0}
    if not all(0 <= level <= 1 for level in levels):
        raise click.BadParameter(f"{text!r} is not a list of thresholds from 0 to 1, as in 0,0.3,0.5")
    return tuple(sorted(levels - {0.0}))


@click.command("evaluate", context_settings=SETTINGS)
@pair_options
@click.option("--data", "named", multiple=True, metavar="FILE|NAME",
              help="JSONL of turns; maths, code, chat or heldout; or OWNER/DATASET/FILE.jsonl on the hub. Repeatable.")
@click.argument("more", nargs=-1, metavar="[FILE|NAME]...")
@click.option("--count", type=click.IntRange(1), help="Rows of each set. Default: the suite's caps, else all.")
@click.option("--protocol", type=click.Choice([PAPER, PRODUCT]), default=PAPER,
              help="Fixed blocks without thinking, or the default policy.")
@click.option("--temp", "--temperature", "temperature", type=float, default=1.0, help="0 or below is greedy.")
@click.option("-m", "--max-tokens", type=click.IntRange(1), default=2048, help="Per sample.")
@click.option("--seed", type=click.IntRange(0), default=Settings.seed,
              help="Chooses the rows; sample i draws with seed + i.")
@click.option("--thresholds", metavar="X,...", callback=_levels,
              help="Decode again with drafts cut at the first confidence below X.")
@click.option("--record", type=click.Path(dir_okay=False, path_type=Path),
              help="Keep the rounds here; the samples found in it are not decoded again.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path),
              help="Write the JSON document here; - for stdout, instead of the tables.")
@click.option("--plot", "plots", type=click.Path(file_okay=False, path_type=Path),
              help=f"Draw {', '.join(PICTURES)} in this folder.")
@run_command
def command(
    named: tuple[str, ...], more: tuple[str, ...], count: int | None, protocol: str, temperature: float,
    max_tokens: int, seed: int, thresholds: tuple[float, ...], record: Path | None, json_file: Path | None,
    plots: Path | None, **pair_fields: Any,
) -> None:
    """Measure how much of a draft's proposals the target keeps.

    tau is the acceptance length: tokens per round, the target's own included. Without --data: held-out
    texts for the small pair, else the prompts for maths, code and chat in the package.
    """
    embedded = pair_fields["model"] is None
    names = [*named, *more] or (["heldout"] if embedded else list(CHAT_SETS))
    if "heldout" in names and not embedded:
        raise click.UsageError("heldout holds token ids of the small pair: leave it out for another model")
    settings = Settings(protocol, temperature, max_tokens, seed)
    datasets = [dataset.subset(count, seed) for dataset in open_datasets(names)]
    _check_places(record, json_file, plots)
    notes = Notes()
    pair = open_pair(notes, **pair_fields)
    found = evaluate(pair, datasets, settings, thresholds, record)
    document = {**to_document(found, known_pair(pair_fields)[1]), **_provenance(pair, pair_fields)}
    _write(document, json_file)
    if plots is not None:
        draw(plots, found)
    if found.interrupted:
        sys.exit(130)


def _check_places(record: Path | None, json_file: Path | None, plots: Path | None) -> None:
    """Raise before any work what would fail after it."""
    if plots is not None:
        check_plot(plots / PICTURES[0])
        plots.mkdir(parents=True, exist_ok=True)
    for path in (record, json_file):
        if path is not None and str(path) != "-":
            new = not path.exists()
            path.open("a", encoding="utf-8").close()
            if new:
                path.unlink()


def _provenance(pair: Pair, fields: Mapping[str, Any]) -> dict[str, Any]:
    from .backend import machine
    from .store import pair_key

    key = pair_key(pair)
    return {
        "pair": dict(pair.facts),
        "model": fields["model"] or "the small pair in the package",
        "draft": fields["draft"],
        "draft_bits": fields["draft_bits"],
        "weights": {"target": key["target"], "draft": key["draft"]},
        "machine": machine(),
        "command": shlex.join(["python", "-m", "mlx_dspark.evaluate", *sys.argv[1:]]),
    }


def _write(document: Mapping[str, Any], json_file: Path | None) -> None:
    from .store import write_json

    if json_file is not None and str(json_file) == "-":
        click.echo(json.dumps(document, indent=1))
        return
    if json_file is not None:
        write_json(json_file, document)
    click.echo(to_text(document))


def draw(folder: Path, found: Evaluation) -> None:
    """The pictures: acceptance by slot (paper, Figure 2), thresholds (Figure 5), reliability (Figure 6)."""
    counted = {about.name: acceptance(about.rounds(), found.gamma) for about in found.data}
    plot_acceptance(folder / PICTURES[0], {
        "kept, if all before were": {name: numbers.conditional for name, numbers in counted.items()},
        "kept up to the slot": {name: numbers.survival for name, numbers in counted.items()},
    })
    if found.thresholds:
        levels = (0.0, *found.thresholds)
        plot_thresholds(folder / PICTURES[1], {about.name: [
            (level, numbers.acceptance_length, numbers.verify_rate) for level in levels
            if (numbers := acceptance(about.rounds(level), found.gamma)).rounds] for about in found.data})
    if found.calibration is not None:
        panels = {"raw confidences": found.calibration.before}
        if found.calibration.held_out is not None:
            panels["temperatures of the other half"] = found.calibration.held_out
        plot_reliability(folder / PICTURES[2], panels)


def main() -> None:
    """Entry point of `mlx_dspark.evaluate`."""
    command(prog_name="mlx_dspark.evaluate")


if __name__ == "__main__":
    main()
