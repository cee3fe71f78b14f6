// What a thread may ask a CUDA device while a graph is captured.
#pragma once

namespace funcol::kernels {

// While one of these lives, a query of an event by the current thread ends no capture of another stream, of
// this thread or another one. Does nothing in a build without CUDA.
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
