// What UndefinedBehaviorSanitizer's checks call when one fails; all their records begin with the place.
#include "emulator.h"

namespace {

struct Place {
  const char* file;
  uint32_t line, column;
};

[[noreturn]] void report(const void* record, const char* what) {
  emu::fault("%s, line %u", what, static_cast<const Place*>(record)->line);
}

}  // namespace

extern "C" {
void __ubsan_handle_type_mismatch_v1(void* record, void*) { report(record, "misaligned: a load or store"); }
void __ubsan_handle_out_of_bounds(void* record, void*) { report(record, "bounds: an index outside its array"); }
void __ubsan_handle_shift_out_of_bounds(void* record, void*, void*) { report(record, "undefined: a shift too wide"); }
void __ubsan_handle_divrem_overflow(void* record, void*, void*) { report(record, "undefined: a division by zero"); }
void __ubsan_handle_float_cast_overflow(void* record, void*) { report(record, "undefined: no integer for a float"); }
}
