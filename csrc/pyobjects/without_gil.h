// Releases the GIL for the lifetime of an object.
#pragma once

#include <torch/csrc/python_headers.h>

namespace funcol::python {

// Does nothing if the thread does not hold the GIL. Cheaper than pybind11's gil_scoped_release, which also
// serves threads that Python does not know.
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
