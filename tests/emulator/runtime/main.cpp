// Runs one launch of one kernel.
//   runner LIBRARY ORDER SEED WATCH GRID THREADGROUP (in|out):BYTES:NAME...
// Inputs come one after the other on standard input, outputs leave so on standard output. What goes wrong is one line
// on standard error that starts with FAULT.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "memory.h"
#include "race.h"
#include "sanitizer.h"
#include "schedule.h"

void emu::fault(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fputs("FAULT ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  _exit(3);
}

namespace {

using Kernel = void (*)(void**);
Kernel kernel;
std::vector<void*> arguments;

void call_kernel() { kernel(arguments.data()); }

Kernel load(const char* path) {
  void* library = dlopen(path, RTLD_NOW);
  void* function = library ? dlsym(library, "emulated_kernel") : nullptr;
  if (!function) emu::fault("compile error: %s", dlerror());
  return reinterpret_cast<Kernel>(function);
}

uint3 parse_size(const char* text) {
  uint3 size;
  if (sscanf(text, "%u,%u,%u", &size.x, &size.y, &size.z) != 3) emu::fault("crash: bad size %s", text);
  return size;
}

void add_buffer(const char* text) {
  size_t size;
  char name[128];
  if (sscanf(text, "%*[^:]:%zu:%127s", &size, name) != 2) emu::fault("crash: bad buffer %s", text);
  const bool output = text[0] == 'o';
  memory::Extent& buffer = memory::add_buffer(name, size, output);
  if (!output && fread(buffer.begin, 1, size, stdin) != size) emu::fault("crash: input '%s' is cut short", name);
  arguments.push_back(buffer.begin);
}

}  // namespace

int main(int, char** argv) {
  kernel = load(argv[1]);
  const auto order = static_cast<schedule::Order>(atoi(argv[2]));
  const uint64_t seed = strtoull(argv[3], nullptr, 10);
  if (atoi(argv[4])) race::watch();
  for (char** text = argv + 7; *text; ++text) add_buffer(*text);
  memory::seal();
  bool asan = false;
  EMU_ASAN(asan = true);
  if (!asan) memory::catch_signals();
  schedule::launch(call_kernel, parse_size(argv[5]), parse_size(argv[6]), order, seed);
  race::end_launch();
  memory::check_fences();
  for (const memory::Extent& buffer : memory::buffers)
    if (buffer.writable) fwrite(buffer.begin, 1, buffer.size, stdout);
  return fflush(stdout) ? 4 : 0;
}
