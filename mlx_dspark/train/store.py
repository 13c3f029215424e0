"""Taps and last hidden states on disk, made once and read by every epoch.

A folder of shards, each a run of whole sequences: bfloat16 [positions, (M + 1) * D], taps first. index.json names
the shards with their checksums and what they were made from. A shard gets its name when it is complete, so making the
store can be stopped anywhere and continued; reading maps the files into memory.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import FormatError
from ..store import replace_file
from .data import Corpus
from .features import Features

INDEX = "index.json"
SHARD_BYTES = 2**30
BATCH_TOKENS = 4096  # of the target's forwards
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Layout:
    """What a store is made of. width: values a position, (taps + 1) * D. identity: of target, taps and data."""

    corpus: Corpus
    width: int
    taps: int
    identity: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return 2 * self.width * len(self.corpus.ids)

    def shards(self) -> list[range]:
        """Rows of each shard: as many as fit into SHARD_BYTES, and at least one."""
        found, first = [], 0
        limit = max(1, SHARD_BYTES // (2 * self.width))
        for row in range(1, len(self.corpus) + 1):
            ends = row == len(self.corpus)
            if ends or self.corpus.offsets[row + 1] - self.corpus.offsets[first] > limit:
                found.append(range(first, row))
                first = row
        return found


def make_store(folder: Path, layout: Layout, features: Features, progress: Progress = lambda text: None) -> None:
    """Write the shards that are missing.

    Raises FormatError where `folder` was made from something else, ValueError where the disk is full: the complete
    shards stay and the next call continues behind them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    index = _read_index(folder, layout)
    for number, rows in enumerate(layout.shards()):
        name = _name(number)
        if _complete(folder, index, number):
            continue
        try:
            checksum = _write_shard(folder / name, layout.corpus, rows, features, progress, len(layout.corpus))
        except OSError as error:
            raise ValueError(f"{folder / name} could not be written ({error.strerror}): make room and give the same "
                             "command again; the complete shards are kept") from error
        index["shards"][name] = checksum
        text = json.dumps(index, indent=1).encode()
        replace_file(folder / INDEX, lambda file, text=text: file.write(text))
    progress("")


def missing_bytes(folder: Path, layout: Layout) -> int:
    """How much `make_store` would write. Raises FormatError where `folder` was made from something else."""
    index = _read_index(folder, layout)
    missing = [rows for number, rows in enumerate(layout.shards()) if not _complete(folder, index, number)]
    return sum(_shard_bytes(layout, rows) for rows in missing)


def check_room(folder: Path, needed: int) -> None:
    """Raise ValueError unless the disk of `folder` has room for `needed` bytes."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(f"{folder}: the features take {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free: give "
                         "another --features, less data, or leave it out and the target runs in every step")


class StoredFeatures:
    """Features read from a complete store."""

    def __init__(self, folder: Path, layout: Layout, progress: Progress = lambda text: None):
        """Map the shards and compare their checksums. Raises FormatError for a damaged or incomplete store."""
        index = _read_index(folder, layout)
        self._layout, self._maps = layout, []
        self._starts = [rows.start for rows in layout.shards()]
        for number, rows in enumerate(layout.shards()):
            path = folder / _name(number)
            progress(f"checking {path.name}")
            if not _complete(folder, index, number):
                raise FormatError(f"{path} is missing: give the same command again")
            size = _shard_bytes(layout, rows)
            if path.stat().st_size != size or _checksum(path) != index["shards"][path.name]:
                raise FormatError(f"{path} is damaged: remove it and give the same command again")
            self._maps.append(np.memmap(path, np.uint16, "r", shape=(size // (2 * layout.width), layout.width)))
        progress("")

    def __call__(self, rows: Sequence[int], ids: np.ndarray) -> tuple[mx.array, mx.array]:
        """Taps [B, S, M*D] and last hidden states [B, S, D] of the corpus's `rows`, zeros behind each."""
        layout = self._layout
        found = np.zeros((*ids.shape, layout.width), dtype=np.uint16)
        for place, row in enumerate(rows):
            shard = int(np.searchsorted(self._starts, row, side="right")) - 1
            base = layout.corpus.offsets[self._starts[shard]]
            first, last = layout.corpus.offsets[row] - base, layout.corpus.offsets[row + 1] - base
            found[place, : last - first] = self._maps[shard][first:last]
        both = mx.view(mx.array(found), mx.bfloat16)
        cut = layout.width * layout.taps // (layout.taps + 1)
        return both[..., :cut], both[..., cut:]


def _write_shard(
    path: Path, corpus: Corpus, rows: range, features: Features, progress: Progress, total: int
) -> int:
    checksum = 0

    def write(file: Any) -> None:
        nonlocal checksum
        first = rows.start
        while first < rows.stop:
            last = _batch_end(corpus, first, rows.stop)
            progress(f"features of sequence {first} of {total}")
            for block in _rows_of(corpus, range(first, last), features):
                file.write(block)
                checksum = zlib.crc32(block, checksum)
            first = last

    replace_file(path, write)
    return checksum


def _batch_end(corpus: Corpus, first: int, stop: int) -> int:
    """Behind the last row of a target forward that begins with `first`."""
    last = first + 1
    while last < stop and corpus.offsets[last + 1] - corpus.offsets[first] <= BATCH_TOKENS:
        last += 1
    return last


def _rows_of(corpus: Corpus, rows: range, features: Features) -> list[bytes]:
    ids, _, lengths = corpus.rows(rows)
    both = mx.concatenate(features(rows, ids), axis=-1).astype(mx.bfloat16)
    bits = np.array(mx.view(both, mx.uint16))
    return [bits[place, :length].tobytes() for place, length in enumerate(lengths)]


def _read_index(folder: Path, layout: Layout) -> dict[str, Any]:
    path, made_of = folder / INDEX, json.loads(json.dumps({**layout.identity, "width": layout.width}))
    if not path.exists():
        return {"version": 1, "made_of": made_of, "shards": {}}
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        before, shards = index["made_of"], index["shards"]
    except (ValueError, KeyError, TypeError):
        raise FormatError(f"{path} is damaged: remove {folder} and make the features again") from None
    for name, value in made_of.items():
        if before.get(name) != value:
            raise FormatError(f"{folder} was made with {name} {before.get(name)}, now it is {value}: give another "
                              "--features, or the settings and data it was made with")
    return {**index, "shards": dict(shards)}


def _complete(folder: Path, index: Mapping[str, Any], number: int) -> bool:
    return _name(number) in index["shards"] and (folder / _name(number)).exists()


def _shard_bytes(layout: Layout, rows: range) -> int:
    return int(2 * layout.width * (layout.corpus.offsets[rows.stop] - layout.corpus.offsets[rows.start]))


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(2**24):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _name(number: int) -> str:
    return f"shard-{number:05d}.bin"
