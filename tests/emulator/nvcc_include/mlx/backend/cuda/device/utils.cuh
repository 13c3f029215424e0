// Stands in for the header of that name that MLX puts before every CUDA kernel and does not ship: the number types,
// and the limits behind its `inf`.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cuda/std/cstdint>
#include <cuda/std/limits>
