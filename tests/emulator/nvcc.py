"""Compiles a kernel for an NVIDIA GPU, which need not be there, and says what it takes of one."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_dspark.kernels.launch import Kernel, Launch

from .build import Fault, available_modes, folder, nvcc
from .text import cuda_text

INCLUDE = Path(__file__).parent / "nvcc_include"

# What mx.fast.cuda_kernel puts before a kernel's own header.
PRELUDE = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

#define inf cuda::std::numeric_limits<float>::infinity()

"""


@dataclass(frozen=True)
class Resources:
    """Registers a thread, bytes of stack and of spilled registers a thread, bytes of shared memory."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


def nvcc_compile(kernel: Kernel, inputs: Sequence[mx.array], launch: Launch, arch: str = "sm_90") -> Resources:
    """Compile the text that MLX would hand to NVRTC. Skips the running test where there is no nvcc."""
    if available_modes()["nvcc"]:
        pytest.skip(available_modes()["nvcc"])
    return _resources(_ptxas(PRELUDE + cuda_text(kernel, inputs, launch).source, arch))


def _ptxas(source: str, arch: str) -> str:
    """What ptxas says about a source; kept, for a build takes seconds."""
    command = [nvcc(), "-std=c++17", f"-arch={arch}", "-cubin", "-Xptxas", "-v"]
    key = "\0".join([*command, source, _version(), *(p.read_text() for p in sorted(INCLUDE.rglob("*.cuh")))])
    kept = folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.ptxas"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=folder()) as own:
            path = Path(own) / "kernel.cu"
            path.write_text(source)
            done = subprocess.run([*command, "-I", str(INCLUDE), "-o", f"{own}/cubin", str(path)],
                                  capture_output=True, text=True)
            if done.returncode:
                raise Fault(f"compile error: {next(x for x in done.stderr.splitlines() if 'error' in x)}")
            Path(own, "said").write_text(done.stderr)
            os.replace(f"{own}/said", kept)
    return kept.read_text()


@cache
def _version() -> str:
    return subprocess.run([nvcc(), "--version"], capture_output=True, text=True).stdout


def _resources(said: str) -> Resources:
    def number(pattern: str) -> int:
        found = re.search(pattern, said)
        return int(found[1]) if found else 0

    return Resources(
        registers=number(r"Used (\d+) registers"), stack=number(r"(\d+) bytes stack frame"),
        spill_stores=number(r"(\d+) bytes spill stores"), spill_loads=number(r"(\d+) bytes spill loads"),
        shared=number(r"(\d+) bytes smem"))
