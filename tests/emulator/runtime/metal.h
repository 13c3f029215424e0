// Metal's words. EMU_LINT is for a syntax pass by clang, in which the address spaces are real.
#pragma once
#include "numbers.h"

#ifdef EMU_LINT
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#undef EMU_THREADGROUP
#define EMU_THREADGROUP(T, name, ...) static __attribute__((address_space(3))) T name __VA_ARGS__
#else
#define device
#define constant
#define threadgroup
#endif
#define thread

typedef half float16_t;
typedef bfloat bfloat16_t;

namespace metal {

enum class mem_flags { mem_none = emu::none, mem_device = emu::global, mem_threadgroup = emu::shared };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

template <class To, class From>
inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

#define EMU_FUNCTIONS                                       \
  inline float exp(float x) { return __builtin_expf(x); }   \
  inline float log(float x) { return __builtin_logf(x); }   \
  inline float tanh(float x) { return __builtin_tanhf(x); } \
  inline float sqrt(float x) { return __builtin_sqrtf(x); }
EMU_FUNCTIONS
namespace precise {
EMU_FUNCTIONS
}
namespace fast {
EMU_FUNCTIONS
}
inline float fabs(float x) { return __builtin_fabsf(x); }
inline float floor(float x) { return __builtin_floorf(x); }
inline bool isnan(float x) { return x != x; }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }

#ifdef EMU_LINT
template <class T> T simd_shuffle_down(T value, ushort delta);
template <class T> T simd_shuffle_xor(T value, ushort mask);
template <class T> T simd_sum(T value);
void threadgroup_barrier(mem_flags flags);
#else
template <class T>
inline T simd_shuffle_down(T value, ushort delta, EMU_LINE) {
  return emu::shuffle_value(value, int(emu::here->lane + delta), true, "simd_shuffle_down", line);
}
template <class T>
inline T simd_shuffle_xor(T value, ushort mask, EMU_LINE) {
  return emu::shuffle_value(value, int(emu::here->lane ^ mask), false, "simd_shuffle_xor", line);
}
template <class T>
inline T simd_sum(T value, EMU_LINE) {
  for (int mask = 16; mask; mask /= 2)
    value += emu::shuffle_value(value, int(emu::here->lane ^ mask), false, "simd_sum", line);
  return value;
}
inline void threadgroup_barrier(mem_flags flags, EMU_LINE) { emu::barrier(int(flags), line); }
#endif

}  // namespace metal
using namespace metal;

// Metal has neither; from here on the compiler refuses them.
#pragma GCC poison double std
