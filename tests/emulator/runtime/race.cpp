#include "race.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

#include "emulator.h"
#include "memory.h"

namespace race {

namespace {

bool watching;
unsigned group;
unsigned epochs[2];  // barriers passed that order [0] buffers, [1] threadgroup memory
const char* stack;
size_t stack_size;

Cell* map(size_t bytes) {
  void* zeros = mmap(nullptr, bytes * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                     -1, 0);
  return static_cast<Cell*>(zeros);
}

struct Access {
  const char* verb;
  size_t size;
  unsigned long code;
};

std::string unwritten;  // the first read of what nobody had written: a race if somebody does so later

// Which byte of which memory, and the instruction, for the line to be found.
std::string describe(const memory::Extent& e, long byte, const Access& access, const char* what) {
  char text[400];
  snprintf(text, sizeof text, "thread %u %s %zu bytes of %s'%s' at byte %ld %s @%#lx", emu::here->index, access.verb,
           access.size, e.shared ? "threadgroup memory " : "", e.name.c_str(), byte, what, in_kernel(access.code));
  return text;
}

[[noreturn]] void report(const char* kind, const memory::Extent& e, long byte, const Access& access, const char* what) {
  emu::fault("%s: %s", kind, describe(e, byte, access, what).c_str());
}

void read(const memory::Extent& e, size_t byte, const Access& access) {
  Cell& c = e.cells[byte];
  const unsigned me = emu::here->index, epoch = epochs[e.shared];
  if (!c.write_group && unwritten.empty()) unwritten = describe(e, byte, access, "that nobody wrote");
  if (c.write_group && c.write_group != group)
    report("race", e, byte, access, "that another threadgroup wrote in this launch");
  if (c.write_group && c.writer != me && c.write_epoch == epoch)
    report("race", e, byte, access, "that another thread wrote, with no barrier in between");
  const bool same_phase = c.read_group == group && c.read_epoch == epoch;
  c.many_readers = same_phase && (c.many_readers || c.reader != me);
  c.several_groups |= c.read_group && c.read_group != group;
  c.read_group = group;
  c.read_epoch = epoch;
  c.reader = me;
}

void write(const memory::Extent& e, size_t byte, const Access& access) {
  Cell& c = e.cells[byte];
  const unsigned me = emu::here->index, epoch = epochs[e.shared];
  if (c.write_group && c.write_group != group) report("race", e, byte, access, "that another threadgroup wrote too");
  if (c.write_group && c.writer != me && c.write_epoch == epoch)
    report("race", e, byte, access, "that another thread wrote too, with no barrier in between");
  if (c.several_groups || (c.read_group && c.read_group != group))
    report("race", e, byte, access, "that another threadgroup reads");
  if (c.read_group && c.read_epoch == epoch && (c.many_readers || c.reader != me))
    report("race", e, byte, access, "that another thread reads, with no barrier in between");
  c.write_group = group;
  c.write_epoch = epoch;
  c.writer = me;
}

void check(const void* address, size_t size, bool writing, bool aligned, const void* code) {
  if (!watching || !emu::here) return;
  const char* at = static_cast<const char*>(address);
  if (at >= stack && at < stack + stack_size) return;
  const memory::Extent* e = memory::find(address);
  if (!e) return;  // a constant of the kernel
  const Access access = {writing ? "writes" : "reads", size, reinterpret_cast<unsigned long>(code)};
  const long byte = at - e->begin;
  if (byte < 0 || byte + size > e->size) report("bounds", *e, byte, access, "which is outside");
  if (aligned && reinterpret_cast<uintptr_t>(address) % size) report("misaligned", *e, byte, access, "at once");
  if (writing && !e->writable) report("bounds", *e, byte, access, "which is an input");
  if (!e->writable) return;
  for (size_t k = byte; k < byte + size; ++k) writing ? write(*e, k, access) : read(*e, k, access);
}

}  // namespace

void watch() { watching = true; }

Cell* cells(size_t bytes) { return watching && bytes ? map(bytes) : nullptr; }

Cell* shared_cells(size_t at, size_t bytes) {
  static Cell* const all = map(64 << 10);
  if (!watching) return nullptr;
  memset(all + at, 0, bytes * sizeof(Cell));
  return all + at;
}

void begin_group(unsigned number) {
  group = number + 1;
  epochs[0] = epochs[1] = 0;
}

void barrier(int memory) {
  if (memory & emu::global) ++epochs[0];
  if (memory & emu::shared) ++epochs[1];
}

void end_launch() {
  if (!unwritten.empty()) emu::fault("uninitialised: %s", unwritten.c_str());
}

void set_stack(const char* begin, size_t size) {
  stack = begin;
  stack_size = size;
}

long in_kernel(unsigned long code) {
  Dl_info info;
  if (!dladdr(reinterpret_cast<void*>(code), &info)) return 0;
  return long(code - reinterpret_cast<unsigned long>(info.dli_fbase));
}

}  // namespace race

// What the instrumentation calls.
extern "C" {
#define EMU_HERE __builtin_return_address(0)
#define EMU_HOOKS(n)                                                                             \
  void __tsan_read##n(void* p) { race::check(p, n, false, true, EMU_HERE); }                     \
  void __tsan_write##n(void* p) { race::check(p, n, true, true, EMU_HERE); }                     \
  void __tsan_unaligned_read##n(void* p) { race::check(p, n, false, false, EMU_HERE); }          \
  void __tsan_unaligned_write##n(void* p) { race::check(p, n, true, false, EMU_HERE); }
EMU_HOOKS(1)
EMU_HOOKS(2)
EMU_HOOKS(4)
EMU_HOOKS(8)
EMU_HOOKS(16)
void __tsan_read_range(void* p, size_t n) { race::check(p, n, false, false, EMU_HERE); }
void __tsan_write_range(void* p, size_t n) { race::check(p, n, true, false, EMU_HERE); }
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  race::check(from, n, false, false, EMU_HERE);
  race::check(to, n, true, false, EMU_HERE);
  return memcpy(to, from, n);
}
void* __tsan_memset(void* to, int value, size_t n) {
  race::check(to, n, true, false, EMU_HERE);
  return memset(to, value, n);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
