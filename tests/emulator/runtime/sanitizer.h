// EMU_ASAN(call): made only in an AddressSanitizer build, which has to be told of fibers and of fences.
#pragma once
#include <cstddef>

#ifdef __SANITIZE_ADDRESS__
#define EMU_ASAN(call) call
#else
#define EMU_ASAN(call)
#endif

extern "C" {
void __asan_poison_memory_region(const volatile void* begin, size_t size);
void __asan_unpoison_memory_region(const volatile void* begin, size_t size);
void __sanitizer_start_switch_fiber(void** fake, const void* stack, size_t size);
void __sanitizer_finish_switch_fiber(void* fake, const void** stack, size_t* size);
}
