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


@dataclass(frozen=True)
class Corpus:
    """Sequences one behind the other: row i is ids[offsets[i] : offsets[i + 1]], with the same part of the mask."""

    ids: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray

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

    def digest(self) -> str:
        """A hash of the whole corpus, so that a resumed run can tell that it is the same."""
        digest = hashlib.sha256()
        for array in (self.ids, self.mask, self.offsets):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Data:
    """The two parts, and how many sequences were dropped because they hold too little to train on."""

    train: Corpus
    valid: Corpus
    dropped: int


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
    for name, text, row in _documents(files, tokenizer, renderer):
        progress(f"reading {name}: {len(parts[0]) + len(parts[1])} tokens")
        part = parts[_held_out(text, settings.valid)]
        part.join(row) if row[1] is None else part.add(*row, name)
    progress("")
    train, valid = (part.corpus() for part in parts)
    if not len(train):
        raise ValueError(f"nothing to train on in {', '.join(map(str, files))}: no sequence has {settings.min_tokens} "
                         "tokens that count")
    if not len(valid) and settings.valid > 0 and len(train) > 1:
        train, valid = _split_last(train)
    largest = max(int(corpus.ids.max(initial=0)) for corpus in (train, valid))
    if largest >= vocab_size:
        raise FormatError(f"the data holds token {largest}, the target has {vocab_size} rows: make the data with the "
                          "target's own tokenizer")
    return Data(train, valid, parts[0].dropped + parts[1].dropped)


class _Part:
    """Collects the sequences of one side."""

    def __init__(self, settings: TrainConfig):
        self.settings, self.dropped = settings, 0
        self._rows: list[Row] = []
        self._loose: list[np.ndarray] = []  # plain text that does not fill a window yet
        self._tokens = 0

    def __len__(self) -> int:
        return self._tokens

    def add(self, ids: np.ndarray, mask: np.ndarray, name: str) -> None:
        ids, mask = ids[: self.settings.max_length], mask[: self.settings.max_length]
        if mask.sum() < self.settings.min_tokens or not candidates(mask[None]).any():
            self.dropped += 1
            return
        self._rows.append((ids, mask))
        self._tokens += len(ids)

    def join(self, row: tuple[np.ndarray, None]) -> None:
        self._loose.append(row[0])
        self._tokens += len(row[0])

    def corpus(self) -> Corpus:
        stream, size = np.concatenate([np.zeros(0, np.int32), *self._loose]), self.settings.max_length
        for first in range(0, len(stream), size):
            window = stream[first : first + size]
            self.add(window, np.ones(len(window), np.uint8), "")
        lengths = [len(ids) for ids, _ in self._rows]
        return Corpus(np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in self._rows)]),
                      np.concatenate([np.zeros(0, np.uint8), *(mask for _, mask in self._rows)]),
                      np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64))


def _documents(
    files: Sequence[Path], tokenizer: Any, renderer: Renderer
) -> Iterator[tuple[str, str, tuple[np.ndarray, np.ndarray | None]]]:
    """(file, what identifies the document, ids and mask); a mask of None is plain text."""
    opening = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    start = [] if opening is None else [opening]

    def plain(text: str) -> tuple[np.ndarray, None]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return np.array([*start, *ids], dtype=np.int32), None

    for path in files:
        if path.suffix != ".jsonl":
            text = _read(path)
            yield path.name, text, plain(text)
            continue
        for number, line in enumerate(_read(path).splitlines(), start=1):
            if line.strip():
                yield path.name, line, _entry(line, f"{path}, line {number}", plain, renderer)


def _entry(
    line: str, where: str, plain: Callable[[str], tuple[np.ndarray, None]], renderer: Renderer
) -> tuple[np.ndarray, np.ndarray | None]:
    try:
        entry = json.loads(line)
        if "ids" in entry:
            ids = np.array(entry["ids"], dtype=np.int32)
            mask = np.array(entry.get("loss_mask", [1] * len(ids)), dtype=np.uint8)
            if ids.ndim != 1 or ids.shape != mask.shape or ids.min(initial=0) < 0 or mask.max(initial=0) > 1:
                raise ValueError
            return ids, mask
        if isinstance(entry.get("text"), str):
            return plain(entry["text"])
        messages = entry["conversations"] if "conversations" in entry else entry["messages"]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise FormatError(f"{where}: not an object with conversations, messages, text, or ids and loss_mask of one "
                          "length: correct or remove the line") from None
    return renderer(messages, where)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise FormatError(f"{path} is not UTF-8 text: convert it first") from None


def _held_out(text: str, share: float) -> int:
    """1 for a document that is held out; the same text always falls on the same side."""
    return int(int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") < share * 2**32)


def _split_last(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """The last row as held-out part: too few documents for a hash to hit one."""
    cut = corpus.offsets[-2]
    return (Corpus(corpus.ids[:cut], corpus.mask[:cut], corpus.offsets[:-1]),
            Corpus(corpus.ids[cut:], corpus.mask[cut:], np.array([0, len(corpus.ids) - cut])))
