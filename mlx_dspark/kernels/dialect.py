"""The two dialects of a kernel: its text is Metal's language, and CUDA gets Metal's names from a header.

What the languages cannot share has a word of its own: DS_FN before a helper function, DS_GLOBAL for a
pointer into a buffer (CUDA has no word for it, and `device` itself would break `__device__`), and the
three conversions. Threadgroups are one-dimensional.
"""

METAL = """
#define DS_FN inline
#define DS_GLOBAL device
DS_FN float ds_float(uint bits) { return as_type<float>(bits); }
DS_FN float ds_half(uint bits) { return float(as_type<half>(ushort(bits))); }
DS_FN float ds_bfloat(uint bits) { return as_type<float>(bits << 16); }
"""

CUDA = """
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define DS_FN __device__ inline
#define DS_GLOBAL
#define thread
#define threadgroup __shared__
typedef unsigned int uint;
typedef unsigned short ushort;
#define thread_position_in_threadgroup threadIdx
#define threadgroup_position_in_grid blockIdx
#define thread_index_in_simdgroup (threadIdx.x & 31u)
#define simdgroup_index_in_threadgroup (threadIdx.x >> 5)
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
DS_FN void threadgroup_barrier(mem_flags) { __syncthreads(); }
template <class T> DS_FN T simd_shuffle_down(T v, uint d) { return __shfl_down_sync(0xffffffffu, v, d); }
template <class T> DS_FN T simd_shuffle_xor(T v, uint d) { return __shfl_xor_sync(0xffffffffu, v, d); }
DS_FN float ds_float(uint bits) { return __uint_as_float(bits); }
DS_FN float ds_half(uint bits) { return __half2float(__ushort_as_half((unsigned short)bits)); }
DS_FN float ds_bfloat(uint bits) { return __uint_as_float(bits << 16); }
namespace metal {
namespace precise {
DS_FN float exp(float x) { return ::expf(x); }
DS_FN float log(float x) { return ::logf(x); }
DS_FN float tanh(float x) { return ::tanhf(x); }
}
}
using namespace metal;
"""
