"""A kernel and one launch of it, as plain records: what runs them is chosen elsewhere.

Kernel text is Metal's language. `compiled` hands it to MLX for the Metal or the CUDA backend; the
tests hand the same records to an emulator that runs the text on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from .dialect import CUDA, METAL


@dataclass(frozen=True)
class Kernel:
    """The text of one kernel. `header` holds its helper functions, `source` the body.

    inputs, outputs: the names under which the body sees the buffers, in order.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    header: str = ""


@dataclass(frozen=True)
class Launch:
    """How one call of a kernel is cut up.

    template: constants of the text. grid, threadgroup: threads in x, y, z; the grid is a multiple of
    the threadgroup. shapes, dtypes: those of the outputs.
    """

    template: tuple[tuple[str, int | bool], ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]


Execute = Callable[[Kernel, Sequence[mx.array], Launch], list[mx.array]]


def on_metal(kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> list[mx.array]:
    """Run a kernel on Metal."""
    return _call(_metal(kernel), inputs, launch)


def on_cuda(kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> list[mx.array]:
    """Run a kernel on MLX's CUDA backend."""
    return _call(_cuda(kernel), inputs, launch)


def _call(function: Callable[..., list[mx.array]], inputs: Sequence[mx.array], launch: Launch) -> list[mx.array]:
    return function(
        inputs=list(inputs), template=list(launch.template), grid=launch.grid, threadgroup=launch.threadgroup,
        output_shapes=list(launch.shapes), output_dtypes=list(launch.dtypes),
    )


@cache
def _metal(kernel: Kernel) -> Callable[..., list[mx.array]]:
    return mx.fast.metal_kernel(**kernel_text(kernel, METAL))  # type: ignore[no-any-return]


@cache
def _cuda(kernel: Kernel) -> Callable[..., list[mx.array]]:
    # Construction raises without CUDA, so it waits for the first call.
    return mx.fast.cuda_kernel(**kernel_text(kernel, CUDA))  # type: ignore[no-any-return]


def kernel_text(kernel: Kernel, dialect: str) -> dict[str, object]:
    """What MLX is given of a kernel: arguments of `mx.fast.metal_kernel` and `mx.fast.cuda_kernel`."""
    return {"name": f"dspark_{kernel.name}", "input_names": list(kernel.inputs), "output_names": list(kernel.outputs),
            "source": kernel.source, "header": dialect + kernel.header}
