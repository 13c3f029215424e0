"""How far a long run has come, on one line of the terminal."""

from __future__ import annotations

import time

from .commands import Notes

BAR = 24  # characters
PAUSE = 0.1  # seconds between two drawings


class Progress:
    """A bar over `total` steps, with the speed in tokens and the time that is left.

    what: what is being worked on, shown behind the bar. Steps that were found done do not count for the
    time that is left.
    """

    def __init__(self, total: int, what: str = ""):
        self.what = what
        self._total, self._done, self._found, self._tokens = total, 0, 0, 0
        self._since, self._drawn = time.monotonic(), 0.0

    def tokens(self, count: int) -> None:
        """So many tokens were made."""
        self._tokens += count
        if time.monotonic() - self._drawn > PAUSE:
            self._draw()

    def step(self, found: bool = False) -> None:
        """One step is done; found: by an earlier run."""
        self._done += 1
        self._found += found
        self._draw()

    def line(self, seconds: float) -> str:
        """The line after so many seconds."""
        filled = BAR * self._done // self._total if self._total else BAR
        worked = self._done - self._found
        speed = f", {self._tokens / seconds:.0f} tokens/s" if self._tokens and seconds > 0 else ""
        left = f", {_clock(seconds / worked * (self._total - self._done))} left" if worked else ""
        return f"[{'#' * filled}{'.' * (BAR - filled)}] {self._done}/{self._total} {self.what}{speed}{left}"

    @staticmethod
    def clear() -> None:
        """Take the line away."""
        Notes.progress("")

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        Notes.progress(self.line(self._drawn - self._since))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
