"""What is set before mlx is imported, and what is known about the machine afterwards.

On Linux without a GPU, mlx-cpu links a slow reference BLAS. Loading the system's OpenBLAS first, with
its symbols global, makes float32 matmuls several times faster and the verify curve flat. It changes
rounding, so it can be switched off: `MLX_DSPARK_BLAS=auto|none|PATH`.

This module imports nothing heavy at the top: `mlx_dspark --help` must answer without mlx.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

BLAS_VARIABLE = "MLX_DSPARK_BLAS"
BLAS_HINT = ("float32 on this CPU is several times faster with OpenBLAS: install it "
             "(Debian, Ubuntu: apt-get install libopenblas0-pthread), it is found by itself")
_LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib",
                    "/usr/local/lib", "/opt/OpenBLAS/lib")


@dataclass(frozen=True)
class Blas:
    """Which BLAS float32 matmuls use. `path` is None for mlx's own, and `reason` says why.

    missing: an OpenBLAS would help and none was found. problem: the user named one that failed.
    """

    path: str | None
    reason: str
    missing: bool = False
    problem: str | None = None


@cache
def preload_blas() -> Blas:
    """Load OpenBLAS ahead of mlx where that helps; the package calls it when it is imported."""
    wish = os.environ.get(BLAS_VARIABLE, "auto")
    if wish == "none":
        return Blas(None, f"{BLAS_VARIABLE}=none")
    if wish != "auto":
        return _load(wish)
    if sys.platform != "linux" or _has_cuda_backend():
        return Blas(None, "mlx brings its own")
    if "mlx.core" in sys.modules:
        return Blas(None, "mlx was imported before mlx_dspark")
    for folder in _LIBRARY_FOLDERS:
        for name in ("libopenblas.so.0", "libopenblasp.so.0", "libopenblas.so"):
            path = Path(folder, name)
            if path.exists():
                return _load(str(path))
    return Blas(None, "no OpenBLAS found", missing=True)


def require_mlx() -> None:
    """Make sure that mlx starts.

    Raises ImportError with the remedy where mlx has no backend (a base install on Linux), ValueError
    if MLX_DSPARK_BLAS names a file that cannot be loaded.
    """
    problem = preload_blas().problem
    if problem is not None:
        raise ValueError(problem)
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"mlx cannot start ({str(error).splitlines()[0]}): on Linux install a backend, pip install 'mlx[cpu]' "
            "or 'mlx[cuda13]' for an NVIDIA GPU"
        ) from None


def on_cpu() -> bool:
    """True when the device in force is the CPU."""
    import mlx.core as mx

    return mx.default_device().type == mx.DeviceType.cpu  # type: ignore[no-any-return]


def compute_dtype(name: str) -> mx.Dtype | None:
    """The dtype to compute in: `auto` is float32 on the CPU and the checkpoint's own elsewhere (None)."""
    import mlx.core as mx

    if name == "auto":
        return mx.float32 if on_cpu() else None
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype is {name!r}: give auto, float32, bfloat16 or float16")
    return getattr(mx, name)  # type: ignore[no-any-return]


def memory_bytes() -> int:
    """Memory that the device in force may use: a GPU's own, else the machine's."""
    import mlx.core as mx

    facts = {} if on_cpu() else mx.device_info()
    for name in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if isinstance(facts.get(name), int):
            return facts[name]  # type: ignore[no-any-return]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@cache
def machine() -> dict[str, Any]:
    """Chip, system, versions and BLAS in force: printed with every number that depends on them."""
    from importlib.metadata import version

    import mlx.core as mx

    blas = preload_blas()
    return {
        "chip": _chip(),
        "device": "cpu" if on_cpu() else "metal" if mx.metal.is_available() else "cuda",
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "blas": blas.path or f"mlx ({blas.reason})",
    }


def _chip() -> str:
    import mlx.core as mx

    if not on_cpu():
        return str(mx.device_info().get("device_name", "unknown GPU"))
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()} ({os.cpu_count()} cores)"
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _load(path: str) -> Blas:
    if "mlx.core" in sys.modules:
        return Blas(None, "mlx was imported before mlx_dspark")
    try:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        problem = f"{BLAS_VARIABLE}={path} cannot be loaded ({error}): give auto, none or a library's path"
        return Blas(None, "loading failed", problem=problem)
    return Blas(path, "loaded ahead of mlx")


def _has_cuda_backend() -> bool:
    """mlx[cuda12] and mlx[cuda13] bring a wheel that leaves this trace."""
    spec = importlib.util.find_spec("mlx")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return any(path.name.startswith("mlx_cuda") for folder in folders for path in Path(folder).parent.glob("mlx_cuda*"))
