#include "schedule.h"

#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "fiber.h"
#include "memory.h"
#include "race.h"

namespace emu {
const Place* here;
uint3 group;
}  // namespace emu

namespace schedule {
namespace {

constexpr unsigned kLanes = 32, kMostThreads = 1024;

enum class State { ready, at_shuffle, at_barrier, returned };

struct Thread {
  emu::Place place;
  fiber::Fiber fiber;
  State state;
  uint64_t value, result;  // what it brought to a shuffle, and got
  int source;
  bool keep;
  const char* call;  // where it waits
  int line;
};

struct Simd {
  uint32_t live;     // lanes that have not returned
  uint32_t arrived;  // lanes that wait in a shuffle
  const char* call;
  int line;
};

std::vector<Thread> threads;
std::vector<Simd> simds;
unsigned waiting, returned;  // threads at a barrier, and done
unsigned first_waiting;      // of those at the barrier
void (*body)();
uint64_t random_state;

Thread& me() { return threads[emu::here->index]; }

void wait(State state, const char* call, int line) {
  Thread& thread = me();
  thread.state = state;
  thread.call = call;
  thread.line = line;
  fiber::leave(thread.fiber, false);
}

// All live lanes of a SIMD-group are here: hand the values around.
void deal(unsigned simd) {
  Simd& s = simds[simd];
  Thread* lanes = &threads[simd * kLanes];
  for (unsigned i = 0; i < kLanes; ++i) {
    if (!(s.live >> i & 1)) continue;
    Thread& t = lanes[i];
    const bool outside = t.source < 0 || t.source >= int(kLanes);
    if (outside && !t.keep)
      emu::fault("inactive lane: %s makes lane %u read lane %d, line %d", s.call, i, t.source, s.line);
    const unsigned source = outside ? i : unsigned(t.source);
    if (!(s.live >> source & 1))
      emu::fault("inactive lane: %s makes lane %u read lane %u, which has returned or never was, line %d", s.call, i,
                 source, s.line);
    t.result = lanes[source].value;
    t.state = State::ready;
  }
  s.arrived = 0;
}

void on_return() {
  Thread& thread = me();
  Simd& s = simds[thread.place.simd];
  thread.state = State::returned;
  ++returned;
  s.live &= ~(1u << thread.place.lane);
  if (s.arrived && s.arrived == s.live) deal(thread.place.simd);
}

void entry() {
  body();
  on_return();
  fiber::leave(me().fiber, true);
  __builtin_trap();
}

// Nobody can run: some wait for a barrier or a shuffle that the others do not come to.
[[noreturn]] void stuck() {
  std::string who;
  int line = 0;
  bool in_shuffle = false;
  for (const Thread& t : threads) {
    if (t.state == State::returned || t.line == line) continue;
    char text[96];
    snprintf(text, sizeof text, " thread %u waits in %s, line %d;", t.place.index, t.call, t.line);
    if (who.size() < 300) who += text;
    line = t.line;
    in_shuffle |= t.state == State::at_shuffle;
  }
  emu::fault("divergent %s:%s", in_shuffle ? "shuffle" : "barrier", who.c_str());
}

uint32_t next_random() {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return uint32_t(random_state >> 33);
}

template <class T>
void mix(std::vector<T>& items) {
  for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[next_random() % i]);
}

std::vector<unsigned> sequence(unsigned count, Order order) {
  std::vector<unsigned> numbers(count);
  for (unsigned i = 0; i < count; ++i) numbers[i] = order == Order::reverse ? count - 1 - i : i;
  if (order == Order::random) mix(numbers);
  return numbers;
}

void place_threads(uint3 size) {
  waiting = returned = 0;
  for (Simd& s : simds) s = {};
  for (unsigned i = 0; i < threads.size(); ++i) {
    Thread& t = threads[i];
    const uint3 at = {i % size.x, i / size.x % size.y, i / size.x / size.y};
    const uint3& g = emu::group;
    t.place = {{g.x * size.x + at.x, g.y * size.y + at.y, g.z * size.z + at.z}, at, i, i % kLanes, i / kLanes};
    t.state = State::ready;
    simds[i / kLanes].live |= 1u << i % kLanes;
    fiber::start(t.fiber, entry);
  }
}

void run_group(Order order) {
  std::vector<unsigned> turns = sequence(threads.size(), order);
  while (returned < threads.size()) {
    bool any = false;
    for (unsigned i : turns) {
      Thread& t = threads[i];
      if (t.state != State::ready) continue;
      any = true;
      emu::here = &t.place;
      race::set_stack(t.fiber.stack, fiber::kStack);
      fiber::enter(t.fiber);
    }
    emu::here = nullptr;
    if (!any) stuck();
    if (order == Order::random) mix(turns);
  }
}

}  // namespace

void launch(void (*kernel)(), uint3 grid, uint3 size, Order order, uint64_t seed) {
  const unsigned count = size.x * size.y * size.z;
  if (count > kMostThreads) emu::fault("threadgroup of %u threads: Metal allows %u", count, kMostThreads);
  body = kernel;
  random_state = 2 * seed + 1;
  threads.resize(count);
  simds.resize((count + kLanes - 1) / kLanes);
  std::vector<fiber::Fiber> fibers(count);
  fiber::make(fibers.data(), count);
  for (unsigned i = 0; i < count; ++i) threads[i].fiber = fibers[i];

  const uint3 n = {grid.x / size.x, grid.y / size.y, grid.z / size.z};
  for (unsigned g : sequence(n.x * n.y * n.z, order)) {
    emu::group = {g % n.x, g / n.x % n.y, g / n.x / n.y};
    memory::begin_group();
    race::begin_group(g);
    place_threads(size);
    run_group(order);
    memory::end_group();
  }
}

}  // namespace schedule

void emu::barrier(int memory, int line) {
  using namespace schedule;
  if (!waiting) first_waiting = here->index;
  const int first_line = waiting ? threads[first_waiting].line : line;
  if (line != first_line)
    fault("divergent barrier: thread %u is at line %d, thread %u at line %d", here->index, line, first_waiting,
          first_line);
  if (returned) fault("divergent barrier: thread %u waits, %u have returned, line %d", here->index, returned, line);
  if (++waiting < threads.size()) return wait(State::at_barrier, "threadgroup_barrier", line);
  for (Thread& t : threads) t.state = State::ready;
  waiting = 0;
  race::barrier(memory);
}

uint64_t emu::shuffle(uint64_t value, int source, bool keep, const char* name, int line) {
  using namespace schedule;
  Thread& thread = me();
  Simd& s = simds[here->simd];
  if (s.arrived && (s.line != line || strcmp(s.call, name)))
    fault("divergent shuffle: lane %u is in %s, line %d, others are in %s, line %d", here->lane, name, line, s.call,
          s.line);
  s.call = name;
  s.line = line;
  s.arrived |= 1u << here->lane;
  thread.value = value;
  thread.source = source;
  thread.keep = keep;
  if (s.arrived == s.live)
    deal(here->simd);
  else
    wait(State::at_shuffle, name, line);
  return thread.result;
}
