#include "kernels/cuda/capture_mode.h"

#include <cuda_runtime_api.h>

#include "kernels/cuda/error_text.h"

namespace funcol::kernels::cuda {
namespace {

int exchanged(int mode) {
  auto exchanged_mode = static_cast<cudaStreamCaptureMode>(mode);
  // Fails without a driver, where no graph is captured either.
  const char* const error = error_text(cudaThreadExchangeStreamCaptureMode(&exchanged_mode));
  return error == nullptr ? static_cast<int>(exchanged_mode) : mode;
}

}  // namespace

int relax_capture_mode() { return exchanged(cudaStreamCaptureModeRelaxed); }

void set_capture_mode(int mode) { exchanged(mode); }

}  // namespace funcol::kernels::cuda
