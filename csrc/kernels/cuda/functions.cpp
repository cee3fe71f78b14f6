// The functions that libfuncol_cuda.so exports.
#include "kernels/cuda/functions.h"

namespace funcol::kernels::cuda {
namespace {

int exchange_capture_mode(int mode) {
  auto exchanged = static_cast<cudaStreamCaptureMode>(mode);
  // The call fails without a driver, but then no graph is captured either.
  const char* const error = error_text(cudaThreadExchangeStreamCaptureMode(&exchanged));
  return error == nullptr ? static_cast<int>(exchanged) : mode;
}

constexpr CudaFunctions kFunctions = {
    .merge_shards = merge_shards,
    .split_shards = split_shards,
    .copy_boxes = copy_boxes,
    .fill_random = {fill_random<float>, fill_random<double>, fill_random<int64_t>, fill_random<bool>},
    .relax_capture_mode = [] { return exchange_capture_mode(cudaStreamCaptureModeRelaxed); },
    .set_capture_mode = [](int mode) { exchange_capture_mode(mode); }};

}  // namespace

extern "C" __attribute__((visibility("default"))) const CudaFunctions* funcol_cuda_functions() {
  return &kFunctions;
}

}  // namespace funcol::kernels::cuda
