"""The record of a run: a row of curve.csv a step, a row of valid.csv a validation, and a picture of both."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..store import replace_file
from .losses import LossWeights, Sums

CURVE = ("step", "loss", "ce", "tv", "confidence", "tau", "norm", "lr", "tokens", "seconds")


@dataclass(frozen=True)
class StepReport:
    """One optimiser step: its sums, the norm of its gradients before clipping, and the run so far."""

    step: int
    loss: float
    sums: Sums
    norm: float
    lr: float
    tokens: int
    seconds: float

    def row(self) -> list[object]:
        """As curve.csv has it."""
        terms = (self.loss, self.sums.ce, self.sums.tv, self.sums.bce, self.sums.tau, self.norm, self.lr)
        return [self.step, *(f"{value:.9g}" for value in terms), self.tokens, f"{self.seconds:.2f}"]


@dataclass(frozen=True)
class Validation:
    """Held-out sums before optimiser step `step`."""

    step: int
    loss: float
    sums: Sums

    def row(self) -> list[object]:
        """As valid.csv has it."""
        return [self.step, f"{self.loss:.6g}", f"{self.sums.tau:.5g}", *(f"{a:.5g}" for a in self.sums.acceptance)]


class Table:
    """A CSV file that grows by rows, each written at once."""

    def __init__(self, path: Path, names: Sequence[str], steps: int):
        """Keep rows of steps before `steps`: what a killed run did after its checkpoint is done again."""
        self.path, kept = path, []
        if path.exists() and steps:
            with path.open(newline="", encoding="utf-8") as file:
                whole = [row for row in list(csv.reader(file))[1:] if len(row) == len(names) and row[0].isdigit()]
            kept = [row for row in whole if int(row[0]) < steps]
        text = io.StringIO(newline="")
        csv.writer(text).writerows([list(names), *kept])
        replace_file(path, lambda file: file.write(text.getvalue().encode()))

    def add(self, row: Sequence[object]) -> None:
        """Append one row."""
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(row)


def panels(folder: Path) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """What there is to draw of a run: loss, tau and acceptance by position, from the two tables in its folder."""
    curve, valid = (_columns(folder / name) for name in ("curve.csv", "valid.csv"))
    rates = {name.replace("acceptance_", "slot "): points for name, points in valid.items() if "acceptance" in name}
    return {"loss": {"training": curve["loss"], "held out": valid["loss"]},
            "tau at temperature 1": {"training": curve["tau"], "held out": valid["tau"]},
            "held-out acceptance of a slot, given those before it": rates}


def _columns(path: Path) -> dict[str, list[tuple[float, float]]]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows, names = list(reader), reader.fieldnames or []
    return {name: [(float(row["step"]), float(row[name])) for row in rows] for name in names}


def valid_names(slots: int) -> tuple[str, ...]:
    """Columns of valid.csv: conditional acceptance by position, at temperature 1."""
    return ("step", "loss", "tau", *(f"acceptance_{slot}" for slot in range(1, slots + 1)))


def summary(weights: LossWeights, sums: Sums) -> str:
    """Loss, tau and acceptance in one line."""
    rates = " ".join(f"{rate:.2f}" for rate in sums.acceptance)
    return f"loss {sums.loss(weights):.4f}, tau {sums.tau:.3f}, acceptance by position {rates}"
