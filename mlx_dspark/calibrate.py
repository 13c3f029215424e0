"""`python -m mlx_dspark.calibrate`: make the draft's confidences honest on this target and this text.

Every round drafts and verifies the whole block, so that no policy decides which slots are seen. The
temperatures are fitted on all rounds; what they are worth is told by cross-fitting: temperatures from
the prompts with an even number are judged on those with an odd number, and the other way round.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from .commands import SETTINGS, Notes, open_pair, pair_options, run_command
from .plot import check_plot, plot_reliability
from .record import judged

if TYPE_CHECKING:
    import numpy as np

    from .load import Pair
    from .schedule.calibration import Rounds, SlotMetrics
    from .structs import Round

FEW_ROUNDS = 1000  # with fewer, temperatures follow the noise (held-out errors rise)
CLAMP = 1e-8  # a confidence of exactly 0 or 1 has no logit


@dataclass(frozen=True)
class Collected:
    """Rounds at full width, and the number of the prompt each came from."""

    rounds: tuple[Round, ...]
    prompts: tuple[int, ...]

    @property
    def tau(self) -> float:
        """Committed tokens per round."""
        return sum(len(landed.tokens) for landed in self.rounds) / len(self.rounds)


@dataclass(frozen=True)
class Calibration:
    """Fitted temperatures, and each slot's metrics before, after, and cross-fitted (None with one prompt)."""

    temperatures: tuple[float, ...]
    before: Sequence[SlotMetrics]
    after: Sequence[SlotMetrics]
    held_out: Sequence[SlotMetrics] | None


def collect(
    pair: Pair, prompts: Sequence[Sequence[int]], rounds: int, temperature: float = 1.0, max_tokens: int = 128,
    seed: int = 0, progress: Callable[[str], None] = lambda text: None,
) -> Collected:
    """Decode the prompts in turn until `rounds` rounds have drafted.

    Sampled, the prompts are gone through again with other seeds until there are enough; greedy text
    would only repeat itself. Raises ValueError if there is nothing to calibrate.
    """
    _require_confidence(pair)
    found: list[tuple[int, Round]] = []
    for number, landed in _decoded(pair, prompts, temperature, max_tokens, seed):
        found.append((number, landed))
        progress(f"round {len(found)} of {rounds}")
        if len(found) == rounds:
            break
    progress("")
    if not found:
        raise ValueError("no prompt leaves room for a round: give shorter prompts, or a larger --max-tokens")
    numbers, kept = zip(*found, strict=True)
    return Collected(kept, numbers)


def collect_at(
    pair: Pair, prompts: Sequence[Sequence[int]], rounds: int, temperatures: Sequence[float], max_tokens: int = 128,
    seed: int = 0, progress: Callable[[str], None] = lambda text: None,
) -> Collected:
    """`collect` with an equal share of the rounds at each temperature."""
    share = -(-rounds // len(temperatures))
    parts = [collect(pair, prompts, share, temperature, max_tokens, seed, progress) for temperature in temperatures]
    return Collected(tuple(landed for part in parts for landed in part.rounds),
                     tuple(number for part in parts for number in part.prompts))


def labelled(collected: Collected, gamma: int) -> Rounds:
    """The rounds with what is known of each: slots proposed late in a text, or cut by a stop, count as unseen."""
    import numpy as np

    from .schedule.calibration import Rounds

    logits = np.zeros((len(collected.rounds), gamma))
    for row, landed in zip(logits, collected.rounds, strict=True):
        confidences = np.clip(np.array(landed.confidences, dtype=np.float64), CLAMP, 1 - CLAMP)
        row[: len(confidences)] = np.log(confidences / (1 - confidences))
    lengths = [judged(len(r.drafts), r.accepted, len(r.tokens)) for r in collected.rounds]
    return Rounds(logits, np.array([r.accepted for r in collected.rounds]), np.array(lengths))


def fit(rounds: Rounds, prompts: Sequence[int]) -> Calibration:
    """Temperatures from all rounds, with the metrics that tell what they are worth."""
    import numpy as np

    from .schedule.calibration import fit_temperatures, metrics

    temperatures = fit_temperatures(rounds)
    odd = np.array(prompts) % 2 == 1
    held_out = None
    if odd.any() and not odd.all():
        logits = rounds.logits.copy()
        for side in (odd, ~odd):
            logits[side] /= fit_temperatures(_part(rounds, ~side))
        held_out = metrics(replace(rounds, logits=logits))
    return Calibration(tuple(temperatures), metrics(rounds), metrics(rounds, temperatures), held_out)


def _require_confidence(pair: Pair) -> None:
    if pair.draft is None:
        raise ValueError("there is no draft whose confidences could be calibrated: give --draft")
    if not pair.draft.has_confidence:
        raise ValueError("this draft has no confidence head, so there is nothing to calibrate: "
                         "use it with --policy fixed:N")


def _decoded(
    pair: Pair, prompts: Sequence[Sequence[int]], temperature: float, max_tokens: int, seed: int
) -> Iterator[tuple[int, Round]]:
    """(number of the prompt, round), pass after pass; ends when a pass brings nothing new."""
    from .decode import DecodeOptions, decode
    from .sampling import make_rule
    from .schedule import Fixed
    from .structs import Sampling

    for turn in itertools.count():
        came = False
        for number, prompt in enumerate(prompts):
            sampling = Sampling(temperature=temperature, seed=seed + turn * len(prompts) + number)
            limit = max_tokens if pair.target.context is None else min(max_tokens, pair.target.context - len(prompt))
            if limit < 1:
                continue
            options = DecodeOptions(make_rule(sampling), Fixed(pair.draft.gamma, "fixed"), limit, pair.stop_ids,
                                    confidences=True)
            with pair.target.wired():
                for landed in decode(pair, prompt, options):
                    if landed.drafts:
                        came = True
                        yield number, landed
        if not came or Sampling(temperature=temperature).greedy:  # another pass would be the same
            return


def _part(rounds: Rounds, chosen: np.ndarray) -> Rounds:
    return replace(rounds, logits=rounds.logits[chosen], accepted=rounds.accepted[chosen],
                   lengths=rounds.lengths[chosen])


@click.command("calibrate", context_settings=SETTINGS)
@pair_options
@click.option("--data", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="JSONL with ids, prompt, turns or conversations. Default: held-out texts of the small pair.")
@click.option("--rounds", type=click.IntRange(1), default=2000, help="How many rounds to collect.")
@click.option("--temp", "--temperature", "temperatures", type=float, multiple=True, default=(1.0,), show_default="1",
              help="0 or below is greedy. Given several times, each gets an equal share of the rounds.")
@click.option("-m", "--max-tokens", type=click.IntRange(2), default=128, help="Per prompt and pass.")
@click.option("--seed", type=click.IntRange(0), default=0)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path),
              help="Store here. Default: where runs of this pair look for it.")
@click.option("--list-only", is_flag=True, help="Print the temperatures as a JSON list and nothing else.")
@click.option("--record", type=click.Path(), help="Append the rounds to this file, for mlx_dspark.simulate.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path),
              help="Draw the reliability diagram: .png or .svg.")
@run_command
def command(
    data: Path | None, rounds: int, temperatures: tuple[float, ...], max_tokens: int, seed: int, output: Path | None,
    list_only: bool, record: str | None, plot: Path | None, **pair_fields: Any,
) -> None:
    """Fit the draft's confidences to what this target accepts, and store the temperatures.

    ECE is the expected calibration error of a slot's survival; `held out` is the ECE with temperatures
    that were fitted on the other half of the prompts.
    """
    if data is None and pair_fields["model"] is not None:
        raise click.UsageError("the default prompts belong to the small pair: give --data FILE for another model")
    if plot is not None:
        check_plot(plot)
    notes = Notes()
    with open(record, "a", encoding="utf-8") if record else nullcontext() as file:
        pair = open_pair(notes, **pair_fields)
        _require_confidence(pair)
        data, prompts = _prompts(data, pair)
        collected = collect_at(pair, prompts, rounds, temperatures, max_tokens, seed, notes.progress)
        if file is not None:
            _write_record(file, collected, pair)
    result = fit(labelled(collected, pair.draft.gamma), collected.prompts)
    document = {"temperatures": list(result.temperatures),
                "provenance": _provenance(result, collected, pair, data.name, temperatures, seed)}
    stored = _store(document, output, pair)
    click.echo(json.dumps(document["temperatures"]) if list_only else _report(result, collected, temperatures, stored))
    if len(collected.rounds) < FEW_ROUNDS:
        notes.say(f"{len(collected.rounds)} rounds are few, temperatures follow noise: raise --rounds or --max-tokens")
    if plot is not None:
        plot_reliability(plot, {"raw confidences": result.before, "with temperatures": result.after})


def _prompts(data: Path | None, pair: Pair) -> tuple[Path, list[list[int]]]:
    from .load import ASSETS
    from .samples import read_prompts

    path = data or ASSETS / "heldout.jsonl"
    return path, read_prompts(path, pair)


def _write_record(file: IO[str], collected: Collected, pair: Pair) -> None:
    """The rounds as `generate --record` writes them."""
    file.write(json.dumps({"run": {"policy": "fixed", **pair.facts}}) + "\n")
    file.writelines(json.dumps(landed.to_dict()) + "\n" for landed in collected.rounds)


def _provenance(
    result: Calibration, collected: Collected, pair: Pair, data: str, temperatures: Sequence[float], seed: int
) -> dict[str, Any]:
    from .backend import machine
    from .store import pair_key

    told = {"before": result.before, "after": result.after, "held_out": result.held_out}
    hashes = pair_key(pair)
    return {
        "target": hashes["target"],
        "draft": hashes["draft"],
        "pair": dict(pair.facts),
        "data": data,
        "prompts": len(set(collected.prompts)),
        "rounds": len(collected.rounds),
        "tau": round(collected.tau, 4),
        "temperature": temperatures[0] if len(temperatures) == 1 else list(temperatures),
        "seed": seed,
        "count": [slot.count for slot in result.before],
        "ece": {name: slots and [_rounded(slot.ece) for slot in slots] for name, slots in told.items()},
        "auc": [_rounded(slot.auc) for slot in result.before],
        "machine": machine(),
    }


def _store(document: dict[str, Any], output: Path | None, pair: Pair) -> Path:
    from .store import calibration_path, write_json

    return write_json(output or calibration_path(pair), document)


def _report(result: Calibration, collected: Collected, temperatures: Sequence[float], stored: Path) -> str:
    lines = [["slot", "count", "ECE", "fitted", "held out", "AUC", "temperature"]]
    held_out = result.held_out or [None] * len(result.before)
    for slot, after, held, fitted in zip(result.before, result.after, held_out, result.temperatures, strict=True):
        errors = [_cell(slot.ece), _cell(after.ece), _cell(held.ece) if held else "-"]
        lines.append([str(slot.slot + 1), str(slot.count), *errors, _cell(slot.auc), f"{fitted:.3f}"])
    means = [_mean_ece(slots) for slots in (result.before, result.after, result.held_out)]
    lines.append(["mean", "", *map(_cell, means), "", ""])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = "\n".join("  ".join(map(str.rjust, line, widths)).rstrip() for line in lines)
    prompts = len(set(collected.prompts))
    if means[2] >= means[0]:
        table += "\n\nOn prompts they were not fitted on these temperatures do not help: collect more rounds."
    return (f"{len(collected.rounds)} rounds of {prompts} prompt{'s' * (prompts > 1)} at temperature "
            f"{' and '.join(f'{temperature:g}' for temperature in temperatures)}, "
            f"tau {collected.tau:.2f}\n\n{table}\n\nstored in {stored}")


def _mean_ece(slots: Sequence[SlotMetrics] | None) -> float:
    seen = [slot.ece for slot in slots or () if slot.count]
    return sum(seen) / len(seen) if seen else math.nan


def _cell(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 5)


def main() -> None:
    """Entry point of `mlx_dspark.calibrate`."""
    command(prog_name="mlx_dspark.calibrate")


if __name__ == "__main__":
    main()
