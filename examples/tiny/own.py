"""Let the target go on with beginnings of its training texts, greedily and sampled: what its draft will meet.

    PYTHONPATH=examples python -m tiny.own --out build/tiny

Writes own.jsonl, lines of token ids for mlx_dspark.train. Every token counts there, the beginning too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from mlx_dspark.load import Pair, load
from mlx_dspark.regenerate import make_sampler
from mlx_dspark.structs import Sampling

from .corpora import KINDS, read
from .talk import ASSISTANT
from .tokenizer import stream_path

COUNTS = {"code": 0.42, "docs": 0.42, "chat": 0.16}  # shares: chat is learned soonest
BEGINNING = (32, 200)  # tokens of code and documentation
LENGTH = 160  # tokens that the target adds at most
GREEDY = 2 / 3  # of the texts; the others are sampled at temperature 1
AT_ONCE = 32


@dataclass(frozen=True)
class Beginning:
    """Token ids to go on from. sampler: None is greedy."""

    kind: str
    ids: list[int]
    sampler: Any


def beginnings(pair: Pair, out: Path, count: int, seed: int = 1) -> Iterator[Beginning]:
    """Beginnings of all kinds, mixed. Code and documentation start anywhere in the stream, behind an end of text."""
    rng, end = random.Random(seed), pair.tokenizer.eos_token_id
    streams = {kind: np.load(stream_path(out, kind, "train"), mmap_mode="r") for kind in KINDS if kind != "chat"}
    asked = [text.partition(ASSISTANT) for text in read(out / "corpus", "chat", "train")]
    asked = [question + mark for question, mark, _ in asked if mark]
    for number, kind in enumerate(rng.choices(KINDS, [COUNTS[kind] for kind in KINDS], k=count)):
        if kind == "chat":
            ids = pair.tokenizer.encode(rng.choice(asked), add_special_tokens=False)
        else:
            stream, length = streams[kind], rng.randint(*BEGINNING)
            first = rng.randrange(len(stream) - length)
            ids = [int(token) for token in stream[first : first + length]]
        greedy = rng.random() < GREEDY
        sampler = None if greedy else make_sampler(Sampling(temperature=1.0), seed * count + number)
        yield Beginning(kind, [end, *ids], sampler)


def go_on(pair: Pair, given: Iterator[Beginning]) -> Iterator[tuple[str, list[int]]]:
    """Kind and ids of one finished text after another, `AT_ONCE` of them under way."""
    generator: Any = pair.target.batch(sorted(pair.stop_ids), AT_ONCE)
    running: dict[int, tuple[Beginning, list[int]]] = {}
    try:
        while True:
            while len(running) < AT_ONCE and (new := next(given, None)) is not None:
                (uid,) = generator.insert([new.ids], max_tokens=[LENGTH], samplers=[new.sampler])
                running[uid] = (new, [])
            if not running:
                return
            for said in generator.next_generated():
                running[said.uid][1].append(int(said.token))
                if said.finish_reason is not None:
                    began, added = running.pop(said.uid)
                    yield began.kind, began.ids + added
    finally:
        generator.close()


@click.command(help=__doc__.split("\n", 1)[0] if __doc__ else None)
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/tiny"), show_default=True)
@click.option("--count", type=click.IntRange(1), default=2000, show_default=True, help="Texts.")
def main(out: Path, count: int) -> None:
    if not (out / "target" / "model.safetensors").exists():
        raise click.ClickException(f"{out / 'target'} holds no model: run python -m tiny.target first")
    pair, partial, tokens = load(out / "target", False), out / "own.partial", 0
    with partial.open("w", encoding="utf-8") as file:
        for kind, ids in go_on(pair, beginnings(pair, out, count)):
            file.write(json.dumps({"kind": kind, "ids": ids}) + "\n")
            file.flush()
            tokens += len(ids)
    partial.replace(out / "own.jsonl")
    click.echo(f"{count} texts of {tokens} tokens in {out / 'own.jsonl'}")


if __name__ == "__main__":
    main()
