// Lets go of the GIL for a while.
#pragma once

#include <torch/csrc/python_headers.h>

namespace funcol::python {

// While one lives, the thread is without the GIL, whether or not it had it. Cheaper than pybind11's, which
// also looks after threads that Python does not know.
class WithoutGil {
 public:
  WithoutGil() : state_(PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) {
      PyEval_RestoreThread(state_);
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace funcol::python
