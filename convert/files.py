"""Safetensors folders: headers read and checked before a byte of weights is touched."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_dspark.errors import FormatError

ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
              "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
_HEADER_LIMIT = 100_000_000  # the format's own bound


@dataclass(frozen=True)
class Stored:
    """One tensor in a file: bytes start..end."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises FormatError when it is missing or not a JSON object."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FormatError(f"{folder} has no config.json: give a model folder or a Hugging Face repo id") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not JSON ({error}): download it again") from None
    if not isinstance(config, dict):
        raise FormatError(f"{path} is not a JSON object: download it again")
    return config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, checked against its index in both directions.

    Raises FormatError for no file at all, a missing shard, or one that the index does not name.
    """
    found = {path.name: path for path in sorted(folder.glob("model*.safetensors"))}
    index_path = folder / "model.safetensors.index.json"
    if index_path.exists():
        try:
            named = {str(name) for name in json.loads(index_path.read_text(encoding="utf-8"))["weight_map"].values()}
        except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
            raise FormatError(f"{index_path} is not a safetensors index: download it again") from None
        for name in sorted(named - found.keys()):
            raise FormatError(f"{folder / name} is missing although the index names it: "
                              "the download is incomplete, run it again")
        for name in sorted(found.keys() - named):
            raise FormatError(f"{folder / name} is not named by the index: remove the stray file or the index")
    if not found:
        raise FormatError(f"{folder} has no model*.safetensors: the download is incomplete, or this is no model folder")
    return list(found.values())


def read_headers(folder: Path) -> dict[str, Stored]:
    """All tensors of a folder by name. Raises FormatError for a damaged or truncated file."""
    tensors: dict[str, Stored] = {}
    for path in weight_files(folder):
        for name, stored in read_header(path).items():
            if name in tensors:
                raise FormatError(f"{path} holds tensor {name} a second time: remove the stray file")
            tensors[name] = stored
    return tensors


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file. mlx would read past the end of a truncated one."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, _HEADER_LIMIT):
                raise FormatError(f"{path} is truncated or no safetensors file ({size} bytes): download it again")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {name: _stored(path, entry, 8 + length, size) for name, entry in header.items()}
    except (struct.error, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path} is not a safetensors file: download it again") from None


def _stored(path: Path, entry: dict[str, Any], base: int, size: int) -> Stored:
    shape = tuple(int(n) for n in entry["shape"])
    first, last = (int(n) for n in entry["data_offsets"])
    stored = Stored(path, str(entry["dtype"]), shape, base + first, base + last)
    if stored.dtype not in ITEM_BYTES:
        raise FormatError(f"{path} stores dtype {stored.dtype!r}, which is not supported here")
    needed = math.prod(shape) * ITEM_BYTES[stored.dtype]
    if min(shape, default=1) < 0 or not 0 <= first <= last or stored.nbytes != needed:
        raise ValueError
    if stored.end > size:
        raise FormatError(f"{path} is truncated ({size} bytes, {stored.end} are needed): download it again")
    return stored
