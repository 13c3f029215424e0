// Fibers: one per thread of a threadgroup, all on one processor thread.
#pragma once
#include <cstddef>

namespace fiber {

constexpr size_t kStack = 256 << 10;

struct Fiber {
  char* stack;    // lowest address
  void* context;  // where it continues
  void* fake;     // AddressSanitizer's
};

// Stacks for `count` fibers, a page that may not be touched below each.
void make(Fiber* fibers, size_t count);

void start(Fiber& fiber, void (*entry)());  // it runs when first entered
void enter(Fiber& fiber);                   // from the scheduler; returns when the fiber leaves
void leave(Fiber& fiber, bool for_good);    // back to the scheduler

}  // namespace fiber
