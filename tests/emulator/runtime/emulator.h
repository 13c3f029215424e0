// What a kernel's text and the runner see of each other. No standard header is included on the kernel's side:
// that keeps a build short, and keeps the text from using what a GPU does not have.
#pragma once

typedef __INT8_TYPE__ int8_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __INT16_TYPE__ int16_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __INT32_TYPE__ int32_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __SIZE_TYPE__ size_t;

struct uint3 {
  unsigned x, y, z;
};

namespace emu {

// Where the running thread is.
struct Place {
  uint3 in_grid, in_group;
  unsigned index;  // in its threadgroup
  unsigned lane;   // in its SIMD-group
  unsigned simd;   // which SIMD-group
};
extern const Place* here;
extern uint3 group;  // the running threadgroup

enum Memory { none = 0, global = 1, shared = 2, everything = 3 };

// All threads of the threadgroup meet; memory says which writes the others may rely on afterwards.
void barrier(int memory, int line);

// All lanes of the SIMD-group meet; each gets the value of lane `source`, its own if that lies beyond the group's
// end and `keep` is set.
uint64_t shuffle(uint64_t value, int source, bool keep, const char* name, int line);

// The threadgroup's memory of one declaration: found by its number, made by the thread that comes first.
void* threadgroup_memory(int declaration, size_t size, size_t alignment, const char* name);

[[noreturn]] void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));

template <class T>
T shuffle_value(T value, int source, bool keep, const char* name, int line) {
  static_assert(sizeof(T) <= 8, "a shuffled value has at most eight bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = shuffle(bits, source, keep, name, line);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace emu

// `threadgroup T name[n];` is rewritten to this before it is compiled.
#define EMU_THREADGROUP(T, name, ...)                                                                        \
  typedef T name##_threadgroup __VA_ARGS__;                                                                  \
  name##_threadgroup& name =                                                                                 \
      *(name##_threadgroup*)::emu::threadgroup_memory(__COUNTER__, sizeof(name##_threadgroup),               \
                                                      alignof(name##_threadgroup), #name)

// Where a call stands in the kernel's text.
#define EMU_LINE int line = __builtin_LINE()
