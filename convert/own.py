"""What our own converter writes: the normalised facts and names, as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_dspark.draft.spec import DraftSpec

NAME = "mlx_dspark"
KEY = "mlx_dspark"  # the section of config.json that holds the facts


def rename(name: str) -> str | None:
    return name


def read(config: Mapping[str, Any], where: str) -> DraftSpec:
    """The facts of a converted draft."""
    return DraftSpec.from_dict(config[KEY].get("spec", {}) if isinstance(config[KEY], Mapping) else {}, where)
