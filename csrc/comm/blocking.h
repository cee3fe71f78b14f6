// What may wait for another thread: to be run without a lock that the other one may need first.
#pragma once

#include <type_traits>

namespace funcol {

// Runs its first argument on its second. The Python bindings set one that lets go of the GIL meanwhile; the
// default just calls.
using RunBlocking = void (*)(void (*blocking)(void* context), void* context);
void set_run_blocking(RunBlocking run);

void run_blocking(void (*blocking)(void* context), void* context);

template <typename Blocking>
void run_blocking(Blocking&& blocking) {
  run_blocking([](void* context) { (*static_cast<std::remove_reference_t<Blocking>*>(context))(); },
               static_cast<void*>(&blocking));
}

}  // namespace funcol
