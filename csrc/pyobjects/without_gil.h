// Releases the GIL for the lifetime of an object.
#pragma once

#include <torch/csrc/python_headers.h>

namespace funcol::python {

// A scope without the GIL; the thread need not hold it before. Cheaper than pybind11's gil_scoped_release,
// which also supports threads that Python does not know.
//
// Once the interpreter exits, no daemon thread gets the GIL back: Python ends the thread by unwinding its
// stack, which would terminate the process at the first noexcept function. The thread sleeps instead until
// the process has ended. So does a daemon thread that released the GIL before, as PyTorch does around each
// operator, and would acquire it next.
class WithoutGil {
 public:
  // Notes whether this is a Python thread: an interpreter that has ended no longer knows its threads.
  WithoutGil()
      : is_pythons_(PyGILState_GetThisThreadState() != nullptr),
        state_(PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() { restore(); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void restore() const noexcept;

  bool is_pythons_;
  PyThreadState* state_;
};

// Notes that the interpreter is about to exit on this thread, which can still get the GIL.
void note_exiting_thread();

}  // namespace funcol::python
