"""The record of a training run: CSV files that survive a restart, and one line of progress on a terminal."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

COLUMNS = ("step", "loss", "norm", "rate", "context", "tokens", "seconds")


class Log:
    """Appends to `path` and to its twin `...-heldout.csv`; a context manager that closes both.

    done: the step that the run continues from; lines after it, of a run that was killed, are dropped.
    """

    def __init__(self, path: Path, done: int):
        self._steps = _open(path, COLUMNS, done)
        self._held_out = _open(path.with_name(f"{path.stem}-heldout.csv"), ("step", "kind", "nats"), done)
        self._smooth: float | None = None
        self._shows = sys.stderr.isatty()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        self._steps.close()
        self._held_out.close()
        if self._shows:
            print(file=sys.stderr)

    def say(self, text: str) -> None:
        """A sentence for the person at the terminal, if there is one."""
        if self._shows:
            print(text, file=sys.stderr)

    def add(self, line: dict[str, float], spent: float) -> None:
        """Write one step and show it."""
        csv.writer(self._steps).writerow([_short(line[column]) for column in COLUMNS])
        self._smooth = line["loss"] if self._smooth is None else 0.98 * self._smooth + 0.02 * line["loss"]
        if self._shows:
            left = line["seconds"] / 60 * (1 - spent) / max(spent, 1e-9)
            print(f"\rstep {line['step']}  loss {self._smooth:.3f}  {100 * spent:.0f}%, {left:.0f} minutes left  ",
                  end="", file=sys.stderr, flush=True)

    def validated(self, step: int, nats: dict[str, float]) -> None:
        """Write held-out losses, one line a kind."""
        for kind, value in nats.items():
            csv.writer(self._held_out).writerow((step, kind, _short(value)))


def _open(path: Path, columns: tuple[str, ...], done: int) -> Any:
    kept = []
    if path.exists() and done:
        with path.open(newline="") as lines:
            kept = [row for row in list(csv.reader(lines))[1:] if row and int(row[0]) <= done]
    file = path.open("w", newline="", buffering=1)  # a line is on its way to the disk when it is written
    csv.writer(file).writerows([columns, *kept])
    return file


def _short(value: float) -> str | int:
    return value if isinstance(value, int) else f"{value:.6g}"
