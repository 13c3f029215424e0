"""Quantise the trained target, and choose the held-out prompts that the pair is measured and calibrated on.

    PYTHONPATH=examples python -m tiny.pack --out build/tiny

Writes packed/target (8 bits, groups of 32), packed/heldout.jsonl for the package, and calibration.jsonl, whose
prompts come from other held-out documents.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model
from tokenizers import Tokenizer

from .corpora import KINDS, read
from .talk import ASSISTANT, END

PROMPT = 200  # tokens of code or documentation; a chat's prompt is its first request
SHORTEST = 400  # a document with fewer tokens leaves nothing to compare the continuation with
MEASURED, CALIBRATED = 8, 40  # prompts a kind
BITS, GROUP = 8, 32


def quantise(source: Path, folder: Path) -> None:
    """A copy of an mlx-lm folder in 8 bits; scales and norms in bfloat16."""
    model, config = load_model(source)
    model.set_dtype(mx.bfloat16)
    model, config = quantize_model(model, config, GROUP, BITS)
    config.pop("quantization_config", None)  # a copy of "quantization" for other readers
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)


def prompts(tokenizer: Tokenizer, corpus: Path, kind: str) -> Iterator[list[int]]:
    """Prompts of one kind from its held-out documents, shuffled: END, then the beginning of the text."""
    end = tokenizer.token_to_id(END)
    texts = list(read(corpus, kind, "heldout"))
    random.Random(1).shuffle(texts)  # neighbours are alike
    for text in texts:
        if kind == "chat":
            question, marked, _ = text.partition(ASSISTANT)
            if marked:
                yield [end, *tokenizer.encode(question + marked).ids]
            continue
        ids = tokenizer.encode(text[: 20 * SHORTEST]).ids
        if len(ids) >= SHORTEST:
            yield [end, *ids[:PROMPT]]


def choose(tokenizer: Tokenizer, corpus: Path) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Prompts to measure with and prompts to calibrate with, never from the same document."""
    measured, calibrated = [], []
    for kind in KINDS:
        found = [{"kind": kind, "ids": ids, "text": tokenizer.decode(ids[1:], skip_special_tokens=False)}
                 for ids, _ in zip(prompts(tokenizer, corpus, kind), range(MEASURED + CALIBRATED))]
        measured += found[:MEASURED]
        calibrated += found[MEASURED:]
    return measured, calibrated


def write_lines(path: Path, lines: list[dict[str, object]]) -> None:
    """JSON lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


@click.command(help=__doc__.split("\n", 1)[0] if __doc__ else None)
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/tiny"), show_default=True)
def main(out: Path) -> None:
    if not (out / "target" / "model.safetensors").exists():
        raise click.ClickException(f"{out / 'target'} holds no model: run python -m tiny.target first")
    quantise(out / "target", out / "packed" / "target")
    try:
        tokenizer = Tokenizer.from_file(str(out / "target" / "tokenizer.json"))
        measured, calibrated = choose(tokenizer, out / "corpus")
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    write_lines(out / "packed" / "heldout.jsonl", measured)
    write_lines(out / "calibration.jsonl", calibrated)
    click.echo(f"{len(measured)} prompts to measure with, {len(calibrated)} to calibrate with")


if __name__ == "__main__":
    main()
