"""Training data: JSON lines or plain text in, sequences of token ids with a loss mask out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FormatError
from .anchors import candidates
from .config import TrainConfig
from .dialogue import Renderer, make_renderer

Row = tuple[np.ndarray, np.ndarray]  # ids int32, loss mask uint8
PROGRESS_EVERY = 50  # documents


@dataclass(frozen=True)
class Corpus:
    """Sequences one behind the other: row i is ids[offsets[i] : offsets[i + 1]], with the same part of the mask.

    sources: the file, or file and line, in which each row begins.
    """

    ids: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray
    sources: Sequence[str]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> Row:
        """Ids and loss mask of one sequence."""
        part = slice(self.offsets[index], self.offsets[index + 1])
        return self.ids[part], self.mask[part]

    def rows(self, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids and loss mask [B, S], zeros on the right, and lengths [B]."""
        found = [self.row(int(index)) for index in indices]
        lengths = np.array([len(ids) for ids, _ in found])
        ids = np.zeros((len(found), lengths.max()), dtype=np.int32)
        mask = np.zeros(ids.shape, dtype=np.uint8)
        for place, (tokens, counted) in enumerate(found):
            ids[place, : len(tokens)], mask[place, : len(tokens)] = tokens, counted
        return ids, mask, lengths

    def length(self, indices: Sequence[int]) -> int:
        """Tokens of some rows."""
        index = np.asarray(indices)
        return int((self.offsets[index + 1] - self.offsets[index]).sum())

    def split(self, row: int) -> tuple[Corpus, Corpus]:
        """The rows before `row`, and those from it on."""
        cut = self.offsets[row]
        return (Corpus(self.ids[:cut], self.mask[:cut], self.offsets[: row + 1], self.sources[:row]),
                Corpus(self.ids[cut:], self.mask[cut:], self.offsets[row:] - cut, self.sources[row:]))

    def digest(self) -> str:
        """A hash of the whole corpus, so that a resumed run can tell that it is the same."""
        digest = hashlib.sha256()
        for array in (self.ids, self.mask, self.offsets):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Data:
    """The two parts. dropped: sequences that hold too little to train on. cut: those that were longer than allowed."""

    train: Corpus
    valid: Corpus
    dropped: int
    cut: int


def read_data(
    files: Sequence[Path], tokenizer: Any, settings: TrainConfig, vocab_size: int,
    progress: Callable[[str], None] = lambda text: None,
) -> Data:
    """Read JSON lines (`conversations`, `messages`, `text` or `ids` with an optional `loss_mask`) and text files.

    Dialogues and ids are sequences of their own. Plain text is joined, each document behind a token that begins or
    ends texts, and cut into windows of max_length in which every token counts. Documents are held out by a hash.
    Raises FormatError with file and line, or ValueError when nothing is left.
    """
    renderer = make_renderer(tokenizer, settings.template)
    parts = (_Part(settings), _Part(settings))
    for number, (where, text, ids, mask) in enumerate(_documents(files, tokenizer, renderer)):
        if number % PROGRESS_EVERY == 0:
            progress(f"reading {where}")
        parts[_held_out(text, settings.valid)].take(ids, mask, where)
    progress("")
    train, valid = _both_sides([part.corpus() for part in parts], settings.valid)
    if not len(train):
        raise ValueError(f"nothing to train on in {', '.join(map(str, files))}: no sequence has {settings.min_tokens} "
                         "tokens that count")
    largest = max(int(corpus.ids.max(initial=0)) for corpus in (train, valid))
    if largest >= vocab_size:
        raise FormatError(f"the data holds token {largest}, the target has {vocab_size} rows: make the data with the "
                          "target's own tokenizer")
    return Data(train, valid, parts[0].dropped + parts[1].dropped, parts[0].cut + parts[1].cut)


class _Part:
    """Collects the sequences of one side."""

    def __init__(self, settings: TrainConfig):
        self.settings, self.dropped, self.cut = settings, 0, 0
        self._rows: list[tuple[np.ndarray, np.ndarray, str]] = []
        self._loose: list[tuple[np.ndarray, str]] = []  # plain text, to be cut into windows

    def take(self, ids: np.ndarray, mask: np.ndarray | None, where: str) -> None:
        """A sequence, or plain text where there is no mask."""
        if mask is None:
            self._loose.append((ids, where))
            return
        self.cut += len(ids) > self.settings.max_length
        self._add(ids[: self.settings.max_length], mask[: self.settings.max_length], where)

    def corpus(self) -> Corpus:
        """What was taken; plain text comes last."""
        size = self.settings.max_length
        stream = np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in self._loose)])
        ends = np.cumsum([len(ids) for ids, _ in self._loose])
        for first in range(0, len(stream), size):
            window = stream[first : first + size]
            where = self._loose[int(np.searchsorted(ends, first, side="right"))][1]
            self._add(window, np.ones(len(window), np.uint8), where)
        lengths = [len(ids) for ids, _, _ in self._rows]
        return Corpus(np.concatenate([np.zeros(0, np.int32), *(ids for ids, _, _ in self._rows)]),
                      np.concatenate([np.zeros(0, np.uint8), *(mask for _, mask, _ in self._rows)]),
                      np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
                      [where for _, _, where in self._rows])

    def _add(self, ids: np.ndarray, mask: np.ndarray, where: str) -> None:
        if mask.sum() < self.settings.min_tokens or not candidates(mask[None]).any():
            self.dropped += 1
            return
        self._rows.append((ids, mask, where))


def _documents(
    files: Sequence[Path], tokenizer: Any, renderer: Renderer
) -> Iterator[tuple[str, str, np.ndarray, np.ndarray | None]]:
    """(where it stands, its text, ids, mask) of every document; a mask of None is plain text."""
    opening = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    start = [] if opening is None else [opening]

    def plain(text: str) -> tuple[np.ndarray, None]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return np.array([*start, *ids], dtype=np.int32), None

    for path in files:
        if path.suffix != ".jsonl":
            text = _read(path)
            yield str(path), text, *plain(text)
            continue
        for number, line in enumerate(_read(path).split("\n"), start=1):  # splitlines would split at U+2028, too
            if line.strip():
                where = f"{path}, line {number}"
                yield where, line, *_entry(line, where, plain, renderer)


def _entry(
    line: str, where: str, plain: Callable[[str], tuple[np.ndarray, None]], renderer: Renderer
) -> tuple[np.ndarray, np.ndarray | None]:
    try:
        entry = json.loads(line)
        if "ids" in entry:
            return _given(entry["ids"], entry.get("loss_mask"))
        if isinstance(entry.get("text"), str):
            return plain(entry["text"])
        messages = entry["conversations"] if "conversations" in entry else entry["messages"]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise FormatError(f"{where}: not an object with conversations, messages, text, or ids and loss_mask of one "
                          "length: correct or remove the line") from None
    return renderer(messages, entry.get("endings") or [], where)


def _given(ids: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and loss mask (None: all count) as arrays. Raises ValueError if they cannot be."""
    tokens = np.array(ids)
    counted = np.ones(tokens.shape, np.int64) if mask is None else np.array(mask)
    whole = tokens.dtype.kind == "i" and counted.dtype.kind in "ib" and tokens.ndim == 1
    if not whole or tokens.shape != counted.shape or tokens.min() < 0 or tokens.max() >= 2**31 or \
            counted.min() < 0 or counted.max() > 1:
        raise ValueError("not token ids")
    return tokens.astype(np.int32), counted.astype(np.uint8)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise FormatError(f"{path} is not UTF-8 text: convert it first") from None


def _held_out(text: str, share: float) -> int:
    """1 for a document that is held out; the same text always falls on the same side."""
    return int(int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") < share * 2**32)


def _both_sides(sides: Sequence[Corpus], share: float) -> tuple[Corpus, Corpus]:
    """Training and held-out part; where few documents left one of them empty, the last rows are held out."""
    train, valid = sides
    whole = valid if not len(train) else train
    if share > 0 and len(whole) > 1 and not (len(train) and len(valid)):
        return whole.split(len(whole) - max(1, round(share * len(whole))))
    return train, valid
