#include "pyobjects/without_gil.h"

#include <torch/csrc/utils/pythoncapi_compat.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace funcol::python {
namespace {

std::atomic<std::thread::id> exiting_thread;

// Returns true if a Python thread that calls this cannot get the GIL anymore.
bool is_cut_off() {
  return (Py_IsFinalizing() != 0 || Py_IsInitialized() == 0) &&
         exiting_thread.load() != std::this_thread::get_id();
}

[[noreturn]] void sleep_until_process_ends() {
  for (;;) {
    std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

}  // namespace

void WithoutGil::restore() const noexcept {
  if (is_pythons_ && is_cut_off()) {
    sleep_until_process_ends();
  }
  if (state_ == nullptr) {
    return;
  }
  try {
    PyEval_RestoreThread(state_);
  } catch (...) {  // the unwinding: leaving this block would continue it, or terminate
    sleep_until_process_ends();
  }
}

void note_exiting_thread() { exiting_thread = std::this_thread::get_id(); }

}  // namespace funcol::python
