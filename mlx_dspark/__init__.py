"""mlx_dspark: DSpark speculative decoding on Apple Silicon (and wherever MLX runs)."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .backend import preload_blas

if TYPE_CHECKING:
    from .decode import DecodeOptions, decode
    from .errors import CacheError, FormatError, PairError
    from .generate import Chunk, Generation, generate, stream_generate
    from .load import Pair, encode_prompt, load
    from .structs import KVOptions, Round, Sampling

__version__ = "0.1.0"

preload_blas()  # only works before mlx is imported, by whichever module comes first

_PUBLIC = {
    "CacheError": "errors", "FormatError": "errors", "PairError": "errors",
    "KVOptions": "structs", "Round": "structs", "Sampling": "structs",
    "Pair": "load", "encode_prompt": "load", "load": "load",
    "DecodeOptions": "decode", "decode": "decode",
    "Chunk": "generate", "Generation": "generate", "generate": "generate", "stream_generate": "generate",
}
_NEED_MLX = {"load", "decode"}

__all__ = ["CacheError", "Chunk", "DecodeOptions", "FormatError", "Generation", "KVOptions", "Pair", "PairError",
           "Round", "Sampling", "decode", "encode_prompt", "generate", "load", "stream_generate"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _PUBLIC[name] in _NEED_MLX:
        from .backend import require_mlx

        require_mlx()
    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """Keeps `mlx_dspark.load` the function: importing the submodule `load` would rebind the name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
