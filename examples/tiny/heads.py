"""Train every sequential head at three block lengths on the same stored features, and compare them.

    PYTHONPATH=examples python -m tiny.heads --out build/tiny --steps 400

All nine begin with the backbone of the draft in OUT/first, so that few steps tell heads apart, and with a new head.
Works in OUT/heads: a part of the training texts, one store of features for all, a folder a draft. What is finished
there is not done again.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import click
import mlx.core as mx

from .corpora import KINDS

HEADS, GAMMAS, TEMPERATURES = ("vanilla", "gated", "rnn"), (4, 7, 11), (0, 1)
EVERY = {"code": 10, "docs": 10, "chat": 30}  # one text in so many: about 280,000 tokens of each kind
DRAFT = {"layers": 1, "rank": 48, "taps": "1,2,4", "max-length": 256, "batch": 8, "anchors": 32, "lr": 2e-3,
         "columns": 256, "seed": 1, "valid-every": 0}
LENGTH = 128  # tokens of an answer that is measured


@dataclass(frozen=True)
class Result:
    """What one draft reached. expected: tau on the held-out part of the texts, computed and not sampled.

    taus: measured, by temperature and kind; empty where nothing was decoded.
    """

    head: str
    gamma: int
    expected: float
    taus: dict[tuple[int, str], float]


def take_part(corpus: Path, folder: Path) -> list[Path]:
    """Files with one training text in EVERY of each kind."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for kind in KINDS:
        lines = (corpus / f"{kind}.train.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        files.append(folder / f"{kind}.jsonl")
        files[-1].write_text("".join(line + "\n" for line in lines[:: EVERY[kind]]), encoding="utf-8")
    return files


def split_prompts(source: Path, folder: Path) -> list[Path]:
    """The held-out prompts, a file for each kind."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    for kind in KINDS:
        lines = [json.dumps({"ids": row["ids"]}) + "\n" for row in rows if row["kind"] == kind]
        (folder / f"prompts-{kind}.jsonl").write_text("".join(lines), encoding="utf-8")
    return [folder / f"prompts-{kind}.jsonl" for kind in KINDS]


def train(out: Path, head: str, gamma: int, steps: int, files: list[Path]) -> Path:
    """The folder of a draft, trained now unless it is there."""
    draft = out / "heads" / f"{head}-{gamma}-{steps}"
    if not (draft / "done").exists():
        backbone = _backbone(out)
        options = {**DRAFT, "head": head, "gamma": gamma, "steps": steps, "save-every": steps, "start": backbone}
        _run("train", "--model", out / "target", "--out", draft, "--features", out / "heads" / "features", "--yes",
             *(part for name, value in options.items() for part in (f"--{name}", value)),
             *(part for file in files for part in ("--data", file)))
        (draft / "done").touch()
    return draft


def _backbone(out: Path) -> Path:
    """The first draft without its heads."""
    folder = out / "heads" / "backbone"
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        arrays, about = mx.load(str(out / "first" / "model.safetensors"), return_metadata=True)
        heads = ("markov_head", "confidence_head")
        kept = {name: array for name, array in arrays.items() if not name.startswith(heads)}
        mx.save_safetensors(str(folder / "model.safetensors"), kept, about)
        config = json.loads((out / "first" / "config.json").read_text(encoding="utf-8"))
        config |= {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
        config.pop("markov_head_type", None)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def evaluate(out: Path, draft: Path, temperature: int, prompts: list[Path]) -> dict[str, float]:
    """tau by kind, measured now unless it was."""
    found = draft / f"temperature-{temperature}.json"
    if not found.exists():
        partial = found.with_suffix(".partial")
        _run("evaluate", "--model", out / "packed" / "target", "--draft", draft, "--temp", temperature, "-m", LENGTH,
             "--json", partial, *(part for file in prompts for part in ("--data", file)))
        partial.rename(found)
    data = json.loads(found.read_text(encoding="utf-8"))["data"]
    return {kind: data[f"prompts-{kind}"]["acceptance_length"] for kind in KINDS}


def results(
    out: Path, steps: int, decode: bool = True, gammas: tuple[int, ...] = GAMMAS
) -> Iterator[Result]:
    """Train and measure one draft after another. decode: with the held-out prompts, too."""
    files = take_part(out / "corpus", out / "heads" / "texts")
    prompts = split_prompts(out / "packed" / "heldout.jsonl", out / "heads")
    for gamma, head in product(gammas, HEADS):
        draft = train(out, head, gamma, steps, files)
        with (draft / "valid.csv").open(newline="", encoding="utf-8") as file:
            expected = float(list(csv.DictReader(file))[-1]["tau"])
        measured = [(t, evaluate(out, draft, t, prompts)) for t in TEMPERATURES] if decode else []
        yield Result(head, gamma, expected, {(t, kind): taus[kind] for t, taus in measured for kind in KINDS})


def row(cells: list[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def header(decode: bool = True) -> list[str]:
    """The first two lines of the table."""
    columns = [f"T = {temperature}: {kind}" for temperature, kind in product(TEMPERATURES, KINDS)] if decode else []
    names = ["gamma", "head", "held-out text, computed", *columns]
    return [row(names), row(["---"] * len(names))]


def line(result: Result) -> str:
    """A draft's line of the table."""
    taus = [f"{result.taus[key]:.2f}" for key in product(TEMPERATURES, KINDS) if key in result.taus]
    return row([str(result.gamma), result.head, f"{result.expected:.3f}", *taus])


def _run(command: str, *args: object) -> None:
    done = subprocess.run([sys.executable, "-m", f"mlx_dspark.{command}", *map(str, args)], stdout=subprocess.DEVNULL)
    if done.returncode:
        raise ValueError(f"mlx_dspark.{command} ended with {done.returncode}, for the reason above: mend it, then run "
                         "the same command again")


@click.command(help=__doc__.split("\n", 1)[0] if __doc__ else None)
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/tiny"), show_default=True)
@click.option("--steps", type=click.IntRange(1), default=400, show_default=True, help="Of each of the nine drafts.")
@click.option("--decode/--no-decode", default=True, show_default=True, help="Measure tau by decoding, too.")
@click.option("--gamma", "gammas", type=click.IntRange(1), multiple=True, help="Repeatable. Default: 4, 7, 11.")
def main(out: Path, steps: int, decode: bool, gammas: tuple[int, ...]) -> None:
    if not (out / "packed" / "heldout.jsonl").exists():
        raise click.ClickException(f"{out / 'packed'} holds no prompts: run python -m tiny.pack first")
    if not (out / "first" / "model.safetensors").exists():
        raise click.ClickException(f"{out / 'draft'} holds no draft: run make tiny first")
    try:
        for number, result in enumerate(results(out, steps, decode, gammas or GAMMAS)):
            click.echo("\n".join([*(header(decode) if number == 0 else []), line(result)]))
    except (ValueError, FileNotFoundError) as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
