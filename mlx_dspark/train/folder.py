"""The trained draft in DeepSpec's layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..store import replace_file
from .model import file_name


def write_draft(folder: Path, config: Mapping[str, Any], draft: nn.Module, dtype: mx.Dtype = mx.bfloat16) -> None:
    """Write config.json and model.safetensors as DeepSpec does."""
    arrays = {file_name(draft.spec, name): array.astype(dtype) for name, array in tree_flatten(draft.parameters())}
    facts = {**config, "dtype": str(dtype).removeprefix("mlx.core.")}
    replace_file(folder / "model.safetensors", lambda file: mx.save_safetensors(file, arrays, {"format": "pt"}))
    replace_file(folder / "config.json", lambda file: file.write(json.dumps(facts, indent=2).encode() + b"\n"))
