#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include "sanitizer.h"

#if defined(__x86_64__) && !defined(EMU_UCONTEXT)
// Saves what a call must keep, swaps stacks, restores.
asm(R"(
.text
.globl emu_switch
.type emu_switch, @function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
extern "C" void emu_switch(void** save, void* to);

namespace {
void* scheduler;

void* first_context(char* stack, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + fiber::kStack - 64);
  *--top = nullptr;  // entry finds the stack as after a call
  *--top = reinterpret_cast<void*>(entry);
  for (int registers = 0; registers < 6; ++registers) *--top = nullptr;
  return top;
}
void to_fiber(void* context) { emu_switch(&scheduler, context); }
void to_scheduler(void** save) { emu_switch(save, scheduler); }
}  // namespace

#else
// Slower (a system call a switch), but for every processor.
#include <ucontext.h>

namespace {
ucontext_t scheduler;

void* first_context(char* stack, void (*entry)()) {
  ucontext_t* context = reinterpret_cast<ucontext_t*>(stack);  // kept at the end the stack never reaches
  getcontext(context);
  context->uc_stack.ss_sp = stack + sizeof(ucontext_t);
  context->uc_stack.ss_size = fiber::kStack - sizeof(ucontext_t);
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}
void to_fiber(void* context) { swapcontext(&scheduler, static_cast<ucontext_t*>(context)); }
void to_scheduler(void** save) { swapcontext(static_cast<ucontext_t*>(*save), &scheduler); }
}  // namespace
#endif

namespace {
[[maybe_unused]] void* scheduler_fake;
[[maybe_unused]] const void* scheduler_stack;
[[maybe_unused]] size_t scheduler_size;
void (*fiber_entry)();

void first_entry() {
  EMU_ASAN(__sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_size));
  fiber_entry();
}
}  // namespace

namespace fiber {

void make(Fiber* fibers, size_t count) {
  const size_t page = sysconf(_SC_PAGESIZE), step = kStack + page;
  char* all = static_cast<char*>(
      mmap(nullptr, count * step, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  for (size_t i = 0; i < count; ++i) {
    mprotect(all + i * step, page, PROT_NONE);
    fibers[i].stack = all + i * step + page;
  }
}

void start(Fiber& fiber, void (*entry)()) {
  fiber_entry = entry;
  fiber.context = first_context(fiber.stack, first_entry);
  fiber.fake = nullptr;
}

void enter(Fiber& fiber) {
  EMU_ASAN(__sanitizer_start_switch_fiber(&scheduler_fake, fiber.stack, kStack));
  to_fiber(fiber.context);
  EMU_ASAN(__sanitizer_finish_switch_fiber(scheduler_fake, nullptr, nullptr));
}

void leave(Fiber& fiber, bool for_good) {
  EMU_ASAN(__sanitizer_start_switch_fiber(for_good ? nullptr : &fiber.fake, scheduler_stack, scheduler_size));
  to_scheduler(&fiber.context);
  EMU_ASAN(__sanitizer_finish_switch_fiber(fiber.fake, nullptr, nullptr));
  (void)for_good;
}

}  // namespace fiber
