// Runs a launch: one threadgroup after another, the threads of one as fibers.
#pragma once
#include <cstdint>

#include "emulator.h"

namespace schedule {

enum class Order { forward, reverse, random };

// grid: threads in all, a multiple of threadgroup. order: in which threadgroups, and threads that may run, do so.
void launch(void (*kernel)(), uint3 grid, uint3 threadgroup, Order order, uint64_t seed);

}  // namespace schedule
