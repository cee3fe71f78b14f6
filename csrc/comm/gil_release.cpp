#include "comm/gil_release.h"

namespace funcol {
namespace {

void call_directly(void (*blocking)(void*), void* context) { blocking(context); }
RunBlocking current = call_directly;

}  // namespace

void set_run_blocking(RunBlocking run) { current = run; }

void run_blocking(void (*blocking)(void*), void* context) { current(blocking, context); }

}  // namespace funcol
