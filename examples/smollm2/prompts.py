"""Prompts for the target to answer: maths, code and chat by turns, no two alike, and a held-out part.

    PYTHONPATH=examples python -m smollm2.prompts --count 30000 --out build/smollm2

writes prompts.jsonl (for `mlx_dspark.data`) and heldout.jsonl. A prompt is held out when a hash of its text says so,
so the two never share one, whatever the seed and the count. Neither repeats a prompt of the sets in the package, with
other numbers or not: those measure the draft. The beginning of a longer list is the shorter list.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from mlx_dspark.prompts import CHAT_SETS, open_dataset

from .chat import chat
from .code import code
from .maths import maths

KINDS: dict[str, Callable[[random.Random], str]] = {"maths": maths, "code": code, "chat": chat}
HELD_OUT = 40  # one in so many
TRIES = 200  # in a row without a new prompt: the templates are used up


def essence(text: str) -> str:
    """What is left without case, numbers and punctuation: alike where only the numbers differ."""
    return " ".join(re.findall(r"[a-z]+", text.lower()))


def shipped() -> frozenset[str]:
    """The essences of the prompts in the package, without those that are all numbers."""
    texts = (turn for name in CHAT_SETS for row in open_dataset(name).rows for turn in row.turns)
    return frozenset(essence(text) for text in texts)


def held_out(text: str) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % HELD_OUT == 0


def stream(seed: int, kinds: tuple[str, ...] = tuple(KINDS)) -> Iterator[tuple[str, str]]:
    """Kind and prompt, the kinds by turns; it ends when one of them has nothing new to say."""
    sources = {kind: random.Random(f"{seed}/{kind}") for kind in kinds}
    seen, forbidden = set[str](), shipped()
    while True:
        for kind, rng in sources.items():
            for _ in range(TRIES):
                text = KINDS[kind](rng)
                if text not in seen and essence(text) not in forbidden:
                    break
            else:
                return
            seen.add(text)
            yield kind, text


def split(count: int, seed: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """`count` prompts to train on, and those that were held out on the way."""
    train: list[tuple[str, str]] = []
    held: list[tuple[str, str]] = []
    for kind, text in stream(seed):
        (held if held_out(text) else train).append((kind, text))
        if len(train) == count:
            return train, held
    raise ValueError(f"the templates are used up after {len(train)} prompts: ask for fewer")


def write(path: Path, prompts: list[tuple[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"turns": [text], "kind": kind}, ensure_ascii=False) + "\n"
                            for kind, text in prompts), encoding="utf-8")


@click.command(help=__doc__.split("\n", 1)[0] if __doc__ else None)
@click.option("--count", type=click.IntRange(1), default=30_000, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
def main(count: int, seed: int, out: Path) -> None:
    try:
        train, held = split(count, seed)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    write(out / "prompts.jsonl", train)
    write(out / "heldout.jsonl", held)
    click.echo(f"{out}: {len(train)} prompts to train on, {len(held)} held out")


if __name__ == "__main__":
    main()
