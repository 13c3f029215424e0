// The number types that C++ lacks. Under EMU_LINT clang's own types stand in: a class cannot live in an address space.
#pragma once
#include "emulator.h"

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef _Float16 half;

#ifdef EMU_LINT
typedef __bf16 bfloat;
typedef uint uint4 __attribute__((ext_vector_type(4)));
#else
// Widens to float by itself, narrows only when told to, rounding to nearest even.
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  explicit bfloat(float x) {
    uint32_t u;
    __builtin_memcpy(&u, &x, 4);
    bits = x != x ? 0x7fc0 : uint16_t((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
  }
  operator float() const {
    uint32_t u = uint32_t(bits) << 16;
    float x;
    __builtin_memcpy(&x, &u, 4);
    return x;
  }
};

struct alignas(16) uint4 {
  uint x, y, z, w;
};
#endif

#define INFINITY __builtin_inff()
