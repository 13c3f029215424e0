"""`python -m mlx_dspark.data`: let the target answer prompts itself, as training data for its draft.

A draft learns to propose what its target says, so it is trained on the target's own answers. The output is
JSON lines, one a dialogue, appended as they are finished: a killed run goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from .commands import SETTINGS, Notes, open_pair, pair_options, run_command
from .errors import FormatError
from .progress import Progress
from .prompts import Row, open_datasets
from .regenerate import Dialogue, Wish, batched, one_by_one
from .structs import Sampling

if TYPE_CHECKING:
    from .load import Pair


BEGINNING = b'{"row": '  # of a line that this command wrote


@dataclass(frozen=True)
class Job:
    """A row to answer. number: counted through all files; name: its file and its place there."""

    number: int
    name: str
    row: Row


def read_jobs(names: Sequence[str], count: int | None = None) -> list[Job]:
    """The rows of all files; count: of each file, from its top. Raises FormatError for a row without text."""
    jobs: list[Job] = []
    for dataset in open_datasets(names):
        for place, row in enumerate(dataset.rows[:count]):
            if not row.turns:
                raise FormatError(f"{row.where}: token ids cannot be asked as a message: give turns or conversations")
            jobs.append(Job(len(jobs), f"{dataset.name}/{place}", row))
    return jobs


class Output:
    """The file of dialogues. settings: what every line says of how it was made, and must agree about."""

    def __init__(self, path: Path, settings: Mapping[str, Any], jobs: Sequence[Job]):
        self.path, self.settings = path, dict(settings)
        self._jobs = jobs
        self.endings: Counter[str] = Counter()
        self.tokens = 0
        self.done = self._resume()
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def add(self, dialogue: Dialogue, chat: bool) -> None:
        """Append a dialogue and hand it to the system.

        chat: without a template its token ids are given too, for no template could tell the prompt from the answer.
        """
        number = dialogue.number
        line = {"row": number, "name": self._jobs[number].name, "conversations": dialogue.messages,
                "endings": dialogue.endings, "tokens": dialogue.tokens, **self.settings}
        if not chat:
            line["ids"], line["loss_mask"] = dialogue.ids, dialogue.loss_mask
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()
        self._count(line)
        self.done.add(number)

    def close(self, whole: bool) -> None:
        """Close the file; whole: nothing is missing, so it is put into the order of the rows."""
        from .store import write_text

        self._file.close()
        lines = self.path.read_text(encoding="utf-8").split("\n")[:-1]
        ordered = sorted(lines, key=lambda line: int(json.loads(line)["row"])) if whole else lines
        if ordered != lines:
            write_text(self.path, "".join(line + "\n" for line in ordered))

    def _count(self, line: Mapping[str, Any]) -> None:
        self.endings.update(line["endings"])
        self.tokens += int(line["tokens"])

    def _resume(self) -> set[int]:
        """The rows that an earlier run wrote; a line that it left half written is cut off."""
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else [b""]
        *lines, torn = lines
        done = {self._known(line, f"{self.path}, line {number}") for number, line in enumerate(lines, start=1)}
        if torn:
            if not (torn.startswith(BEGINNING) or BEGINNING.startswith(torn)):
                raise FormatError(f"{self.path}, line {len(lines) + 1}: not written by mlx_dspark.data: name another "
                                  "file")
            os.truncate(self.path, sum(len(line) + 1 for line in lines))
        return done

    def _known(self, text: bytes, where: str) -> int:
        """The row of a line that fits this run."""
        try:
            line = json.loads(text)
            number, asked = int(line["row"]), [m["content"] for m in line["conversations"] if m["role"] == "user"]
            made = {name: line[name] for name in self.settings}
            self._count(line)
        except (ValueError, KeyError, TypeError):
            raise FormatError(f"{where}: not written by mlx_dspark.data: name another file") from None
        for name, value in self.settings.items():
            if made[name] != value and name != "model":  # the weights tell whether the model is the same
                raise ValueError(f"{where} was made with {name} {made[name]!r} and this run has {value!r}: use the "
                                 "same options, or name another file")
        if number >= len(self._jobs) or list(self._jobs[number].row.turns[: len(asked)]) != asked or not asked:
            raise ValueError(f"{where} answers another prompt than row {number} of this run: give the same files and "
                             "--count, or name another file")
        return number


def check_jobs(pair: Pair, jobs: Sequence[Job]) -> None:
    """Raise ValueError where a row needs a chat template and the tokenizer has none."""
    if pair.tokenizer.has_chat_template:
        return
    for job in jobs:
        if job.row.system is not None or len(job.row.turns) > 1:
            raise ValueError(f"{job.row.where}: a system message or several turns need a chat template and this "
                             "tokenizer has none: give rows of one turn")


def regenerate(pair: Pair, jobs: Sequence[Job], wish: Wish, output: Output, batch: int, progress: Progress) -> int:
    """Answer what is missing; how many rows were left out because their first turn does not fit the context."""
    missing = [(job.number, job.row) for job in jobs if job.number not in output.done]
    for _ in output.done:
        progress.step(found=True)
    if pair.draft is None and pair.target.can_batch():
        dialogues = batched(pair, missing, wish, batch, progress.tokens)
    else:
        dialogues = one_by_one(pair, missing, wish, progress.tokens)
    left_out = 0
    for dialogue in dialogues:
        if dialogue.endings:
            output.add(dialogue, pair.tokenizer.has_chat_template)
        else:
            left_out += 1
        progress.step()
    return left_out


@click.command("data", context_settings=SETTINGS)
@pair_options
@click.option("--prompts", "named", multiple=True, required=True, metavar="FILE|NAME",
              help="JSONL of turns or conversations; maths, code or chat; or OWNER/DATASET/FILE.jsonl. Repeatable.")
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path),
              help="Append the dialogues to this file; rows that it holds are not answered again.")
@click.option("--count", type=click.IntRange(1), help="The first rows of each file.")
@click.option("-m", "--max-tokens", type=click.IntRange(1), default=2048, help="Per answer.")
@click.option("--temp", "--temperature", "temperature", type=float, default=0.7, help="0 or below is greedy.")
@click.option("--top-p", type=float, default=0.8, help="1 is off.")
@click.option("--top-k", type=int, default=20, help="0 is off.")
@click.option("--min-p", type=float, default=0.0, help="0 is off.")
@click.option("--thinking/--no-thinking", default=None, help="For the chat template. Default: none.")
@click.option("--seed", type=click.IntRange(0, 2**31), default=0, help="Row i draws with seed + i.")
@click.option("--batch", type=click.IntRange(1), default=8, help="Rows answered at once; one with --draft.")
@run_command
def command(
    named: tuple[str, ...], out: Path, count: int | None, max_tokens: int, temperature: float, top_p: float, top_k: int,
    min_p: float, thinking: bool | None, seed: int, batch: int, **pair_fields: Any,
) -> None:
    """Let a target answer prompts itself: dialogues to train its draft on.

    Every answer of a dialogue is made anew, in sight of the new ones before it. With --draft, rows are
    answered one by one with speculative decoding.
    """
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    jobs = read_jobs(named, count)
    notes = Notes()
    pair = open_pair(notes, plain=not pair_fields["draft"], **pair_fields)
    check_jobs(pair, jobs)
    wish = Wish(sampling, max_tokens, _thinking(pair, thinking))
    output = Output(out, _settings(pair, wish, pair_fields["model"]), jobs)
    if batch > 1 and pair.draft is None and not pair.target.can_batch():
        notes.say("mlx-lm cannot batch this model's cache: answering row by row")
    progress = Progress(len(jobs), "rows")
    left_out, whole = 0, False
    try:
        left_out = regenerate(pair, jobs, wish, output, batch, progress)
        whole = True
    except KeyboardInterrupt:
        pass
    finally:
        progress.clear()
        output.close(whole)
    click.echo(_summary(output, len(jobs), left_out, whole))
    if not whole:
        sys.exit(130)


def _thinking(pair: Pair, asked: bool | None) -> bool | None:
    if pair.tokenizer.has_chat_template:
        return bool(asked)
    if asked is not None:
        raise ValueError(f"--{'' if asked else 'no-'}thinking is for a chat template and this tokenizer has none: "
                         "leave it out")
    return None


def _settings(pair: Pair, wish: Wish, model: str | None) -> dict[str, Any]:
    """What every line records, and a later run must agree about."""
    from .store import content_hash

    drawn = wish.sampling
    return {
        "model": model or "the small pair in the package",
        "weights": content_hash(pair.target.model),
        "dtype": pair.facts["dtype"],
        "sampling": {"temperature": drawn.temperature, "top_p": drawn.top_p, "top_k": drawn.top_k,
                     "min_p": drawn.min_p},
        "seed": drawn.seed,
        "max_tokens": wish.max_tokens,
        "thinking": wish.thinking,
    }


def _summary(output: Output, rows: int, left_out: int, whole: bool) -> str:
    ends = f"{output.endings['stop']} answers ended by themselves, {output.endings['length']} at the limit of tokens"
    lines = [f"{len(output.done)} of {rows} rows in {output.path}: {output.tokens} tokens, {ends}"]
    if left_out:
        lines.append(f"{left_out} rows were left out: their first turn does not fit the context")
    if not whole:
        lines.append("interrupted: the same command goes on from here")
    return "\n".join(lines)


def main() -> None:
    """Entry point of `mlx_dspark.data`."""
    command(prog_name="mlx_dspark.data")


if __name__ == "__main__":
    main()
