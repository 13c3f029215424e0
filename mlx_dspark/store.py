"""What this machine learned about a pair, kept in the user's cache folder: cost curves and temperatures.

A curve belongs to chip, system, mlx version, BLAS, model contents and quantisation; anything else is
another key, so that a number measured elsewhere is never used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from .errors import FormatError
from .schedule.cost import CostCurve
from .schedule.grid import CostGrid

if TYPE_CHECKING:
    from .load import Pair

CACHE_VARIABLE = "MLX_DSPARK_CACHE"
Costs = TypeVar("Costs", CostCurve, CostGrid)


def cache_folder() -> Path:
    """Where curves and temperatures are kept; MLX_DSPARK_CACHE names another place."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE]).expanduser()
    base = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or base) / "mlx_dspark"


def kernels_folder() -> Path:
    """Where it is kept which kernels work on this machine."""
    return cache_folder() / "kernels"


def pair_key(pair: Pair) -> dict[str, Any]:
    """Everything a cost depends on; equal keys may share a curve."""
    from .backend import machine

    facts = machine()
    key = {name: facts[name] for name in ("chip", "device", "os", "mlx", "blas")}
    key["target"] = content_hash(pair.target.model)
    key["dtype"] = pair.facts["dtype"]
    key["draft"] = None if pair.draft is None else content_hash(pair.draft)
    return key


def content_hash(model: Any) -> str:
    """A hash of a model's parameter names, shapes, dtypes and a few values of each."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    if not hasattr(model, "parameters"):  # a classic draft wraps a whole model, a user's own may be anything
        inner = getattr(model, "model", None)
        return type(model).__qualname__ if inner is None else content_hash(inner)
    digest = hashlib.sha256()
    samples = []
    for name, array in sorted(tree_flatten(model.parameters())):
        digest.update(f"{name} {array.shape} {array.dtype}\n".encode())
        samples.append(array.reshape(-1)[:4].astype(mx.float32))
    values = mx.concatenate(samples) if samples else mx.zeros((0,))
    digest.update(json.dumps(values.tolist()).encode())
    return digest.hexdigest()[:16]


def curve_path(pair: Pair) -> Path:
    """Where the pair's cost curve is kept."""
    return cache_folder() / "curves" / f"{_digest(pair_key(pair))}.json"


def calibration_path(pair: Pair) -> Path:
    """Where the pair's temperatures are kept; they belong to the weights, not to the machine."""
    key = pair_key(pair)
    return cache_folder() / "temperatures" / f"{_digest({name: key[name] for name in ('target', 'draft')})}.json"


def find_curve(pair: Pair) -> CostCurve | None:
    """The stored curve of this pair on this machine, None when there is none. Raises FormatError if damaged."""
    return _find(curve_path(pair), CostCurve.from_dict, "mlx_dspark profile")


def stored_curves() -> list[dict[str, Any]]:
    """What is known of the curves in the cache folder: file, date, short or full, and their keys."""
    found = []
    for path in sorted((cache_folder() / "curves").glob("*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            about = document.get("about", {})
            found.append({"file": str(path), "measured": about.get("measured"), "short": about.get("short"),
                          "days": round((time.time() - path.stat().st_mtime) / 86400, 1), "key": document.get("key")})
        except (OSError, ValueError, AttributeError):
            found.append({"file": str(path), "damaged": True})
    return found


def save_curve(pair: Pair, curve: CostCurve) -> Path:
    """Store a curve with its key; an interrupted write leaves the old one."""
    return write_json(curve_path(pair), {**curve.to_dict(), "key": pair_key(pair)})


def grid_path(pair: Pair) -> Path:
    """Where the pair's cost grid is kept."""
    return cache_folder() / "grids" / f"{_digest(pair_key(pair))}.json"


def find_grid(pair: Pair) -> CostGrid | None:
    """The stored grid of this pair on this machine, None when there is none. Raises FormatError if damaged."""
    return _find(grid_path(pair), CostGrid.from_dict, "mlx_dspark profile --requests")


def _find(path: Path, read: Callable[[Any], Costs], command: str) -> Costs | None:
    """What `command` stored, None where there is no file."""
    if not path.exists():
        return None
    try:
        return read(json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, UnicodeDecodeError, FormatError) as error:
        raise FormatError(f"{path} is damaged ({error}): remove it, or run {command} again") from None


def save_grid(pair: Pair, grid: CostGrid) -> Path:
    """Store a grid with its key; an interrupted write leaves the old one."""
    return write_json(grid_path(pair), {**grid.to_dict(), "key": pair_key(pair)})


def read_calibration(path: Path, gamma: int | None = None) -> list[float]:
    """Temperatures from a file: a JSON list, or an object with `temperatures`.

    gamma: how many there must be, if that is known. Raises FormatError with the place and the remedy.
    """
    remedy = "run mlx_dspark.calibrate again"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} is no JSON ({error}): {remedy}") from None
    listed = document.get("temperatures") if isinstance(document, dict) else document
    if not isinstance(listed, list) or not listed:
        raise FormatError(f"{path} holds no list of temperatures: {remedy}")
    for slot, value in enumerate(listed, start=1):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise FormatError(f"{path}: the temperature of slot {slot} is {value!r}, not a positive number: {remedy}")
    if gamma is not None and len(listed) != gamma:
        raise FormatError(f"{path} holds {len(listed)} temperatures and the draft has {gamma} slots: {remedy}")
    return [float(value) for value in listed]


def write_json(path: Path, document: Mapping[str, Any]) -> Path:
    """Write a JSON file whole or not at all."""
    return write_text(path, json.dumps(document, indent=1) + "\n")


def write_text(path: Path, text: str) -> Path:
    """Write a file whole or not at all, whoever else writes it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda file: file.write(text.encode()), f"{os.getpid()}.{time.monotonic_ns()}")
    return path


def replace_file(path: Path, write: Callable[[IO[bytes]], Any], ending: str = "partial") -> None:
    """Write `path` through a hidden file beside it: after a crash it holds the old content or the new one.

    ending: of that file. With the usual one, what a killed process left is written over by the next.
    Raises OSError, with the old content in place, where the disk is full.
    """
    partial = path.with_name(f".{path.name}.{ending}")
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


def _digest(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
