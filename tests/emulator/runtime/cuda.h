// The CUDA names behind which the dialect header puts Metal's, on the same fibers.
#pragma once
#include "numbers.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__  // declarations with it are rewritten before they are compiled

#define threadIdx (emu::here->in_group)
#define blockIdx (emu::group)

typedef half __half;
typedef bfloat __nv_bfloat16;

extern "C" {
float expf(float);
float logf(float);
float tanhf(float);
float sqrtf(float);
float fabsf(float);
float floorf(float);
}
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }

template <class To, class From>
inline To emu_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits are kept");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}
inline float __int_as_float(int bits) { return emu_bits<float>(bits); }
inline float __uint_as_float(unsigned bits) { return emu_bits<float>(bits); }
inline int __float_as_int(float x) { return emu_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
inline __half __ushort_as_half(unsigned short bits) { return emu_bits<__half>(bits); }
inline float __half2float(__half x) { return float(x); }

inline void __syncthreads(EMU_LINE) { emu::barrier(emu::everything, line); }

template <class T>
inline T emu_shuffle(unsigned mask, T value, int source, bool keep, const char* name, int line) {
  if (mask != 0xffffffffu) emu::fault("inactive lane: %s with mask %#x, line %d", name, mask, line);
  return emu::shuffle_value(value, source, keep, name, line);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, EMU_LINE) {
  return emu_shuffle(mask, value, int(emu::here->lane + delta), true, "__shfl_down_sync", line);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, EMU_LINE) {
  return emu_shuffle(mask, value, int(emu::here->lane) - int(delta), true, "__shfl_up_sync", line);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, unsigned lanes, EMU_LINE) {
  return emu_shuffle(mask, value, int(emu::here->lane ^ lanes), false, "__shfl_xor_sync", line);
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, unsigned lane, EMU_LINE) {
  return emu_shuffle(mask, value, int(lane & 31u), false, "__shfl_sync", line);
}
