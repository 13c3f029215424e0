"""Runs the text of a kernel on the CPU, as a GPU would run it, and says what is wrong with it.

The text is the one MLX would compile: MLX writes the Metal source itself, and for CUDA the source is
put together as `mx.fast.cuda_kernel` does. Each thread is a fiber, 32 of them a SIMD-group; barriers
and shuffles are real; memory is fenced and outputs start as NaN. Needs Linux and g++.

    Emulator(dialect, order, sanitize)   an `Execute` of `mlx_dspark.kernels.launch`; raises Fault
    lint(kernel, inputs, launch)         what the CPU would let pass and Metal does not
    nvcc_compile(kernel, inputs, launch) registers and spills on an NVIDIA GPU, none needed
    available_modes()                    what of this works here, and why not
"""

from .build import Fault, available_modes
from .lint import lint
from .nvcc import nvcc_compile
from .run import Emulator

__all__ = ["Emulator", "Fault", "available_modes", "lint", "nvcc_compile"]
