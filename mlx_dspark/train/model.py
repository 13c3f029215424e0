"""The draft as something to train: what is frozen, how it starts, and its names in DeepSpec's folders."""

from __future__ import annotations

from typing import TypeVar

import mlx.nn as nn

from ..draft.spec import DraftSpec

Draft = TypeVar("Draft", bound=nn.Module)


def freeze(draft: Draft) -> Draft:
    """Freeze what DeepSeek's runs do not train: both tables, and Gemma's layer scalars."""
    draft.train()
    draft.unfreeze()
    draft.tables.freeze()
    draft.freeze(keys="layer_scalar", strict=False)
    return draft


def file_name(spec: DraftSpec, name: str) -> str:
    """A parameter's name in a DeepSpec folder."""
    if spec.kind == "eagle3" and name == "hidden_norm.weight":
        return "layers.0.hidden_norm.weight"
    return name.removeprefix("backbone.").removeprefix("tables.")
