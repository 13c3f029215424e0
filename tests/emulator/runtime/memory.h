// The buffers of a launch and the memory of a threadgroup, fenced so that what leaves them is seen.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "race.h"

namespace memory {

// Bytes that belong to a name. zone: the wider range in which an access can only be meant for this one.
struct Extent {
  std::string name;
  char* begin;
  size_t size;
  char* zone;
  size_t zone_size;
  bool shared;     // a threadgroup's
  bool writable;
  race::Cell* cells;  // who touched each byte, if that is watched
};

Extent& add_buffer(const std::string& name, size_t size, bool writable);
void seal();  // inputs are only read from here on
void check_fences();

void begin_group();  // threadgroup memory is undefined again
void end_group();

// The extent in whose zone the address lies, nullptr if none.
Extent* find(const void* address);

extern std::vector<Extent> buffers;
extern std::vector<Extent> threadgroup;

void catch_signals();  // an access that hits a guard page becomes a fault

}  // namespace memory
