// Whether Works on a device may be asked if they are over.
//
// The question is a query of an event, which must not come while a CUDA graph is captured: on the stream that
// is captured it ends the capture; on others it may come, if the thread says that it knows what it does.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/capture_mode.h"

namespace funcol {

// Says whether a CUDA graph is being captured on the current stream. The Python bindings set one that asks
// PyTorch; the default says no.
using IsCapturing = bool (*)();
void set_is_capturing(IsCapturing is_capturing);

// A collective runs on CUDA tensors: from now on the question above is asked.
void note_cuda_is_used();

// Held while Works are asked.
class AskingDevices {
 public:
  AskingDevices();
  // False while the current stream is captured. True where no CUDA tensor was ever seen.
  bool is_allowed() const noexcept { return is_allowed_; }

 private:
  bool is_allowed_ = true;
  std::optional<kernels::RelaxedCapture> relaxed_;
};

}  // namespace funcol
