"""What the generate command reads and writes: prompts, records, text and colours on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import IO, TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from .generate import Chunk


def read_prompt(text: str | None, prompt: str | None, file: str | None) -> str:
    """The prompt from an argument, an option, a file or stdin; only one of them may be given."""
    given = [name for name, value in (("PROMPT", text), ("--prompt", prompt), ("--prompt-file", file))
             if value is not None]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} exclude each other: give one prompt")
    if file is not None:
        try:
            with open(file, encoding="utf-8") as stream:
                return stream.read()
        except UnicodeDecodeError:
            raise ValueError(f"{file} is not UTF-8 text: convert it first") from None
        except OSError as error:
            raise ValueError(f"the prompt file {file} cannot be read: {error.strerror}") from None
    words = text if text is not None else prompt
    if words not in (None, "-"):
        return str(words)
    if words is None and sys.stdin.isatty():
        raise click.UsageError("no prompt: give it as an argument, with --prompt-file, or on stdin")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("stdin is not UTF-8 text: convert it first") from None


def open_record(path: str | None) -> Any:
    """The record file, opened before any work so that a bad path costs nothing."""
    if path is None:
        return nullcontext()
    try:
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the record file {path} cannot be written: {error.strerror}") from None


def recorded(chunks: Iterator[Chunk], file: IO[str]) -> Iterator[Chunk]:
    """Write a line about the run, then one per round."""
    for number, chunk in enumerate(chunks):
        if number == 0:
            file.write(json.dumps({"run": {"prompt_tokens": chunk.stats.prompt_tokens, **chunk.stats.facts}}) + "\n")
        if chunk.round is not None:
            file.write(json.dumps(chunk.round.to_dict()) + "\n")
        yield chunk


def show_nothing(chunk: Chunk) -> None:
    """For --json: the document comes at the end."""


def show_text(chunk: Chunk) -> None:
    """Text as it comes."""
    click.echo(chunk.text, nl=False)
    sys.stdout.flush()


class DraftColours:
    """Accepted drafts green, the target's own tokens plain, rejected drafts red and struck through."""

    def __init__(self, tokenizer: Any):
        self._decode = tokenizer.decode

    def show(self, chunk: Chunk) -> None:
        """The chunk's own text; decoding tokens only places the colours."""
        landed = chunk.round
        if landed is None:
            show_text(chunk)
            return
        green = len(self._decode(landed.tokens[: landed.accepted]))
        click.secho(chunk.text[:green], fg="green", nl=False)
        if len(landed.tokens) > landed.accepted:
            click.secho(self._decode(landed.drafts[landed.accepted :]), fg="red", strikethrough=True, nl=False)
        click.echo(chunk.text[green:], nl=False)
        sys.stdout.flush()
