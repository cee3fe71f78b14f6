#include <cuda_runtime_api.h>

#include "kernels/capture_mode.h"

namespace funcol::kernels {
namespace {

int exchanged(int mode) {
  auto exchanged_mode = static_cast<cudaStreamCaptureMode>(mode);
  // Fails without a driver, where no graph is captured either.
  return cudaThreadExchangeStreamCaptureMode(&exchanged_mode) == cudaSuccess
             ? static_cast<int>(exchanged_mode)
             : mode;
}

}  // namespace

RelaxedCapture::RelaxedCapture() : mode_before_(exchanged(cudaStreamCaptureModeRelaxed)) {}
RelaxedCapture::~RelaxedCapture() { exchanged(mode_before_); }

}  // namespace funcol::kernels
