"""Files that are there whole or not at all, and the trained draft in DeepSpec's layout."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .model import file_name


def replace_file(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Write `path` through a file beside it: after a crash it holds the old content or the new one.

    Raises OSError, with the old content in place, where the disk is full.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    finally:
        partial.unlink(missing_ok=True)


def write_draft(folder: Path, config: Mapping[str, Any], draft: nn.Module, dtype: mx.Dtype = mx.bfloat16) -> None:
    """Write config.json and model.safetensors as DeepSpec does."""
    arrays = {file_name(draft.spec, name): array.astype(dtype) for name, array in tree_flatten(draft.parameters())}
    facts = {**config, "dtype": str(dtype).removeprefix("mlx.core.")}
    replace_file(folder / "model.safetensors", lambda file: mx.save_safetensors(file, arrays, {"format": "pt"}))
    replace_file(folder / "config.json", lambda file: file.write(json.dumps(facts, indent=2).encode() + b"\n"))
