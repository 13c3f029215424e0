"""A draft folder, opened: its facts, its tensors by normalised name, nothing loaded yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_dspark.draft.spec import DraftSpec
from mlx_dspark.errors import FormatError

from .detect import detect
from .files import Stored, read_config, read_headers


@dataclass(frozen=True)
class Checkpoint:
    """packaging: who packed it so. names: normalised name -> name in the file."""

    folder: Path
    packaging: str
    config: Mapping[str, Any]
    spec: DraftSpec
    names: Mapping[str, str]
    stored: Mapping[str, Stored]

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """mlx-lm's quantisation section, if the tensors are stored quantised."""
        settings = self.config.get("quantization")
        if settings is None:
            return None
        if not isinstance(settings, Mapping) or not {"bits", "group_size"} <= settings.keys():
            raise FormatError(f"{self.folder}: config.json has a damaged quantization section: convert it again")
        return settings

    def info(self, name: str) -> Stored:
        """Where a tensor of this normalised name lies."""
        return self.stored[self.names[name]]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Detect the packaging of a draft folder and normalise its facts and names.

    Raises FormatError with the folder, the value and the remedy for everything that cannot be used.
    """
    where = str(folder)
    config = read_config(folder)
    stored = read_headers(folder)
    packaging = detect(config, stored, where)
    spec = packaging.read(config, where)
    spec.check(where)
    names: dict[str, str] = {}
    for name in stored:
        normal = packaging.rename(name)
        if normal is None:
            continue
        if normal in names:
            raise FormatError(f"{where}: tensors {names[normal]} and {name} are the same thing: remove one")
        names[normal] = name
    return Checkpoint(folder, packaging.NAME, config, spec, names, stored)
