"""Checkpoint packagings: each public way of storing a draft, read into one `DraftSpec` and one set of names.

Installed as `mlx_dspark.convert`; `python -m mlx_dspark.convert` is the converter. `detect.py` says which
packaging a folder has, by its keys and tensors and never by its name; one small file per packaging says
what its config means and how its tensors are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]


def __getattr__(name: str) -> Any:
    """Loaded when asked for: `--help` of the converter must not import mlx."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import checkpoint

    return getattr(checkpoint, name)
