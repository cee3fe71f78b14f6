// Permission to query whether Works on a device have completed.
//
// Such a query reads a CUDA event. A query on a stream that is being captured into a CUDA graph ends the
// capture. While a capture is in progress elsewhere, a thread may query only in relaxed capture mode.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/cuda_library.h"

namespace funcol {

// Says whether a CUDA graph is being captured on the current stream. The Python bindings set one that asks
// PyTorch; the default says no.
using IsCapturing = bool (*)();
void set_is_capturing(IsCapturing is_capturing);

// To be called when a collective runs on CUDA tensors. Before the first call nothing asks about captures.
void note_cuda_is_used();

// Held while Works are asked.
class AskingDevices {
 public:
  AskingDevices();
  // False while the current stream is captured.
  bool is_allowed() const noexcept { return is_allowed_; }

 private:
  bool is_allowed_ = true;
  std::optional<kernels::RelaxedCapture> relaxed_;
};

}  // namespace funcol
