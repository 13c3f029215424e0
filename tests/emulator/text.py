"""From a kernel's record to the C++ that the CPU compiles."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from mlx_dspark.kernels.dialect import CUDA, METAL
from mlx_dspark.kernels.launch import Kernel, Launch
from mlx_dspark.kernels.launch import kernel_text as kernel_text

CUDA_TYPES = {
    mx.float32: "float", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16", mx.bool_: "bool",
    mx.int8: "int8_t", mx.int16: "int16_t", mx.int32: "int32_t", mx.int64: "int64_t",
    mx.uint8: "uint8_t", mx.uint16: "uint16_t", mx.uint32: "uint32_t", mx.uint64: "uint64_t",
}
FILE = "kernel.text"  # what the compiler calls it

# Metal's arguments that are not buffers.
_PLACES = {
    "thread_position_in_grid": "emu::here->in_grid",
    "thread_position_in_threadgroup": "emu::here->in_group",
    "threadgroup_position_in_grid": "emu::group",
    "thread_index_in_simdgroup": "emu::here->lane",
    "simdgroup_index_in_threadgroup": "emu::here->simd",
}
_PARAMETER = re.compile(r"(?P<type>.*?)(?P<name>\w+) \[\[(?P<attribute>\w+)(?:\(\d+\))?\]\]$", re.DOTALL)


@dataclass(frozen=True)
class Text:
    """A kernel's text and how it is called.

    source: what the GPU's compiler would get. call: a call of it in C++ that takes its buffers from
    `buffers`. constants: inputs that Metal passes in its `constant` address space, small ones.
    """

    source: str
    call: str
    constants: tuple[str, ...] = ()


def metal_text(kernel: Kernel, inputs: Sequence[mx.array], launch: Launch, words: str = METAL) -> Text:
    """The Metal source that MLX would compile for this launch. words: the dialect header."""
    name, source, *_ = _traced(kernel, inputs, launch, words)
    instance = re.search(r"\ntemplate \[\[host_name\(.*?\)\]\] \[\[kernel\]\] decltype\((.*?)\) ", source)
    signature = re.search(rf"\[\[kernel\]\] void {re.escape(name)}\((.*?)\) \{{\n", source, re.DOTALL)
    assert signature, "MLX writes kernels in another form than this kit knows"
    parameters = [_PARAMETER.match(text.strip()) for text in signature[1].split(",\n")]
    buffers = [p for p in parameters if p["attribute"] == "buffer"]
    names = [*kernel.inputs, *kernel.outputs]
    if [p["name"] for p in buffers] != names:
        raise ValueError(f"{kernel.name}: shapes and strides are not passed on, the buffers are {names}")
    arguments = [_metal_buffer(p["type"], names.index(p["name"])) if p in buffers else _PLACES[p["attribute"]]
                 for p in parameters]
    constants = tuple(p["name"] for p in buffers if re.search(r"\bconstant\b", p["type"]))
    return Text(source, f"{instance[1] if instance else name}({', '.join(arguments)})", constants)


def _metal_buffer(kind: str, index: int) -> str:
    kind = re.sub(r"\b(device|constant)\b", "", kind).strip()
    if kind.endswith("&"):  # MLX passes what has no axes by reference
        return f"*({kind[:-1]}*)buffers[{index}]"
    return f"({kind})buffers[{index}]"


def _traced(kernel: Kernel, inputs: Sequence[mx.array], launch: Launch, words: str) -> list:
    """Arguments of the node that MLX would run: its name, its source and more."""
    function = _metal_kernel(kernel, words)
    nodes: list[dict] = []

    def call(*arrays: mx.array) -> list[mx.array]:
        return function(
            inputs=list(arrays), template=list(launch.template), grid=launch.grid, threadgroup=launch.threadgroup,
            output_shapes=list(launch.shapes), output_dtypes=list(launch.dtypes), stream=mx.gpu)

    mx.export_function(nodes.append, call, *inputs)
    (node,) = (n for n in nodes if n["type"] == "primitive" and n["name"] == "CustomKernel")
    return node["arguments"]


@cache
def _metal_kernel(kernel: Kernel, words: str):
    return mx.fast.metal_kernel(**kernel_text(kernel, words))


def cuda_text(kernel: Kernel, inputs: Sequence[mx.array], launch: Launch, words: str = CUDA) -> Text:
    """The CUDA source that MLX would compile for this launch, after its own header."""
    written = kernel_text(kernel, words)
    name = f"custom_kernel_{written['name']}"
    types = [f"const {CUDA_TYPES[a.dtype]}*" for a in inputs] + [f"{CUDA_TYPES[d]}*" for d in launch.dtypes]
    parameters = ",\n".join(f"    {t} {n}" for t, n in zip(types, [*kernel.inputs, *kernel.outputs], strict=True))
    constants = "".join(_cuda_constant(n, value) for n, value in launch.template)
    source = (f"{written['header']}namespace mlx::core::cu {{\n\n__global__ void {name}(\n{parameters}) {{\n"
              f"{constants}\n{kernel.source}\n}}\n\n}} // namespace mlx::core::cu\n")
    arguments = ", ".join(f"({t})buffers[{i}]" for i, t in enumerate(types))
    return Text(source, f"mlx::core::cu::{name}({arguments})")


def _cuda_constant(name: str, value: int | bool | mx.Dtype) -> str:
    if isinstance(value, bool):
        return f"  constexpr bool {name} = {str(value).lower()};\n"
    if isinstance(value, int):
        return f"  constexpr int {name} = {value};\n"
    return f"  using {name} = {CUDA_TYPES[value]};\n"


def cpu_source(text: Text, dialect: str) -> str:
    """The C++ file that exports the kernel as `emulated_kernel(buffers)`."""
    return (f'#include "{dialect}.h"\n#line 1 "{FILE}"\n{rewritten(text.source, dialect)}\n'
            f'#line 1 "call"\nextern "C" void emulated_kernel(void** buffers) {{ {text.call}; }}\n')


def rewritten(source: str, dialect: str) -> str:
    """The source with its threadgroup declarations as the emulator's header wants them, on the same lines."""
    word = "threadgroup"
    if dialect == "cuda":  # what the dialect header makes of the word: a wrong one must not be hidden
        defined = re.search(r"#define threadgroup\b[ ]*(.*)", source)
        source = re.sub(r"(?<!#define )\bthreadgroup\b", defined[1] if defined else word, source)
        word = "__shared__"
    source = re.sub(r"\ntemplate \[\[host_name.*", "", source)  # the instance, which g++ cannot read
    return re.sub(rf"\b{word}\s+(\w+)\s+(\w+(?:\s*\[[^;]*?\]|\s*,\s*\w+)*)\s*;", _declare, source)


def _declare(found: re.Match) -> str:
    """`threadgroup T a[n], b[m];` as one macro a variable."""
    variables = re.findall(r"(\w+)\s*((?:\[[^\]]*\]\s*)*)(?:,|$)", found[2])
    return " ".join(f"EMU_THREADGROUP({found[1]}, {name}, {dims.strip()});" for name, dims in variables)
