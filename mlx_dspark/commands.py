"""What all commands share: the options that name a pair, one-line errors, notes on stderr."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from .load import Pair

MOST_REQUESTS = 256  # at once
Function = TypeVar("Function", bound=Callable[..., Any])

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}
DEBUG_VARIABLE = "MLX_DSPARK_DEBUG"


class Notes:
    """Sentences for the person at the terminal: on stderr, each once, gone when it is redirected."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        if text not in self._said and sys.stderr.isatty():
            click.echo(f"note: {text}", err=True)
        self._said.add(text)

    @staticmethod
    def progress(text: str) -> None:
        """One line that the next one overwrites; an empty text clears it."""
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{text}", err=True, nl=False)


def run_command(function: Function) -> Function:
    """Turn what a user can cause into one line and exit code 1; MLX_DSPARK_DEBUG=1 shows the traceback."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (ValueError, ImportError, MemoryError) as error:
            if os.environ.get(DEBUG_VARIABLE):
                raise
            raise click.ClickException(one_line(error)) from None
        except OSError as error:
            if os.environ.get(DEBUG_VARIABLE) or isinstance(error, BrokenPipeError):
                raise
            where = f"{error.filename}: " if error.filename else ""
            raise click.ClickException(f"{where}{error.strerror or one_line(error)}") from None

    return wrapped  # type: ignore[return-value]


def one_line(error: BaseException) -> str:
    """An exception's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__


class Finite(click.FloatRange):
    """A number in a range that is no infinity and no NaN, which float() reads too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number: give one", param, ctx)
        return number


def counts(ctx: click.Context, option: click.Parameter, text: str | None) -> list[int]:
    """A list of counts of requests, ascending; an option's callback."""
    found = [] if text is None else text.split(",")
    if not all(count.isdecimal() and 1 <= int(count) <= MOST_REQUESTS for count in found):
        raise click.BadParameter(f"{text!r} is not a list of counts from 1 to {MOST_REQUESTS}, as in 1,4,16")
    return sorted({int(count) for count in found})


def pair_options(function: Function) -> Function:
    """The options that name a target and its draft; `open_pair` reads them."""
    for option in reversed([
        click.option("--model", metavar="PATH_OR_REPO", envvar="MLX_DSPARK_MODEL", show_envvar=True,
                     help="Target: folder or Hugging Face repo. Default: the small pair in the package."),
        click.option("--draft", metavar="PATH_OR_REPO", envvar="MLX_DSPARK_DRAFT", show_envvar=True,
                     help="DSpark draft for the target: folder or Hugging Face repo."),
        click.option("--revision", metavar="REV", help="Revision of the target's repo."),
        click.option("--draft-revision", metavar="REV", help="Revision of the draft's repo."),
        click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto",
                     help="Compute in this type; auto: float32 on the CPU, else the checkpoint's own."),
        click.option("--draft-bits", type=click.Choice(["8", "4"]), help="Quantise the draft when loading it."),
    ]):
        function = option(function)
    return function


def open_pair(
    notes: Notes, *, model: str | None, draft: str | None, revision: str | None, draft_revision: str | None,
    dtype: str, draft_bits: str | None, plain: bool = False,
) -> Pair:
    """Load what the pair options name and say what was decided on the way. plain: leave the draft out."""
    from .backend import require_mlx

    require_mlx()
    from .load import load

    pair = load(model, False if plain else draft, dtype=dtype, draft_bits=int(draft_bits) if draft_bits else None,
                revision=revision, draft_revision=draft_revision)
    for note in pair.notes:
        notes.say(note)
    return pair
