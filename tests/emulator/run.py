"""The emulator: an `Execute` that runs a kernel's text on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_dspark.kernels.launch import Kernel, Launch

from .build import SANITIZERS, Fault, library, line_of, runner
from .text import Text, cpu_source, cuda_text, metal_text

ORDERS = ("forward", "reverse", "random")
_TEXT = {"metal": metal_text, "cuda": cuda_text}
_ENVIRONMENT = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:exitcode=5"}


class Emulator:
    """Runs kernels; `Fault` says what one did wrong.

    dialect: "metal" or "cuda". order: in which threads and threadgroups get their turns. sanitize:
    "thread" (the compiler's ThreadSanitizer instrumentation, checks of our own) watches every access to
    memory for races and reads of what nobody wrote; "address" (AddressSanitizer) fences every array.
    words: the dialect header, if not the project's. timeout: seconds.
    """

    def __init__(self, dialect: str = "metal", order: str = "forward", sanitize: str | None = None, seed: int = 0,
                 words: str | None = None, timeout: float = 60.0):
        if dialect not in _TEXT or order not in ORDERS or sanitize not in SANITIZERS:
            raise ValueError(f"no emulator for dialect {dialect!r}, order {order!r}, sanitize {sanitize!r}")
        self.dialect, self.order, self.sanitize, self.seed = dialect, order, sanitize, seed
        self.words, self.timeout = words, timeout

    def __repr__(self) -> str:
        return "-".join(filter(None, (self.dialect, self.order, self.sanitize)))

    def __call__(self, kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> list[mx.array]:
        if any(g % t for g, t in zip(launch.grid, launch.threadgroup, strict=True)):
            raise ValueError(f"{kernel.name}: grid {launch.grid} is no multiple of {launch.threadgroup}")
        text = self._text(kernel, inputs, launch)
        try:
            binary = library(cpu_source(text, self.dialect), self.dialect, self.sanitize)
            return self._run(binary, kernel, inputs, launch)
        except Fault as fault:
            raise Fault(_with_source(str(fault), text)) from None

    def _text(self, kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> Text:
        words = {} if self.words is None else {"words": self.words}
        return _TEXT[self.dialect](kernel, inputs, launch, **words)

    def _run(self, binary: Path, kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> list[mx.array]:
        data = [_bytes(a) for a in inputs]
        sizes = [int(np.prod(shape)) * dtype.size for shape, dtype in zip(launch.shapes, launch.dtypes, strict=True)]
        buffers = [f"in:{len(d)}:{n}" for d, n in zip(data, kernel.inputs, strict=True)]
        buffers += [f"out:{size}:{n}" for size, n in zip(sizes, kernel.outputs, strict=True)]
        command = [
            runner(self.sanitize), binary, str(ORDERS.index(self.order)), str(self.seed),
            str(int(self.sanitize == "thread")), _size(launch.grid), _size(launch.threadgroup), *buffers,
        ]
        try:
            done = subprocess.run(
                command, input=b"".join(data), capture_output=True, env=_ENVIRONMENT, timeout=self.timeout)
        except subprocess.TimeoutExpired:
            raise Fault(f"hang: not done after {self.timeout:g} seconds") from None
        if done.returncode:
            raise Fault(_told(done.stderr.decode(errors="replace"), done.returncode, binary))
        cuts = np.cumsum([0, *sizes])
        return [_array(done.stdout[a:b], shape, dtype)
                for a, b, shape, dtype in zip(cuts, cuts[1:], launch.shapes, launch.dtypes)]


def _size(size: tuple[int, int, int]) -> str:
    return ",".join(map(str, size))


def _bytes(array: mx.array) -> bytes:
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.asarray(plain).tobytes()


def _array(data: bytes, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    if dtype == mx.bfloat16:
        return mx.array(np.frombuffer(data, np.uint16).reshape(shape)).view(mx.bfloat16)
    name = str(dtype).removeprefix("mlx.core.").rstrip("_")
    return mx.array(np.frombuffer(data, np.dtype(name)).reshape(shape))


def _told(errors: str, code: int, binary: Path) -> str:
    """The one line that says what went wrong."""
    own = re.search(r"^FAULT (.*?)(?: @(0x[0-9a-f]+|0))?$", errors, re.MULTILINE)
    if own:
        line = own[2] and line_of(binary, own[2])
        return f"{own[1]}, line {line}" if line else own[1]
    asan = re.search(r"AddressSanitizer: (\S+)", errors)
    if asan:
        verb = re.search(r"^(READ|WRITE) of size \d+", errors, re.MULTILINE)
        line = re.search(r"kernel\.text:(\d+)", errors)
        return f"bounds: {asan[1]} {verb[0].lower() if verb else ''}" + (f", line {line[1]}" if line else "")
    return f"crash: the runner ended with {code}: {' '.join(errors.split())[:200]}"


def _with_source(message: str, text: Text) -> str:
    """Add the text of the first line that the message names."""
    found = re.search(r"(?:line |kernel\.text:)(\d+)", message)
    lines = text.source.splitlines()
    if not found or int(found[1]) > len(lines):
        return message
    return f"{message} | {lines[int(found[1]) - 1].strip()}"
