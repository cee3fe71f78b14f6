// Permission to query whether Works on a device have completed.
//
// Such a query reads a CUDA event. A query on a stream that is being captured into a CUDA graph ends the
// capture. While a capture is in progress elsewhere, a thread may query only in relaxed capture mode.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/cuda_library.h"

namespace funcol {

// A function that returns true if a CUDA graph is being captured on the current stream. The Python bindings
// set one that queries PyTorch; the default returns false.
using IsCapturing = bool (*)();
void set_is_capturing(IsCapturing is_capturing);

// Records that a collective runs on CUDA tensors. Before the first call, captures are not queried.
void note_cuda_is_used();

// A scope in which Works are queried.
class CaptureSafeQuery {
 public:
  CaptureSafeQuery();
  // Returns false while the current stream is captured.
  bool is_allowed() const noexcept { return is_allowed_; }

 private:
  bool is_allowed_ = true;
  std::optional<kernels::RelaxedCapture> relaxed_;
};

}  // namespace funcol
