"""Text tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table(lines: Sequence[Sequence[str]]) -> str:
    """Columns of even width: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
    return "\n".join("  ".join(row).rstrip() for row in rows)


def cell(value: float | None, digits: int = 2) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"
