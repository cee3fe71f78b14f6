// Runs code that may wait for another thread, without locks which that thread may need.
#pragma once

#include <type_traits>

namespace funcol {

// A function that calls `blocking(context)`. The Python bindings set one that releases the GIL meanwhile.
using RunBlocking = void (*)(void (*blocking)(void* context), void* context);
void set_run_blocking(RunBlocking run);

void run_blocking(void (*blocking)(void* context), void* context);

template <typename Blocking>
void run_blocking(Blocking&& blocking) {
  run_blocking([](void* context) { (*static_cast<std::remove_reference_t<Blocking>*>(context))(); },
               static_cast<void*>(&blocking));
}

}  // namespace funcol
