// Races, and what else an access tells: reads of what nobody wrote, misaligned loads, bytes outside a buffer.
//
// The kernel is compiled with -fsanitize=thread, whose instrumentation calls a hook at every access to memory. The
// hooks are our own. On a GPU only a barrier orders the threads of a threadgroup, and nothing orders two threadgroups,
// so counting barriers decides every case, in whatever order the lanes ran and however many they are.
#pragma once
#include <cstddef>

namespace race {

// Who touched a byte last. Groups count from 1, so that 0 is nobody.
struct Cell {
  unsigned write_group, write_epoch, read_group, read_epoch;
  unsigned short writer, reader;
  bool many_readers;     // since the last barrier
  bool several_groups;   // read by more than one
};

void watch();                 // the launch is to be checked
Cell* cells(size_t bytes);    // for a buffer, nullptr when nothing is checked
Cell* shared_cells(size_t at, size_t bytes);  // for threadgroup memory at this place, forgotten

void begin_group(unsigned group);
void barrier(int memory);     // the threads met; which memory that orders
void end_launch();            // nobody wrote later what was read unwritten
void set_stack(const char* stack, size_t size);  // of the running thread, private to it

long in_kernel(unsigned long code);  // place of an instruction in the kernel's library

}  // namespace race
