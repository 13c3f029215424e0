"""Prompts from JSON lines: the user's files, the sets in the package by name, or a file of a dataset on the hub.

A line is an object with `turns` (the user's messages), `prompt` (one message), `conversations` or `messages`
(whose answers are not read), or `ids` (token ids, for text that is not chat). Nothing here imports mlx.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import FormatError
from .hub import download_file

ASSETS = Path(__file__).parent / "assets"
PACKAGED = {"maths": ASSETS / "prompts" / "maths.jsonl", "code": ASSETS / "prompts" / "code.jsonl",
            "chat": ASSETS / "prompts" / "chat.jsonl", "heldout": ASSETS / "tiny" / "heldout.jsonl"}
CHAT_SETS = ("maths", "code", "chat")
# The default suite of DeepSeek's evaluation code: at most so many rows of each.
CAPS = {"gsm8k": 500, "math500": 500, "aime25": 30, "humaneval": 164, "mbpp": 256, "livecodebench": 500,
        "mt-bench": 80, "alpaca": 500, "arena-hard-v2": 500}
_ON_HUB = re.compile(r"([\w.-]+/[\w.-]+)/(.+\.jsonl)")
_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}


@dataclass(frozen=True)
class Row:
    """One line. where: file and line, for messages. turns: the user's messages; empty where there are only ids."""

    where: str
    turns: tuple[str, ...]
    system: str | None = None
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Dataset:
    """The rows of one file; name: the file's name without its ending."""

    name: str
    rows: tuple[Row, ...]

    def subset(self, count: int | None, seed: int) -> Dataset:
        """At most `count` rows (None: the suite's cap for this name), chosen as DeepSeek's evaluation code does.

        Where there are more, the list is shuffled by `random.Random(seed)` and its beginning taken.
        """
        count = CAPS.get(self.name) if count is None else count
        if count is None or len(self.rows) <= count:
            return self
        rows = list(self.rows)
        random.Random(seed).shuffle(rows)
        return Dataset(self.name, tuple(rows[:count]))


def open_datasets(names: Sequence[str]) -> list[Dataset]:
    """Read several sets. Raises FormatError, naming the line, or ValueError where two have one name."""
    found: dict[str, Dataset] = {}
    for name in names:
        dataset = open_dataset(name)
        if dataset.name in found:
            raise ValueError(f"two data sets are called {dataset.name} ({name} is the second): rename one of the files")
        found[dataset.name] = dataset
    return list(found.values())


def open_dataset(name: str) -> Dataset:
    """A set of the package by its name, a file, or `OWNER/DATASET/FILE.jsonl` on the hub."""
    path = Path(name).expanduser()
    if name in PACKAGED and not path.is_file():
        path = PACKAGED[name]
    elif not path.exists() and (on_hub := _ON_HUB.fullmatch(name)):
        path = download_file(on_hub[1], on_hub[2])
    if not path.is_file():
        raise FormatError(f"{name} is neither a file nor one of {', '.join(PACKAGED)}: give a .jsonl file of `turns`"
                          + (", such as DeepSpec's eval_datasets hold" if name in CAPS else
                             ", or OWNER/DATASET/FILE.jsonl for one on the hub"))
    return Dataset(path.stem, read_rows(path))


def read_rows(path: Path) -> tuple[Row, ...]:
    """All rows of a file, blank lines skipped. Raises FormatError with the line, or for a file without rows."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON may hold other line ends
    except UnicodeDecodeError:
        raise FormatError(f"{path} is not UTF-8 text: convert it first") from None
    rows = tuple(_row(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip())
    if not rows:
        raise FormatError(f"{path} holds no prompts: give a file with an object a line")
    return rows


def _row(line: str, where: str) -> Row:
    try:
        entry = json.loads(line)
        if "ids" in entry and "conversations" not in entry:  # mlx_dspark.data may write both
            return Row(where, (), ids=_ids(entry["ids"]))
        if "turns" in entry or "prompt" in entry:
            return Row(where, _texts(entry["turns"] if "turns" in entry else [entry["prompt"]]))
        return Row(where, *_dialogue(entry["conversations"] if "conversations" in entry else entry["messages"]))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise FormatError(f"{where}: not an object with turns (texts, at least one), prompt, conversations or ids: "
                          "correct or remove the line") from None


def _ids(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not values or not all(type(i) is int and i >= 0 for i in values):
        raise ValueError
    return tuple(values)


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not values or not all(isinstance(text, str) and text for text in values):
        raise ValueError
    return tuple(values)


def _dialogue(messages: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], str | None]:
    """The user's turns and the system message, in either usual spelling (role and content, from and value)."""
    said = [(_ROLES[m["role"] if "role" in m else m["from"]], m["content"] if "content" in m else m["value"])
            for m in messages]
    system = said.pop(0)[1] if said[0][0] == "system" else None
    if said[0][0] != "user" or any(role == "system" for role, _ in said) or not isinstance(system, str | None):
        raise ValueError
    return _texts([text for role, text in said if role == "user"]), system
