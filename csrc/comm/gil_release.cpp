#include "comm/gil_release.h"

namespace funcol {
namespace {

void just_call(void (*blocking)(void*), void* context) { blocking(context); }
RunBlocking current = just_call;

}  // namespace

void set_run_blocking(RunBlocking run) { current = run; }

void run_blocking(void (*blocking)(void*), void* context) { current(blocking, context); }

}  // namespace funcol
