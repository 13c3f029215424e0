"""Checkpoint packagings: each public way of storing a draft, read into one `DraftSpec` and one set of names.

Installed as `mlx_dspark.convert`; `python -m mlx_dspark.convert` is the converter. `detect.py` says which
packaging a folder has, by its keys and tensors and never by its name; one small file per packaging says
what its config means and how its tensors are called.
"""

from .checkpoint import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]
