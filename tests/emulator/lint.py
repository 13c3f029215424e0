"""What a C++ compiler lets pass and Metal's does not: address spaces above all."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

import mlx.core as mx

from mlx_dspark.kernels.launch import Kernel, Launch

from .build import RUNTIME, clang
from .text import FILE, Text, metal_text, rewritten

_SPACES = r"(?:device|constant|thread|threadgroup|DS_GLOBAL)"
_NUMBERS = r"bool|float|half|bfloat|bfloat16_t|float16_t|u?int|u?short|u?char|u?int(?:8|16|32|64)_t|uint[234]|size_t"
_FORBIDDEN = {
    r"\bdouble\b": "Metal has no double",
    r"\bstd::": "Metal has no std",
    r"\b(?:__shfl\w*|__syncthreads|__shared__|threadIdx|blockIdx)\b": "a CUDA name, which the dialect has a word for",
    r"\b(?:new|delete|throw|try|dynamic_cast|goto|printf)\b": "not in Metal's language",
}


def lint(kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> list[str]:
    """Findings, one a line. Without a clang (`available_modes()["clang"]`) those of plain text search only."""
    text = metal_text(kernel, inputs, launch)
    own = _without_comments(kernel.header + "\n" + kernel.source)
    return [*_forbidden(own), *_bare_pointers(own), *_small_inputs(own, text), *_address_spaces(text)]


def _without_comments(source: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL)


def _forbidden(source: str) -> list[str]:
    return [f"{found[0]}: {why}" for pattern, why in _FORBIDDEN.items() for found in re.finditer(pattern, source)]


def _bare_pointers(source: str) -> list[str]:
    """Pointers and references that do not say where they point to."""
    types = "|".join([_NUMBERS, *re.findall(r"\b(?:class|typename)\s+(\w+)", source)])
    pointer = rf"((?:\b(?:const|{_SPACES})\s+)*)\b(?:{types})(?:\s+const)?\s*[*&](?!&)\s*\w*"
    return [f"{' '.join(found[0].split())}: a pointer without an address space"
            for found in re.finditer(pointer, source) if not re.search(rf"\b{_SPACES}\b", found[1])]


def _small_inputs(source: str, text: Text) -> list[str]:
    """Inputs in the `constant` address space, where MLX puts small ones, taken for `device` ones."""
    pointer = r"\b(?:DS_GLOBAL|device)\s+\w+\s*\*\s*"
    return [f"{name}: too small for a `device` pointer, MLX passes it as `constant`"
            for name in text.constants if re.search(rf"{pointer}(?:>\s*\(|\w+\s*=)\s*{name}\b", source)]


def _address_spaces(text: Text) -> list[str]:
    """A syntax pass in which device, constant and threadgroup are address spaces of their own."""
    if not clang():
        return []
    instance = text.call.split("(")[0]
    source = (f'#define EMU_LINT\n#include "metal.h"\n#line 1 "{FILE}"\n{rewritten(text.source, "metal")}\n'
              + (f"template decltype({instance}) {instance};\n" if "<" in instance else ""))
    flags = ["-std=c++17", "-fsyntax-only", "-w", "-fno-exceptions", "-I", str(RUNTIME), "-x", "c++", "-"]
    done = subprocess.run([*clang().split(), *flags], input=source, capture_output=True, text=True)
    return [line for line in done.stderr.splitlines() if "error:" in line]
