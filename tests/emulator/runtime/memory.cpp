#include "memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "emulator.h"
#include "race.h"
#include "sanitizer.h"

namespace memory {

std::vector<Extent> buffers, threadgroup;

namespace {

constexpr size_t kGuard = size_t(1) << 30;  // address space, not memory
constexpr size_t kAlign = 16;               // MLX's buffers, and the widest load
constexpr unsigned char kFence = 0xfb;      // large and negative in every float type
constexpr unsigned char kUnset = 0xff;      // NaN in every float type
constexpr size_t kGap = 64;
constexpr size_t kApple = 32768;  // bytes of threadgroup memory on Apple GPUs
constexpr size_t kArena = 2 * kApple;

alignas(64) char arena[kArena];
size_t arena_used, arena_counted;
std::vector<void*> declared;

size_t round_up(size_t n, size_t step) { return (n + step - 1) / step * step; }

bool fence_holds(const char* begin, const char* end) {
  for (; begin < end; ++begin)
    if (static_cast<unsigned char>(*begin) != kFence) return false;
  return true;
}

}  // namespace

// The end of a buffer stands against a page that may not be touched, its start in a fenced one after another.
Extent& add_buffer(const std::string& name, size_t size, bool writable) {
  const size_t page = sysconf(_SC_PAGESIZE), room = round_up(size, kAlign), pages = round_up(room, page) + page;
  char* zone = static_cast<char*>(mmap(nullptr, pages + 2 * kGuard, PROT_NONE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (zone == MAP_FAILED) emu::fault("crash: no memory for '%s'", name.c_str());
  char* first = zone + kGuard;
  mprotect(first, pages, PROT_READ | PROT_WRITE);
  char* begin = first + pages - room;
  memset(first, kFence, begin - first);
  memset(begin, kUnset, size);
  memset(begin + size, kFence, room - size);
  buffers.push_back({name, begin, size, zone, pages + 2 * kGuard, false, writable, race::cells(writable ? size : 0)});
  return buffers.back();
}

void seal() {
  const size_t page = sysconf(_SC_PAGESIZE);
  for (Extent& e : buffers) {
    char* first = e.zone + kGuard;
    char* end = e.begin + round_up(e.size, kAlign);
    if (!e.writable) mprotect(first, round_up(end - first, page), PROT_READ);
    EMU_ASAN(__asan_poison_memory_region(first, e.begin - first));
    EMU_ASAN(__asan_poison_memory_region(e.begin + e.size, end - e.begin - e.size));
  }
}

void check_fences() {
  for (Extent& e : buffers) {
    char* first = e.zone + kGuard;
    char* end = e.begin + round_up(e.size, kAlign);
    EMU_ASAN(__asan_unpoison_memory_region(first, end - first));
    if (!fence_holds(first, e.begin)) emu::fault("bounds: write before the start of '%s'", e.name.c_str());
    if (!fence_holds(e.begin + e.size, end)) emu::fault("bounds: write past the end of '%s'", e.name.c_str());
  }
}

void begin_group() {
  EMU_ASAN(__asan_unpoison_memory_region(arena, kArena));
  memset(arena, kFence, kArena);
  EMU_ASAN(__asan_poison_memory_region(arena, kArena));
  arena_used = kGap;
  arena_counted = 0;
  declared.clear();
  threadgroup.clear();
}

void end_group() {
  if (threadgroup.empty()) return;
  EMU_ASAN(__asan_unpoison_memory_region(arena, kArena));
  for (Extent& e : threadgroup) {
    const bool intact = fence_holds(e.zone, e.begin) && fence_holds(e.begin + e.size, e.zone + e.zone_size);
    if (!intact) emu::fault("bounds: write outside threadgroup memory '%s'", e.name.c_str());
  }
}

Extent* find(const void* address) {
  const char* at = static_cast<const char*>(address);
  for (auto* extents : {&threadgroup, &buffers})
    for (Extent& e : *extents)
      if (at >= e.zone && at < e.zone + e.zone_size) return &e;
  return nullptr;
}

namespace {

[[noreturn]] void on_signal(int signal, siginfo_t* info, void* context) {
  unsigned long code = 0;
  const char* verb = "access";
#if defined(__x86_64__)
  const auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  code = registers[REG_RIP];
  verb = registers[REG_ERR] & 2 ? "write" : "read";
#else
  (void)context;
#endif
  char* at = static_cast<char*>(info->si_addr);
  Extent* e = find(at);
  const long place = race::in_kernel(code);
  if (signal == SIGFPE) emu::fault("undefined: a division by zero @%#lx", place);
  if (!e) emu::fault("bounds: %s outside every buffer @%#lx", verb, place);
  const char* name = e->name.c_str();
  if (at >= e->begin && at < e->begin + e->size) emu::fault("bounds: write to the input '%s' @%#lx", name, place);
  emu::fault("bounds: %s outside '%s', byte %td of %zu @%#lx", verb, name, at - e->begin, e->size, place);
}

}  // namespace

void catch_signals() {
  static char stack[64 << 10];  // a thread's own stack may be what overflowed
  stack_t other = {};
  other.ss_sp = stack;
  other.ss_size = sizeof(stack);
  sigaltstack(&other, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int signal : {SIGSEGV, SIGBUS, SIGFPE}) sigaction(signal, &action, nullptr);
}

}  // namespace memory

// Every declaration stands in its own fenced place, filled with NaN.
void* emu::threadgroup_memory(int declaration, size_t size, size_t alignment, const char* name) {
  using namespace memory;
  if (size_t(declaration) >= declared.size()) declared.resize(declaration + 1);
  if (!declared[declaration]) {
    const size_t start = round_up(arena_used, alignment < kAlign ? kAlign : alignment);
    arena_counted += round_up(size, kAlign);
    if (arena_counted > kApple || start + size + kGap > kArena)
      fault("threadgroup memory: %zu bytes with '%s', %zu are there", arena_counted, name, kApple);
    char* begin = arena + start;
    EMU_ASAN(__asan_unpoison_memory_region(begin, size));
    memset(begin, kUnset, size);
    char* zone = arena + arena_used - (threadgroup.empty() ? kGap : kGap / 2);
    const size_t zone_size = begin + size + kGap / 2 - zone;
    threadgroup.push_back({name, begin, size, zone, zone_size, true, true, race::shared_cells(start, size)});
    arena_used = start + size + kGap;
    declared[declaration] = begin;
    EMU_ASAN(__asan_poison_memory_region(begin + size, arena + kArena - begin - size));
  }
  return declared[declaration];
}
