// The CUDA capture mode of a thread, relaxed for the lifetime of a guard.
#pragma once

namespace funcol::kernels {

// While a RelaxedCapture lives, the current thread may query events without breaking a CUDA graph capture
// that any thread has in progress. Does nothing where has_cuda_kernels() is false.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_before_ = 0;
};

}  // namespace funcol::kernels
